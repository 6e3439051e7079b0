"""Staging of a version while it is still being received: parameter by parameter, each when all tensors that it is made of have arrived."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from weighbridge._core.pauses import DICE
from weighbridge._core.resources import Version
from weighbridge._lane.loans import ReadLoan
from weighbridge._lazy.recording import RecordedCopy, Recording
from weighbridge._lazy.staging import StagingPlace, flat, on_stream_of, part_of
from weighbridge._memory import word_sums
from weighbridge._memory.cuda_copies import Reached
from weighbridge.errors import FailedPrecondition

log = logging.getLogger(__name__)

_ROUND_BYTES = 256 << 20
"""Of parameters that are staged between two looks."""
_AGAIN_BYTES = 64 << 20
"""Of parameters that are compared a second time when the version is ready."""
_MOST_THREADS = 8


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A parameter that can be staged.

    Attributes:
        tensor: its place.
        copies: the steps that fill it.
        slices: indexes of the slices that these copy, in their order.
        word: bytes of the words whose sum is compared.
    """

    tensor: torch.Tensor
    copies: tuple[RecordedCopy, ...]
    slices: tuple[int, ...]
    word: int


class Arrived:
    """A version that is ready, to be taken from where it was read while it arrived, as if it had been pulled.

    Args:
        version: the version.
        loan: of its slices.
    """

    lane = "local"

    def __init__(self, version: Version, loan: ReadLoan) -> None:
        self.version = version
        self.layout = loan.layout
        self.nbytes = loan.layout.nbytes
        self._loan: ReadLoan | None = loan

    def bring(self, buffer: torch.Tensor | None = None, *, pin: bool = False) -> ReadLoan:
        """See `Pull.bring`: the slices are there. The loan is the caller's from then on, and ends with the result."""
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


class EarlyStaging:
    """Parameters of one version, staged while the version is still being received. For one thread.

    Staged bytes are private until the version is ready, and count only if no byte that had arrived could be written again (`ArrivalMarks.hold`),
    and if the sum of their words is that of the bytes that they were copied from, which is made from the service's memory after the copy, and a
    second time of some of them when the version is ready.

    Args:
        recording: of the engine's loader.
        loan: of the version, with its arrivals.
        place: where to; None stages nothing, and only prepares the copies from the service's memory to GPUs.
    """

    def __init__(self, recording: Recording, loan: ReadLoan, place: StagingPlace | None) -> None:
        if loan.arrivals is None:
            raise FailedPrecondition("the version has been borrowed when it was ready")
        self._loan = loan
        self._arrivals = loan.arrivals
        self._device = torch.device("cpu") if place is None else place.device
        self._queue = loan.queue()
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]  # torch's own
        self._asked: deque[tuple[Reached, dict[str, _Parameter]]] = deque()
        self._left = {} if place is None else _parameters(recording, loan, place)
        self._seen = -1
        self._sums: dict[str, tuple[_Parameter, torch.Tensor, Future[int]]] = {}
        self._threads = max(1, min(len(os.sched_getaffinity(0)) // 2, _MOST_THREADS))
        # one of Python's: each more would take turns with the engine, which computes in the same process
        self._pool = ThreadPoolExecutor(1, "compare-staged")

    @property
    def tensors_digest(self) -> str:
        """`ArrivalMarks.tensors_digest` of the version."""
        return self._arrivals.tensors_digest

    @property
    def count(self) -> int:
        """Number of parameters that are staged."""
        return len(self._sums)

    @property
    def done(self) -> bool:
        """Whether nothing more can be staged before the version is ready."""
        return not (self._left or self._asked) or not self._arrivals.hold

    def pin(self) -> None:
        """Register the service's memory with CUDA, and plan the copies from it."""
        self._loan.pin()

    def taking(self) -> AbstractContextManager[object]:
        """Block in which is taken. At its end nothing is copied to the place any more: others may write to it."""
        return self._queue

    def take(self) -> bool:
        """Stage some of what has arrived; whether there was anything."""
        # a stream of its own: the engine computes on the current one
        with on_stream_of(self._device, self._stream), torch.no_grad():
            return self._take()

    def _take(self) -> bool:
        found = self._next()
        if found:
            begun = time.monotonic()
            self._loan.fill(
                (
                    (index, part_of(each.tensor, copy.part))
                    for each in found.values()
                    for index, copy in zip(each.slices, each.copies, strict=True)
                ),
                self._queue,
            )
            self._asked.append((self._queue.reached(), found))
            log.debug("copies of %d parameters asked for in %.4f s", len(found), time.monotonic() - begun)
        # while a round is copied the next one is asked for
        while len(self._asked) > bool(found):
            reached, copied = self._asked.popleft()
            reached.wait()
            for name, each in copied.items():
                self._sums[name] = (
                    each,
                    word_sums.sum_of(flat(each.tensor), each.word),
                    self._sum_again(each),
                )
        return bool(found)

    def _next(self) -> dict[str, _Parameter]:
        """Parameters that have arrived and are to be staged next."""
        count = self._arrivals.count
        if count == self._seen:
            return {}
        found: dict[str, _Parameter] = {}
        nbytes = 0
        for name, parameter in self._left.items():
            if self._arrivals.arrived(parameter.slices):
                found[name] = parameter
                nbytes += parameter.tensor.nbytes
                if nbytes >= _ROUND_BYTES:
                    break
        else:
            self._seen = count
        for name in found:
            del self._left[name]
        return found

    def arrived(self, version: Version) -> Arrived | None:
        """The version, which is ready by now, to be taken from where it was read early; None if bytes may have been written again."""
        return Arrived(version, self._loan) if self._arrivals.hold else None

    def agreed(self) -> frozenset[str]:
        """Names of the parameters whose staged bytes are those of the version, which is ready and has `arrived`."""
        staged = torch.stack([found for _, found, _ in self._sums.values()]).tolist() if self._sums else []
        sums = dict(zip(self._sums, staged, strict=True))
        again = {name: self._sum_again(self._sums[name][0]) for name in self._some()}
        wrong = {name for name, (_, _, host) in self._sums.items() if host.result() != sums[name]}
        wrong |= {name for name, host in again.items() if host.result() != sums[name]}
        for name in wrong:
            log.warning("%s was read before it had arrived whole, and is brought again", name)
        return frozenset(self._sums.keys() - wrong)

    def close(self) -> None:
        """Give back what was borrowed, when nothing is copied from it any more."""
        self._queue.close()
        self._pool.shutdown(cancel_futures=True)
        self._left, self._sums = {}, {}

    def _sum_again(self, parameter: _Parameter) -> Future[int]:
        """Begin to add up a parameter's words where they were copied from."""
        pieces = [words for index in parameter.slices for words in self._loan.words(index, parameter.word)]
        return self._pool.submit(word_sums.total, pieces, self._threads)

    def _some(self) -> list[str]:
        names, nbytes = list(self._sums), 0
        DICE.shuffle(names)
        for count, name in enumerate(names):
            nbytes += self._sums[name][0].tensor.nbytes
            if nbytes > _AGAIN_BYTES:
                return names[: count + 1]
        return names


def _parameters(recording: Recording, loan: ReadLoan, place: StagingPlace) -> dict[str, _Parameter]:
    """The parameters that can be staged one by one: to which boxes come as they are, and of which no byte is left out."""
    found = {}
    for name, tensor in place.tensors(recording.whole).items():
        copies = recording.plain.get(name, ())
        if not copies or sum(copy.part.numel for copy in copies) * tensor.itemsize != flat(tensor).nbytes:
            continue
        slices = tuple(recording.boxes[copy.tensor, copy.box] for copy in copies)
        words = (loan.word_of(index) for index in slices)
        word = math.gcd(tensor.data_ptr(), *(copy.part.offset * tensor.itemsize for copy in copies), *words)
        found[name] = _Parameter(tensor, copies, slices, word)
    return found
