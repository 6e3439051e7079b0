"""HTTP servers on loopback that answer JSON with JSON, in the place of an engine's."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, Mapping[str, Any]]
"""Status and content."""


@contextmanager
def json_server(answer: Callable[[str, dict[str, Any]], Answer], *, key: Callable[[], str] = str) -> Iterator[str]:
    """The URL of a server that answers until the end.

    Args:
        answer: gives the answer to a path and the content of a request, which is empty if there is none.
        key: gives what requests must bring as a bearer token; empty for nothing.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
            known = not key() or self.headers.get("Authorization") == f"Bearer {key()}"
            status, content = answer(self.path, body) if known else (401, {"error": {"message": "Unauthorized"}})
            said = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        do_POST = do_GET

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
