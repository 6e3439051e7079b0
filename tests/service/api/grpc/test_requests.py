"""Are the memory that incoming requests take and the time for which they hold it limited?"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import grpc
import pytest

from weighbridge.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted
from weighbridge_service.access.peer import Peer
from weighbridge_service.admission.message_waits import MessageWaits
from weighbridge_service.api.grpc.requests import RequestLimits, Requests

A, B = Peer("a", "1"), Peer("b", "1")
SHORT = RequestLimits(places=2, small_bytes=0, silent_seconds=5.0, hurry_seconds=0.05)


class Caller:
    """A call that sends the messages it is given, with the interface of gRPC's contexts."""

    def __init__(self, *messages: bytes, ends: bool = True) -> None:
        self._messages = asyncio.Queue[object]()
        for message in messages:
            self.send(message)
        if ends:
            self.send(grpc.aio.EOF)  # type: ignore[attr-defined]
        self.reading = asyncio.Event()

    def send(self, message: object) -> None:
        self._messages.put_nowait(message)

    async def read(self) -> object:
        self.reading.set()
        try:
            return await self._messages.get()
        finally:
            self.reading.clear()


async def whole(requests: Requests, caller: Caller, peer: Peer, *, parts: bool) -> bytes:
    """A request, as long as it takes to read it."""
    async with requests.whole(caller, peer, parts=parts) as raw:
        return raw


def run(work: Callable[[Requests], Awaitable[None]], limits: RequestLimits = SHORT) -> None:
    """Run a test on its own event loop; afterwards no memory may be held."""

    async def go() -> None:
        waits = MessageWaits(lambda: 0)
        requests = Requests(waits, limits)
        try:
            await work(requests)
        finally:
            waits.close()
        assert not requests._readers
        assert not requests._waiting
        assert not requests._pending.held

    asyncio.run(asyncio.wait_for(go(), 30))


async def begun(callers: Sequence[Caller]) -> None:
    """Wait until all of these are read from."""
    for caller in callers:
        await caller.reading.wait()


def test_a_request_is_one_message_or_all_parts_joined() -> None:
    async def work(requests: Requests) -> None:
        assert await whole(requests, Caller(b"ab", b"cd"), A, parts=False) == b"ab"
        assert await whole(requests, Caller(b"ab", b"", b"cd"), A, parts=True) == b"abcd"
        assert await whole(requests, Caller(b"", ends=True), A, parts=False) == b""
        assert [each async for each in requests.each(Caller(b"ab", b"cd"), A)] == [b"ab", b"cd"]

    run(work)


@pytest.mark.parametrize("parts", [True, False])
def test_a_call_that_ends_without_a_message_is_refused(parts: bool) -> None:
    async def work(requests: Requests) -> None:
        with pytest.raises(InvalidArgument, match="no request"):
            await whole(requests, Caller(), A, parts=parts)

    run(work)


def test_a_request_that_is_too_long_is_refused_and_one_that_just_fits_is_not() -> None:
    async def work(requests: Requests) -> None:
        assert await whole(requests, Caller(b"12345", b"67890"), A, parts=True) == b"1234567890"
        with pytest.raises(InvalidArgument, match="longer than 10 bytes"):
            await whole(requests, Caller(b"12345", b"67890", b"1"), A, parts=True)

    run(work, replace(SHORT, longest=10))


def test_silence_ends_a_call_after_its_time() -> None:
    async def work(requests: Requests) -> None:
        for caller in (Caller(ends=False), Caller(b"a part", ends=False)):
            with pytest.raises(DeadlineExceeded, match="no message for"):
                await whole(requests, caller, A, parts=True)

    run(work, replace(SHORT, silent_seconds=0.05))


def test_silent_callers_keep_their_places_while_nobody_waits_and_give_them_up_then() -> None:
    async def work(requests: Requests) -> None:
        silent = [Caller(ends=False) for _ in range(2)]
        tasks = [asyncio.create_task(requests.next(caller, A)) for caller in silent]
        await asyncio.sleep(0.3)  # several times the limit that applies while others wait
        assert not any(task.done() for task in tasks)
        here = requests.next(Caller(b"here"), B)
        assert await asyncio.wait_for(here, 60.0) == b"here"  # far below the timeout for silent clients
        errors = await asyncio.wait_for(asyncio.gather(*tasks[:1], return_exceptions=True), 60.0)
        assert isinstance(errors[0], ResourceExhausted)
        assert errors[0].retry_after
        assert not tasks[1].done()  # only as many requests are ended as others wait
        silent[1].send(b"late")
        assert await tasks[1] == b"late"

    run(work, replace(SHORT, silent_seconds=600.0))


def test_a_crowd_of_silent_callers_stops_nobody_who_speaks() -> None:
    async def work(requests: Requests) -> None:
        silent = [Caller(ends=False) for _ in range(20)]
        tasks = [asyncio.create_task(requests.next(caller, A)) for caller in silent]
        await asyncio.sleep(0)
        assert await requests.next(Caller(b"here"), B) == b"here"
        waited = sum(task.done() for task in tasks)
        assert waited < 20  # the other host has not waited until all of them were through
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, ResourceExhausted | DeadlineExceeded)

    run(work)


def test_turns_go_round_hosts() -> None:
    async def work(requests: Requests) -> None:
        holding = [Caller(ends=False) for _ in range(2)]
        held = [asyncio.create_task(requests.next(caller, A)) for caller in holding]
        await begun(holding)
        order = list[str]()

        async def read(name: str, peer: Peer) -> None:
            await requests.next(Caller(b"x"), peer)
            order.append(name)

        tasks = [asyncio.create_task(read(f"a{i}", A)) for i in range(3)]
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(read("b", B)))
        await asyncio.sleep(0)
        for caller in holding:
            caller.send(b"done")
        await asyncio.gather(*held, *tasks)
        assert order.index("b") < 2
        assert [name for name in order if name != "b"] == ["a0", "a1", "a2"]

    run(work)


@pytest.mark.parametrize("reading", [True, False])
def test_callers_that_go_leave_their_places_and_their_bytes(reading: bool) -> None:
    async def work(requests: Requests) -> None:
        holding = [Caller(b"a part", ends=False) for _ in range(2)]
        held = [asyncio.create_task(whole(requests, caller, A, parts=True)) for caller in holding]
        await asyncio.sleep(0.01)
        await begun(holding)
        assert requests._pending.held == 2 * len(b"a part")
        waiting = asyncio.create_task(requests.next(Caller(b"x"), B))
        await asyncio.sleep(0)
        for task in held if reading else [waiting]:
            task.cancel()
        if not reading:
            for caller in holding:
                caller.send(grpc.aio.EOF)  # type: ignore[attr-defined]
        results = await asyncio.gather(*held, waiting, return_exceptions=True)
        if reading:
            assert results[2] == b"x"
            assert all(isinstance(each, asyncio.CancelledError) for each in results[:2])
        else:
            assert results[:2] == [b"a part"] * 2
            assert isinstance(results[2], asyncio.CancelledError)

    run(work)


def test_incomplete_requests_have_a_budget() -> None:
    async def work(requests: Requests) -> None:
        holding = [Caller(b"x" * 25, ends=False) for _ in range(3)]
        held = [asyncio.create_task(whole(requests, caller, A, parts=True)) for caller in holding]
        await asyncio.sleep(0.01)
        with pytest.raises(ResourceExhausted, match="bytes of requests"):
            await whole(requests, Caller(b"x" * 25), A, parts=True)
        assert await whole(requests, Caller(b"x" * 25), B, parts=True) == b"x" * 25  # of another host
        for caller in holding:
            caller.send(grpc.aio.EOF)  # type: ignore[attr-defined]
        assert await asyncio.gather(*held) == [b"x" * 25] * 3

    run(work, replace(SHORT, places=10, pending_bytes=100))
