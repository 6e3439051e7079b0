"""Places of engines: which machine and process an agent is, and where others reach its engine."""

from __future__ import annotations

import os
import socket
import uuid
from urllib.parse import urlsplit

from weighbridge._core.engines.facts import EngineFacts

_HERE = {"127.0.0.1", "localhost", "::1", "0.0.0.0", "::"}  # noqa: S104  # no address to listen at


def first_facts(model: str, kind: str, address: str, ref: str) -> EngineFacts:
    """The facts of an engine before anything is known of it; its id is a new one."""
    host = socket.gethostname()
    return EngineFacts(
        uuid.uuid4().hex[:16],
        model,
        kind,
        address_from_elsewhere(address, host) if address else "",
        ref,
        host=host,
        pid=os.getpid(),
    )


def address_from_elsewhere(url: str, host: str) -> str:
    """A server's address as others name it: without what may be secret in it, and by this machine's name where it says no more than here."""
    parts = urlsplit(url)
    try:
        name, port = parts.hostname or "", parts.port
    except ValueError:
        return ""
    name = host if name in _HERE else name
    name = f"[{name}]" if ":" in name else name
    return f"{parts.scheme}://{name}{'' if port is None else f':{port}'}" if name else ""
