"""Pull on an event loop. Threads carry it out, and it ends when its task is cancelled."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, closing, contextmanager
from contextvars import copy_context
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING
from weakref import WeakSet

from weighbridge._clients.adapter_filling import adapter_target
from weighbridge._clients.calls.pull_calls import PullPlan, described, plan_boxes
from weighbridge._clients.calls.steps import Steps
from weighbridge._clients.filling import Filled, fill_tensors, fit
from weighbridge._clients.pulling import PullRun, PullStep
from weighbridge._clients.transport import Transport
from weighbridge._formats.host_slices import Slices
from weighbridge.aio.connection import AsyncConnection
from weighbridge.aio.threads import Threads

if TYPE_CHECKING:
    import torch

    FilledTensors = Callable[[Callable[[int], torch.Tensor]], Iterable[tuple[str, torch.Tensor]]]

__all__ = ["AsyncPull"]


class Carrier:
    """Threads and transport for the pulls of one client.

    Args:
        transport: transport for the weights.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.threads = Threads()
        self._running: WeakSet[PullRun] = WeakSet()

    @contextmanager
    def transfer(self, plan: PullPlan) -> Iterator[PullRun]:
        """Return one run of a pull; it is stopped at the end."""
        transfer = PullRun(self.transport, plan)
        self._running.add(transfer)
        try:
            yield transfer
        finally:
            transfer.stop()
            self._running.discard(transfer)

    async def close(self) -> None:
        """Stop all runs, and close the connections."""
        for transfer in list(self._running):
            transfer.stop()
        await self.threads.run_or_leave(self.transport.close)  # it waits for a lane that is being opened
        self.threads.close()


class AsyncPull:
    """A pull that has not started yet. ``async for name, tensor in pull`` yields each tensor as soon as it is complete.

    It yields the same tensors as `weighbridge.Pull`. Iterating again pulls the same version again. If the task is
    cancelled or the iteration is closed, the pull cancels calls in flight, releases borrowed memory, and no longer
    writes to tensors.

    Attributes:
        lane: lane of the tensors, ``local`` or ``grpc``; empty before it is chosen.
        lane_reason: reason why the lane was not ``local``, if that was requested.
    """

    def __init__(
        self,
        carrier: Carrier,
        connection: AsyncConnection,
        planning: Callable[[], Steps[PullPlan]],
    ) -> None:
        self.lane = self.lane_reason = ""
        self._carrier = carrier
        self._connection = connection
        self._planning = planning
        self._plan: PullPlan | None = None

    def __repr__(self) -> str:
        if self._plan is None:
            return "<AsyncPull, not planned yet>"
        lane = f", by the {self.lane} lane" if self.lane else ""
        return f"<AsyncPull of {self._plan.version}: {described(self._plan)}{lane}>"

    async def plan(self) -> PullPlan:
        """Resolve the version and its slices. The version does not change if the ref moves later.

        All other methods do this first.

        Raises:
            NotFound: the model, version, ref or tensor does not exist.
            InvalidArgument: the layout does not fit the model, or a tensor cannot be cast (names the tensor).
            FailedPrecondition: the version is not ready.
        """
        plan = await self._connection.run(self._planning()) if self._plan is None else self._plan
        self._plan = self._plan or plan  # another task may have made one in the meantime
        return self._plan

    async def __aiter__(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        async with self._transfer() as transfer, aclosing(self._taken(transfer, transfer.tensors)) as found:
            async for each in found:
                yield each

    async def filled(self, tensor_for: Callable[[int], torch.Tensor]) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Pull into tensors that the caller provides, while the caller iterates over the result, as
        `weighbridge.Pull.filled` does.

        Args:
            tensor_for: returns the tensor for a placement of the plan's layout, given its index. The tensor may be on
                any device. Other threads call the function, one call at a time.
        """
        async with self._transfer() as transfer:
            steps = partial(transfer.filled, tensor_for)
            async with aclosing(self._taken(transfer, steps)) as found:
                async for each in found:
                    yield each

    async def into(
        self,
        target: torch.nn.Module | Mapping[str, torch.Tensor],
        *,
        cast: str = "exact",
        strict: bool = True,
        adapter_name: str = "default",
    ) -> Filled:
        """Fill a model in place, as `weighbridge.Pull.into` does. If any tensor does not fit, nothing is changed.

        Examples:
            >>> await client.pull("acme/smol@1").into(model)
            <Filled from acme/smol@1: 24 tensors, 78.6 kB>
        """
        plan = await self.plan()
        adapter = await self._connection.run(adapter_target(plan, target, adapter_name))
        found = await self._carrier.threads.run(
            partial(fit, plan, target, cast=cast, strict=strict, adapter=adapter), lambda: None
        )
        if found.boxes is not None:
            plan = await self._connection.run(plan_boxes(plan, found.boxes))
        if found.tensors:
            await self._fill(plan, partial(fill_tensors, plan.layout, found.tensors))
        return found.report

    async def fill(self, tensor_for: Callable[[int], torch.Tensor]) -> None:
        """Pull into tensors that the caller provides.

        Args:
            tensor_for: returns the tensor for a placement of the plan's layout, given its index. The tensor may be on
                any device. Other threads call the function, one call at a time.
        """
        await self._fill(await self.plan(), lambda filled: filled(tensor_for))

    async def _fill(self, plan: PullPlan, fill: Callable[[FilledTensors], Iterable[object]]) -> None:
        async with self._transfer(plan) as transfer:

            def filled(tensor_for: Callable[[int], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
                return chain.from_iterable(transfer.filled(tensor_for))

            await self._carrier.threads.run(lambda: deque(fill(filled), maxlen=0), transfer.stop)

    async def bring(self, buffer: torch.Tensor | None = None, *, pin: bool = False) -> Slices:
        """Transfer all slices to this machine, to be read later in any order.

        On the service's machine nothing is copied: the service holds the version as long as the result exists.

        Args:
            buffer: buffer of an earlier `HostSlices`. It is reused, and its content is overwritten.
            pin: whether GPUs will copy from the slices.
        """
        async with self._transfer() as transfer:
            return await self._carrier.threads.run(partial(transfer.bring, buffer, pin=pin), transfer.stop)

    async def _taken(
        self, transfer: PullRun, begin: Callable[[], Iterator[PullStep]]
    ) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield the tensors of a run's steps. Each step runs in a thread."""
        with closing(_filled(begin)) as steps:
            while filled := await self._carrier.threads.run(partial(next, steps, ()), transfer.stop):
                for each in filled:
                    yield each

    @asynccontextmanager
    async def _transfer(self, plan: PullPlan | None = None) -> AsyncIterator[PullRun]:
        with self._carrier.transfer(plan or await self.plan()) as transfer:
            # if the task has been cancelled by then, borrowed memory is released immediately
            await self._carrier.threads.run_or_leave(partial(copy_context().run, transfer.borrow))
            self.lane, self.lane_reason = transfer.lane, transfer.lane_reason
            yield transfer


def _filled(
    begin: Callable[[], Iterator[PullStep]],
) -> Generator[list[tuple[str, torch.Tensor]], None, None]:
    """Yield the tensors of each step that has any. The first step imports torch."""
    for step in begin():
        if filled := list(step):
            yield filled
