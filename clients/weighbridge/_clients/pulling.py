"""One run of a planned pull in blocking steps. Each step takes a few milliseconds, or waits for the next bytes.

The blocking client executes the steps in the caller's thread, and the asyncio client in other threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

from opentelemetry.trace import INVALID_SPAN, Span

from weighbridge._clients.calls.pull_calls import PullPlan
from weighbridge._clients.transport import Transport
from weighbridge._core.layouts import Placement
from weighbridge._core.resources import Version
from weighbridge._core.striping import Striping
from weighbridge._formats.host_slices import HostSlices, Slices
from weighbridge._formats.tensor_stream import StreamWriter
from weighbridge._lane.loans import ReadLoan
from weighbridge._lane.local_lane import GRPC, LOCAL
from weighbridge._tracing import spans
from weighbridge._transport import pieces, rpc, wire
from weighbridge._transport.bulk import StreamReceiver, Way
from weighbridge._transport.request_parts import encoded_parts
from weighbridge.errors import DataLoss, FailedPrecondition, Unavailable, WeighbridgeError
from weighbridge.v1 import checkpoint_service_pb2, weight_service_pb2

if TYPE_CHECKING:
    import torch

_RUN_BYTES = 16 << 20
_RUN_TENSORS = 256

PullStep: TypeAlias = "Iterator[tuple[str, torch.Tensor]]"
"""Names and tensors that are available without waiting for more bytes. Each is created when the caller takes it; the
caller must take all of them before the next step.
"""


class PullRun:
    """One run of a pull. Only one thread may use it at a time; any other thread may stop it.

    Args:
        transport: transport for the weights.
        plan: the plan of the pull.

    Attributes:
        lane: lane of the weights, ``local`` or ``grpc``; empty before `borrow`.
        lane_reason: reason why the lane is not ``local``, if that was requested.
        span: span of the run, from `borrow` until the run is stopped.
    """

    def __init__(self, transport: Transport, plan: PullPlan) -> None:
        self.lane = self.lane_reason = ""
        self._lane = transport.lane
        self._plan = plan
        self._loan: ReadLoan | None = None
        self._receiver = StreamReceiver(
            self._open_at,
            transport.streams,
            nbytes=plan.nbytes,
            on_header=self._check,
            retry_seconds=transport.retry_seconds,
        )
        self._stopped = False
        self.span: Span = INVALID_SPAN

    @cached_property
    def _request(self) -> weight_service_pb2.LayoutRequest:
        return wire.request_to_proto(self._plan.request)

    def borrow(self) -> None:
        """Borrow the version in the service's memory, if this process can read it there. This is the first step."""
        version = self._plan.version
        self.span = spans.begin("weighbridge.pull", told(version, bytes=self._plan.nbytes), origin=version.traceparent)
        self._borrow(version)
        self.span.set_attribute("weighbridge.lane", self.lane)

    def _borrow(self, version: Version) -> None:
        self.lane, self.lane_reason = GRPC, ""
        if not self._lane.wanted:
            return
        try:
            if self._plan.dtype:
                raise FailedPrecondition("a cast is made by the service, and sent over gRPC")
            loan = self._lane.read(version.model, version.number, self._plan.request, self._plan.layout)
        except WeighbridgeError as error:
            self.lane_reason = self._lane.refused(error, f"pull of {version}")
            return
        self._loan, self.lane = loan, LOCAL
        if self._stopped:
            self._loan = None

    def tensors(self) -> Iterator[PullStep]:
        """Transfer the slices as tensors in host memory.

        If there is a loan, they come from it; otherwise they have their own memory.
        """
        import torch

        placements, specs = self._plan.layout.placements, self._plan.layout.tensors

        def allocate(index: int) -> torch.Tensor:
            shard = placements[index].shard
            return torch.empty(shard.box.extent, dtype=specs[shard.tensor].dtype.torch, device="cpu")

        if self._loan is None:
            return self._streamed(allocate)
        return self._borrowed(map(self._loan.tensor, range(len(placements))))

    def filled(self, tensor_for: Callable[[int], torch.Tensor]) -> Iterator[PullStep]:
        """Transfer the slices into tensors that the caller provides."""
        if self._loan is None:
            return self._streamed(tensor_for)
        return self._borrowed(self._loan.filled(tensor_for))

    def bring(self, buffer: torch.Tensor | None, *, pin: bool) -> Slices:
        """Transfer all slices to this machine, unless they are already there; with ``pin``, so that GPUs can copy from
        them immediately.
        """
        if self._loan is not None:
            if pin:
                self._loan.pin()
            return self._loan
        slices = HostSlices(self._plan.layout, buffer, pin=pin)
        for step in self._streamed(slices.tensor):
            deque(step, maxlen=0)
        return slices

    def stream(self) -> Iterator[memoryview]:
        """Yield the checked bytes of the slices over gRPC, concatenated, in pieces of at most 1 MiB."""
        return iter(self._receiver)

    def stop(self) -> None:
        """End the run.

        Borrowed memory is returned, and a caller that executes a step gets `Unavailable`, unless the run is at its end.
        """
        self._stopped = True
        self._loan = None
        self._receiver.stop()
        self.span.end()

    def _streamed(self, tensor_for: Callable[[int], torch.Tensor]) -> Iterator[PullStep]:
        writer = StreamWriter(self._plan.layout, tensor_for)
        placements = self._plan.layout.placements
        for data in self._receiver:
            yield ((placements[index].shard.tensor, tensor) for index, tensor in writer.feed(data))

    def _borrowed(self, tensors: Iterator[torch.Tensor]) -> Iterator[PullStep]:
        placements = self._plan.layout.placements

        def step(indexes: range) -> PullStep:
            for index in indexes:
                if self._stopped:
                    raise Unavailable("the pull was stopped: its client has been closed")
                yield placements[index].shard.tensor, next(tensors)

        return map(step, _runs(placements))

    def _open_at(
        self, way: Way, striping: Striping, offset: int
    ) -> Iterable[pieces.Carried[weight_service_pb2.PullResponse]]:
        request = weight_service_pb2.PullRequest(
            model=self._plan.version.model,
            version=str(self._plan.version.number),
            layout=self._request,
            offset=offset,
            dtype=self._plan.dtype,
            striping=wire.striping_to_proto(striping),
        )
        return rpc.streamed(
            way.channel,
            "/weighbridge.v1.WeightService/Pull",
            encoded_parts(request),
            pieces.decoder(weight_service_pb2.PullResponse),
            (*way.metadata, *spans.headers(self.span)),
        )

    def _check(self, header: checkpoint_service_pb2.StreamHeader) -> None:
        planned = self._plan.nbytes
        if header.stream_bytes != planned:
            raise DataLoss(f"a stream of {header.stream_bytes} bytes came, and {planned} were planned")


def told(version: Version, **more: str | int) -> dict[str, str | int]:
    """Return attributes of spans that identify a version."""
    named = {"model": version.model, "version": version.number, **more}
    return {f"weighbridge.{name}": value for name, value in named.items()}


def _runs(placements: Sequence[Placement]) -> Iterator[range]:
    """Yield the indexes of placements, in runs that take some milliseconds to copy."""
    begin = nbytes = 0
    for index, placement in enumerate(placements):
        nbytes += placement.nbytes
        if nbytes >= _RUN_BYTES or index + 1 - begin == _RUN_TENSORS:
            yield range(begin, index + 1)
            begin, nbytes = index + 1, 0
    if begin < len(placements):
        yield range(begin, len(placements))
