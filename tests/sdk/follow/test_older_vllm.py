"""Does the driver update a vLLM that has no label for its weights, as 0.24, and put one on those that have?

The server has the routes of that release (``entrypoints/serve/dev``), or those of 0.29 besides.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from weighbridge.follow.vllm import VllmServer


@contextmanager
def vllm(has_labels: bool, labels: list[str]) -> Iterator[str]:
    """A server of one worker that can do what it is asked for."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(
                {"weight_version": labels[-1]} if has_labels and self.path == "/weight_info" else None
            )

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/collective_rpc":
                assert body == {"method": "weighbridge_apply", "args": ["2"]}
                self._answer({"results": [{"served": "acme/tiny@2", "failed": ""}]})
            elif has_labels and self.path == "/update_weight_version":
                labels.append(body["new_version"])
                self._answer({})
            else:
                self._answer(None)

        def _answer(self, body: dict[str, Any] | None) -> None:
            self.send_response(404 if body is None else 200)
            self.end_headers()
            self.wfile.write(json.dumps(body or {"detail": "Not Found"}).encode())

        def log_message(self, *_arguments: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("has_labels", "expected"), [(False, ["default"]), (True, ["default", "acme/tiny@2"])]
)
def test_a_label_is_put_on_weights_where_the_release_has_one(has_labels: bool, expected: list[str]) -> None:
    labels = ["default"]
    with vllm(has_labels, labels) as url:
        VllmServer(url, "acme/tiny", "127.0.0.1:50051").apply(2, "acme/tiny@2")
    assert labels == expected
