"""Waiting in tests, and what something costs on machines that have much else to do."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from weighbridge_service.push.pending import Pending

T = TypeVar("T")


def eventually(condition: Callable[[], object]) -> None:
    """Wait until something holds that must come to hold."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def processor_seconds(action: Callable[[], object]) -> float:
    """Seconds of a processor that something takes in this process, its threads included; waits, and other processes'
    work, cost none.
    """
    begun = time.process_time()
    action()
    return time.process_time() - begun


def answered(pending: Pending[T]) -> T:
    """Result of a push, awaited in this thread for the call's own timeout."""
    done = concurrent.futures.wait([pending.future], pending.seconds).done
    pending.leave()
    return pending.finish(bool(done))
