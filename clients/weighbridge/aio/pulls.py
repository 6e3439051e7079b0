"""A pull on an event loop: planned, then carried out in threads, and ended when its task is cancelled."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakSet

from weighbridge.aio.threads import Threads
from weighbridge.host_slices import Slices
from weighbridge.pulling import PullPlan, Transfer
from weighbridge.transport import Transport

if TYPE_CHECKING:
    import torch


class Carrier:
    """What carries out the pulls of one client.

    Args:
        transport: carries the weights.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.threads = Threads()
        self._running: WeakSet[Transfer] = WeakSet()

    @contextmanager
    def transfer(self, plan: PullPlan) -> Iterator[Transfer]:
        """One run of a pull, stopped in the end."""
        transfer = Transfer(self.transport, plan)
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

    The tensors are those of `weighbridge.engine.Pull`. Iterating again pulls the same version again. If the task is cancelled, or the
    iteration is closed, calls under way are cancelled, what was borrowed goes back, and nothing is written to any tensor any more.

    Attributes:
        lane: how they came, ``local`` or ``grpc``; empty before they do.
        lane_reason: why they did not come by ``local``, if that was wanted.
    """

    def __init__(self, carrier: Carrier, make_plan: Callable[[], Awaitable[PullPlan]]) -> None:
        self.lane = self.lane_reason = ""
        self._carrier = carrier
        self._make_plan = make_plan
        self._plan: PullPlan | None = None

    async def plan(self) -> PullPlan:
        """Which version comes, wherever the ref moves from now on, and which slices; all else does this first.

        Raises:
            NotFound: no such model, version, ref or tensor.
            InvalidArgument: the layout does not fit the model, or a tensor cannot be cast; names the tensor.
            FailedPrecondition: the version is not ready.
        """
        plan = self._plan or await self._make_plan()
        self._plan = self._plan or plan  # one that another task has made meanwhile
        return self._plan

    async def __aiter__(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        async with self._transfer() as transfer:
            with closing(_filled(transfer)) as steps:
                while filled := await self._carrier.threads.run(partial(next, steps, ()), transfer.stop):
                    for each in filled:
                        yield each

    async def into(self, tensor_for: Callable[[int], torch.Tensor]) -> None:
        """Pull into tensors that the caller makes.

        Args:
            tensor_for: gives the tensor for a placement of the plan's layout, by index; any device. Is called from other threads,
                one call at a time.
        """
        async with self._transfer() as transfer:

            def fill() -> None:
                for step in transfer.into(tensor_for):
                    deque(step, maxlen=0)

            await self._carrier.threads.run(fill, transfer.stop)

    async def bring(self, buffer: torch.Tensor | None = None, *, pin: bool = False) -> Slices:
        """Bring all slices to this machine, and read them later, in any order.

        On the service's machine they are there: the service holds the version as long as the result is.

        Args:
            buffer: of a `HostSlices` that this gave before, to be used again: what it holds is lost.
            pin: whether GPUs will copy from them.
        """
        async with self._transfer() as transfer:
            return await self._carrier.threads.run(partial(transfer.bring, buffer, pin=pin), transfer.stop)

    @asynccontextmanager
    async def _transfer(self) -> AsyncIterator[Transfer]:
        with self._carrier.transfer(await self.plan()) as transfer:
            # what is borrowed when the task is gone goes back at once
            await self._carrier.threads.run_or_leave(transfer.borrow)
            self.lane, self.lane_reason = transfer.lane, transfer.lane_reason
            yield transfer


def _filled(transfer: Transfer) -> Generator[list[tuple[str, torch.Tensor]], None, None]:
    """What each step gives, if anything; the first step imports torch."""
    for step in transfer.tensors():
        if filled := list(step):
            yield filled
