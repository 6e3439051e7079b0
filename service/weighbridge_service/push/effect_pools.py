"""Thread pools that carry out the effects of all pushes, with a limit for each kind."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from weighbridge.errors import Unavailable
from weighbridge_service.push.machine import effects as do
from weighbridge_service.push.machine.effects import Pool
from weighbridge_storage.threads import ThreadPool

log = logging.getLogger(__name__)

IMAGES = 8
"""Number of images allocated at the same time. Allocating new memory takes seconds."""

_MOST = {
    Pool.PLAN: 2,
    Pool.IMAGE: IMAGES,
    Pool.DIGEST: 2,
    Pool.UPLOAD: 2,  # files of all versions; the store uploads the parts of a file in parallel
    Pool.READ: 8,
    Pool.LEASE: 8,
    Pool.CONFIRM: 4,
    Pool.PUBLISH: 8,
    Pool.CLEAN: 4,
    Pool.HANDOVER: 2,
}


class EffectPools:
    """Pools of all kinds of effects. Thread-safe."""

    def __init__(self) -> None:
        self._pools: dict[Pool | None, ThreadPool] = {
            pool: ThreadPool(f"push-{pool}", most) for pool, most in _MOST.items()
        }
        self._stopping = threading.Event()

    @property
    def stopping(self) -> bool:
        """Whether the service stops: effects that have not started are dropped."""
        return self._stopping.is_set()

    def submit(self, effect: do.Effect, carry_out: Callable[[], None]) -> None:
        """Queue an effect. It never runs if the service stops first.

        Raises ResourceExhausted if the system has no thread for it.
        """
        with suppress(Unavailable):
            self._pools[effect.POOL].submit(carry_out).add_done_callback(_log_failure)

    def stop(self, seconds: float) -> None:
        """Start no further effects, and wait up to ``seconds`` for those that are running."""
        self._stopping.set()
        deadline = time.monotonic() + seconds
        for pool in self._pools.values():
            pool.close()
        for pool in self._pools.values():
            pool.close(max(deadline - time.monotonic(), 0.0))


def _log_failure(done: Future[None]) -> None:
    """Log the error of an effect, because no caller waits for the effect."""
    error = None if done.cancelled() else done.exception()
    if error is not None and not isinstance(error, Unavailable):  # Unavailable: the service stops
        log.error("an effect of a push failed", exc_info=error)
