"""Pull on an event loop: planned, carried out in threads, and ended when its task is cancelled."""

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
    """What carries out the pulls of one client.

    Args:
        transport: carries the weights.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.threads = Threads()
        self._running: WeakSet[PullRun] = WeakSet()

    @contextmanager
    def transfer(self, plan: PullPlan) -> Iterator[PullRun]:
        """One run of a pull, stopped in the end."""
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
    """A pull that is about to begin: ``async for name, tensor in pull`` gives each tensor as soon as it is complete.

    The tensors are those of `weighbridge.Pull`. Iterating again pulls the same version again. If the task is cancelled, or the
    iteration is closed, calls under way are cancelled, what was borrowed goes back, and nothing is written to any tensor any more.

    Attributes:
        lane: how they came, ``local`` or ``grpc``; empty before they do.
        lane_reason: why they did not come by ``local``, if that was wanted.
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
        """Which version comes, wherever the ref moves from now on, and which slices; all else does this first.

        Raises:
            NotFound: no such model, version, ref or tensor.
            InvalidArgument: the layout does not fit the model, or a tensor cannot be cast; names the tensor.
            FailedPrecondition: the version is not ready.
        """
        plan = await self._connection.run(self._planning()) if self._plan is None else self._plan
        self._plan = self._plan or plan  # one that another task has made meanwhile
        return self._plan

    async def __aiter__(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        async with self._transfer() as transfer, aclosing(self._taken(transfer, transfer.tensors)) as found:
            async for each in found:
                yield each

    async def filled(
        self, tensor_for: Callable[[int], torch.Tensor]
    ) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Pull into tensors that the caller makes, as the result is iterated over; as `weighbridge.Pull.filled`.

        Args:
            tensor_for: gives the tensor for a placement of the plan's layout, by index; any device. Is called from other threads,
                one call at a time.
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
        """Fill a model in place, as `weighbridge.Pull.into` does: nothing of it is changed unless all of it fits."""
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
        """Pull into tensors that the caller makes.

        Args:
            tensor_for: gives the tensor for a placement of the plan's layout, by index; any device. Is called from other threads,
                one call at a time.
        """
        await self._fill(await self.plan(), lambda filled: filled(tensor_for))

    async def _fill(self, plan: PullPlan, fill: Callable[[FilledTensors], Iterable[object]]) -> None:
        async with self._transfer(plan) as transfer:

            def filled(tensor_for: Callable[[int], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
                return chain.from_iterable(transfer.filled(tensor_for))

            await self._carrier.threads.run(lambda: deque(fill(filled), maxlen=0), transfer.stop)

    async def bring(self, buffer: torch.Tensor | None = None, *, pin: bool = False) -> Slices:
        """Bring all slices to this machine, and read them later, in any order.

        On the service's machine they are there: the service holds the version as long as the result is.

        Args:
            buffer: of a `HostSlices` that this gave before, to be used again: what it holds is lost.
            pin: whether GPUs will copy from them.
        """
        async with self._transfer() as transfer:
            return await self._carrier.threads.run(partial(transfer.bring, buffer, pin=pin), transfer.stop)

    async def _taken(
        self, transfer: PullRun, begin: Callable[[], Iterator[PullStep]]
    ) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """What a run's steps give, each taken in a thread."""
        with closing(_filled(begin)) as steps:
            while filled := await self._carrier.threads.run(partial(next, steps, ()), transfer.stop):
                for each in filled:
                    yield each

    @asynccontextmanager
    async def _transfer(self, plan: PullPlan | None = None) -> AsyncIterator[PullRun]:
        with self._carrier.transfer(plan or await self.plan()) as transfer:
            # what is borrowed when the task is gone goes back at once
            await self._carrier.threads.run_or_leave(partial(copy_context().run, transfer.borrow))
            self.lane, self.lane_reason = transfer.lane, transfer.lane_reason
            yield transfer


def _filled(
    begin: Callable[[], Iterator[PullStep]],
) -> Generator[list[tuple[str, torch.Tensor]], None, None]:
    """What each step gives, if anything; the first step imports torch."""
    for step in begin():
        if filled := list(step):
            yield filled
