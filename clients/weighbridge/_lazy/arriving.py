"""Staging of a version while it is still being received: each parameter is staged when all of its tensors have
arrived.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from weighbridge._core.pauses import DICE
from weighbridge._core.resources import Version
from weighbridge._lane.loans import ReadLoan
from weighbridge._lazy.early_plan import EarlyPlan, plan_for
from weighbridge._lazy.recording import Recording
from weighbridge._lazy.staging import StagingPlace, on_stream_of
from weighbridge._memory.byte_rows import copy_rows
from weighbridge._memory.cuda_copies import Reached
from weighbridge._memory.native_copies import has_extension, sum_natively
from weighbridge.errors import FailedPrecondition

log = logging.getLogger(__name__)

_ROUND_BYTES = 256 << 20
"""Bytes of parameters that are staged between two checks for arrivals."""
_AGAIN_BYTES = 64 << 20
"""Bytes of parameters that are compared a second time when the version is ready."""
_MOST_THREADS = 8
_NONE = np.empty(0, np.int64)


class Arrived:
    """A ready version whose slices were read while it arrived, in place of a pull.

    Args:
        version: the version.
        loan: loan of its slices.
    """

    lane = "local"

    def __init__(self, version: Version, loan: ReadLoan) -> None:
        self.version = version
        self.layout = loan.layout
        self.nbytes = loan.layout.nbytes
        self._loan: ReadLoan | None = loan

    def bring(self, buffer: torch.Tensor | None = None, *, pin: bool = False) -> ReadLoan:
        """See `Pull.bring`: the slices are already here.

        The loan is the caller's from then on, and ends with the result.
        """
        loan = self._take()
        if pin:
            loan.pin()
        return loan

    def filled(self, tensor_for: Callable[[int], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Pull.filled`."""
        names = (placement.shard.tensor for placement in self.layout.placements)
        return zip(names, self._take().filled(tensor_for), strict=True)

    def _take(self) -> ReadLoan:
        loan, self._loan = self._loan, None
        if loan is None:
            raise FailedPrecondition(f"{self.version} has been taken already", fix="pull it")
        return loan


class _Staged(NamedTuple):
    """Parameters whose bytes are staged.

    Attributes:
        numbers: their numbers in the plan.
        sums: sums of their staged words, ``int64``, on the place's device.
        sources: sums of the words that they were copied from.
    """

    numbers: NDArray[np.int64]
    sums: torch.Tensor
    sources: Future[NDArray[np.int64]]


class EarlyStaging:
    """Staging of one version's parameters while the version is still being received. For one thread.

    Staged bytes are private until the version is ready. They count only if no arrived byte could be written again
    (`ArrivalMarks.hold`), and if the sum of their words is that of their source. The sum of the source is computed from
    the service's memory after the copy, and for some parameters a second time when the version is ready.

    The engine computes in the same process, so long operations are done for many parameters in one call, without the
    interpreter's lock.

    Args:
        recording: recording of the engine's loader.
        loan: loan of the version, with its arrivals.
        place: target; None stages nothing, and only prepares the copies from the service's memory to GPUs.

    Raises:
        FailedPrecondition: the version does not arrive in memory, or the C extension is missing.
    """

    def __init__(self, recording: Recording, loan: ReadLoan, place: StagingPlace | None) -> None:
        addresses = loan.addresses
        if loan.arrivals is None or not addresses:
            raise FailedPrecondition("the version does not arrive in memory")
        if not has_extension():
            raise FailedPrecondition("the C extension is missing")
        self._loan = loan
        self._arrivals = loan.arrivals
        self._device = torch.device("cpu") if place is None else place.device
        self._queue = loan.queue()
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]  # torch's own
        self._threads = max(1, min(len(os.sched_getaffinity(0)) // 2, _MOST_THREADS))
        self._plan = None if place is None else plan_for(recording, loan, place)
        self._rows = np.empty((0, 6), np.int64) if self._plan is None else self._plan.rows_at(addresses)
        count = 0 if self._plan is None else len(self._plan.names)
        self._left = np.ones(count, np.bool_)
        self._asked: deque[tuple[Reached, NDArray[np.int64]]] = deque()
        self._seen = -1
        self._staged: list[_Staged] = []
        # one Python thread: each further one would compete with the engine's for the interpreter's lock
        self._pool = ThreadPoolExecutor(1, "compare-staged")

    @property
    def tensors_digest(self) -> str:
        """`ArrivalMarks.tensors_digest` of the version."""
        return self._arrivals.tensors_digest

    @property
    def count(self) -> int:
        """Number of staged parameters."""
        return sum(len(each.numbers) for each in self._staged)

    @property
    def done(self) -> bool:
        """Whether nothing more can be staged before the version is ready."""
        return not (self._left.any() or self._asked) or not self._arrivals.hold

    def pin(self) -> None:
        """Register the service's memory with CUDA, and plan the copies from it."""
        self._loan.pin()

    def taking(self) -> AbstractContextManager[object]:
        """Context for `take`. When it ends, no copies to the place are in progress, and others may write to it."""
        return self._queue

    def take(self) -> bool:
        """Stage some parameters that have arrived. Returns whether there were any."""
        if self._plan is None or not (self._asked or self._arrivals.count != self._seen):
            return False
        # a stream of its own: the engine computes on the current one
        with on_stream_of(self._device, self._stream), torch.no_grad():
            return self._take(self._plan)

    def _take(self, plan: EarlyPlan) -> bool:
        found = self._next(plan)
        if len(found):
            rows = self._rows[self._are_of(plan, found)]
            if self._device.type == "cuda":
                self._queue.move(rows, self._device)
            else:
                copy_rows(rows, self._threads)
            self._asked.append((self._queue.reached(), found))
        # while one round is copied, the next one is submitted
        while len(self._asked) > (len(found) > 0):
            reached, copied = self._asked.popleft()
            reached.wait()
            sums = torch.stack([plan.words[number].sum(dtype=torch.int64) for number in copied.tolist()])
            self._staged.append(_Staged(copied, sums, self._pool.submit(self._sums, plan, copied)))
        return len(found) > 0

    def _next(self, plan: EarlyPlan) -> NDArray[np.int64]:
        """Parameters that have arrived and are to be staged next."""
        count = self._arrivals.count
        if count == self._seen or not self._left.any():
            self._seen = count
            return _NONE
        arrived = np.logical_and.reduceat(self._arrivals.of(plan.slices), plan.first_slices)
        found = np.flatnonzero(arrived & self._left)
        fit = int(np.searchsorted(plan.nbytes[found].cumsum(), _ROUND_BYTES)) + 1
        if fit >= len(found):
            self._seen = count
        found = found[:fit]
        self._left[found] = False
        return found

    def arrived(self, version: Version) -> Arrived | None:
        """The version, now ready, with the slices that were read early; None if bytes may have been written again."""
        return Arrived(version, self._loan) if self._arrivals.hold else None

    def agreed(self) -> frozenset[str]:
        """Names of the parameters whose staged bytes are the version's; the version is ready and has `arrived`."""
        if self._plan is None or not self._staged:
            return frozenset()
        numbers = np.concatenate([each.numbers for each in self._staged])
        staged = torch.cat([each.sums for each in self._staged]).cpu().numpy()
        right = staged == np.concatenate([each.sources.result() for each in self._staged])
        again = self._some(self._plan.nbytes[numbers])
        right[again] &= staged[again] == self._sums(self._plan, numbers[again])
        for number in numbers[~right].tolist():
            log.warning("%s was read before it had fully arrived, and is loaded again", self._plan.names[number])
        return frozenset(self._plan.names[number] for number in numbers[right].tolist())

    def close(self) -> None:
        """Return the loan once no copies from it are in progress."""
        self._queue.close()
        self._pool.shutdown(cancel_futures=True)
        self._left, self._staged = np.empty(0, np.bool_), []

    def _are_of(self, plan: EarlyPlan, numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Mask of the rows that fill some parameters."""
        chosen = np.zeros(len(plan.names), np.bool_)
        chosen[numbers] = True
        return chosen[plan.owners]

    def _sums(self, plan: EarlyPlan, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sums of the words of some parameters at their source."""
        rows = self._are_of(plan, numbers)
        found = sum_natively(self._rows[rows], plan.row_words[rows], self._threads)
        sums = np.zeros(len(plan.names), np.int64)
        np.add.at(sums, plan.owners[rows], found)
        return sums[numbers]

    @staticmethod
    def _some(nbytes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Indexes of randomly chosen parameters, up to `_AGAIN_BYTES` together."""
        order = list(range(len(nbytes)))
        DICE.shuffle(order)
        return np.array(order[: int(np.searchsorted(nbytes[order].cumsum(), _AGAIN_BYTES)) + 1], np.int64)
