"""Tracebacks in the log: what a service must not write, whatever its clients send."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _Tracebacks(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = logging.Formatter().format(record)
        if "Traceback" in text:
            self.found.append(text)


@contextmanager
def tracebacks() -> Iterator[list[str]]:
    """Records that any library logs with a traceback in this process while the block runs."""
    handler = _Tracebacks()
    logging.getLogger().addHandler(handler)
    try:
        yield handler.found
    finally:
        logging.getLogger().removeHandler(handler)
