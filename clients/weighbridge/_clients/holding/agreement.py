"""Agreement of the ranks of one push, through the store of their process group: either all of them push, or none.

The agreement is not a collective: it does not need a GPU, an order among other collectives or a particular thread, and
an absent rank does not block the others for longer than they allow. Each rank increments a count, and the rank that
completes it writes the verdict ``go``. A rank that cannot push, or that stops waiting, writes another verdict. Ranks
write the verdict by compare-and-swap, so the first one stands and all ranks read the same verdict.

Keys, below ``weighbridge/<model>/<request>/<attempt>``: ``count``, ``here/<rank>`` until the verdict, ``verdict``,
``says/<rank>``; and for all pushes ``weighbridge/said/<digest>``.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

from weighbridge._core.text.shortening import shortened
from weighbridge.errors import WeighbridgeError

_GO, _NO = b"go", b"no:"
_POLL_PART = 0.05
"""Pause between two polls of the store, as a share of the time waited so far. As a result, a late rank is noticed soon,
and a store of many ranks is rarely polled.
"""
_POLL_SECONDS = 0.001, 0.2
"""Minimum and maximum pause."""
_MOST_REASON = 400
"""Maximum number of characters of a reason that other ranks receive."""

_GONE = RuntimeError
"""Error of a store that has ended, for example with the job.

It does not decide the agreement; waits end by their timeouts.
"""

_lock = threading.Lock()
_begun: Counter[str] = Counter()
_refused: Counter[str] = Counter()
_clones: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""The client's own connections, by the stores from which they were cloned. References are weak, because a store's
server frees its port only when the last reference to the store is gone.
"""


@dataclass(frozen=True)
class RankAgreement:
    """One rank's part in the agreement on one push.

    Attributes:
        prefix: prefix of the agreement's keys, the same on all ranks.
        rank: this rank in the process group.
        ranks: number of ranks.
        store: store of the process group.
        name: name of the push, the same for all attempts at it.
    """

    prefix: str
    rank: int
    ranks: int
    store: Any = field(repr=False)
    name: str = ""

    @staticmethod
    def of_process_group(model: str, request_id: str, ranks: int) -> RankAgreement | None:
        """Return the agreement on a push that all ranks of torch.distributed make; None if there is no process group,
        or the push has other ranks.

        All ranks must call this equally often for a push: a second call for the same push begins another agreement.
        """
        import torch.distributed as dist

        if ranks < 2 or not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() != ranks:
            return None
        store = _store()
        if store is None:
            return None
        name = f"weighbridge/{model}/{request_id}"
        with _lock:
            _begun[name] += 1
            attempt = _begun[name]
        return RankAgreement(f"{name}/{attempt}", dist.get_rank(), ranks, store, name)

    @property
    def refused_before(self) -> int:
        """Number of attempts at this push that all ranks have given up. Ranks do not use a failed attempt again."""
        return _refused[self.name]

    def fail(self, error: BaseException) -> None:
        """Record that this rank's call has failed. All ranks do so if the verdict is not to push."""
        self.refuse(error)
        if self.problem():
            with _lock:
                _refused[self.name] += 1

    def behind(self) -> RankAgreement:
        """The agreement on the push that follows this one in the same call."""
        return replace(self, prefix=f"{self.prefix}/behind")

    def ahead(self) -> RankAgreement:
        """The agreement to start the collective that precedes this push."""
        return replace(self, prefix=f"{self.prefix}/ahead")

    def refuse(self, error: BaseException) -> bool:
        """Write the verdict that this rank cannot push, unless a verdict already exists. Does not wait.

        Returns:
            Whether no other verdict existed.
        """
        said = error.message if isinstance(error, WeighbridgeError) else repr(error)
        if isinstance(error, WeighbridgeError) and error.details:
            said += f"; {'; '.join(error.details)}"
        return self._decide(_NO + shortened(f"rank {self.rank}: {said}", _MOST_REASON).encode())

    def say(self, data: bytes) -> None:
        """Publish a message to the other ranks, before `come`. Equal messages of several ranks are stored once."""
        digest = hashlib.sha256(data).hexdigest()
        with contextlib.suppress(_GONE):
            self.store.set(f"weighbridge/said/{digest}", data)
            self.store.set(self._key(f"says/{self.rank}"), digest)

    def said(self) -> list[bytes]:
        """Return the distinct messages of all ranks. They are complete once the verdict is ``go``."""
        digests = {self.store.get(self._key(f"says/{rank}")).decode() for rank in range(self.ranks)}
        return [bytes(self.store.get(f"weighbridge/said/{digest}")) for digest in sorted(digests)]

    def forget(self) -> None:
        """Delete this rank's message, after all ranks have read it."""
        with contextlib.suppress(_GONE):
            self.store.delete_key(self._key(f"says/{self.rank}"))

    def come(self) -> None:
        """Record that this rank agrees to the push."""
        with contextlib.suppress(_GONE):
            self.store.set(self._key(f"here/{self.rank}"), b"1")
            if self.store.add(self._key("count"), 1) == self.ranks:
                self._decide(_GO)

    def problem(self) -> str:
        """Return the reason why the ranks do not push; empty if the verdict does not contain one."""
        with contextlib.suppress(_GONE):
            if self.store.check([self._key("verdict")]):
                return _problem_of(self.store.get(self._key("verdict")))
        return ""

    def decided(self, seconds: float) -> bool:
        """Wait for the verdict, for at most ``seconds``, and return whether it exists."""
        began = time.monotonic()
        while True:
            with contextlib.suppress(_GONE):
                if self.store.check([self._key("verdict")]):
                    return True
            waited = time.monotonic() - began
            if waited >= seconds:
                return False
            # the store's own wait would block its other users, and torch logs each of its timeouts
            pause = min(max(waited * _POLL_PART, _POLL_SECONDS[0]), _POLL_SECONDS[1])
            time.sleep(min(pause, seconds - waited))

    def absent(self) -> list[int]:
        """Return the ranks that have not agreed yet."""
        ranks = range(self.ranks)
        with contextlib.suppress(_GONE):
            return [rank for rank in ranks if not self.store.check([self._key(f"here/{rank}")])]
        return []

    def done(self) -> None:
        """Delete this rank's key of the agreement. The verdict is kept for late ranks."""
        with contextlib.suppress(_GONE):
            self.store.delete_key(self._key(f"here/{self.rank}"))

    def _decide(self, verdict: bytes) -> bool:
        """Write the verdict, unless one already exists.

        Return whether the verdict in the store is this one or unknown.
        """
        text = verdict.decode(errors="replace")
        with contextlib.suppress(_GONE):
            return bool(self.store.compare_set(self._key("verdict"), "", text) == text.encode())
        return True

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}"


def _problem_of(verdict: bytes) -> str:
    return "" if verdict == _GO else verdict.removeprefix(_NO).decode(errors="replace")


def _store() -> Any:
    """Return a separate connection to the store of the default process group, so that other users of the store do not
    wait; None if there is no store.
    """
    from torch.distributed import distributed_c10d

    try:
        store: Any = distributed_c10d._get_default_store()
    except (ValueError, RuntimeError, AttributeError):
        return None
    with _lock:
        own = _clones.get(store)
        if own is None:
            try:
                own = _clones[store] = store.clone()
            except (AttributeError, RuntimeError, NotImplementedError, TypeError):  # before torch 2.8
                return store
    return own
