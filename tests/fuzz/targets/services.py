"""Targets that are whole services: calls over gRPC, requests over HTTP, and sessions of the local lane, answered by the
code that answers them in production, without a network between.

At the end, the model that no input may touch is pulled and compared.
"""

from __future__ import annotations

import asyncio
import functools
import random
import re
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import h11
import uvicorn
from google.protobuf.message import Message
from uvicorn.server import ServerState

from tests.fuzz import mutators
from tests.fuzz.target import Bounds, Parse, Target
from tests.support import http_fuzzing
from tests.support.grpc_examples import FUZZED, UNTOUCHED, examples
from tests.support.grpc_fuzzing import SERVICES, Messages
from tests.support.raw_clients import TinyModel, assert_equal, tiny_folder
from tests.support.services import RunningService, running_service
from tests.support.tracebacks import tracebacks
from weighbridge import EngineClient, TrainerClient
from weighbridge._lane import protocol
from weighbridge._transport import request_parts
from weighbridge.v1 import local_lane_pb2
from weighbridge_service.api.grpc.event_loop import EventLoop
from weighbridge_service.api.http.app import create_app
from weighbridge_service.api.http.connections import connections
from weighbridge_service.exports.jobs import Exports

_METHODS = tuple(method for service in SERVICES for method in service.methods)
_SECONDS = 0.03
"""Seconds after which a call that waits is cancelled."""
_PATIENCE = 30.0
"""Seconds to wait for what has to come."""
_MOST_RESPONSES = 4
_MEMORY = Path("/dev/shm")
_BOUNDS = Bounds(seconds=8.0, mb=128.0)
"""Limits that leave room for work that earlier calls have left to be done."""


class Fault(AssertionError):
    """A service has failed: it has logged a traceback, or says so itself."""


@contextmanager
def _served(*models: str, **settings: Any) -> Iterator[tuple[RunningService, TinyModel, Callable[[], None]]]:
    """A service with some versions of some models, and a function that raises if it has logged a traceback.

    At the end it must still serve.
    """
    with ExitStack() as stack:
        place = stack.enter_context(tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None))
        folder = Path(place)
        source = tiny_folder(folder / "hf")
        running = stack.enter_context(
            running_service(folder / "store", receive_timeout=5.0, drain_seconds=0.5, **settings)
        )
        with TrainerClient(running.address, lane="grpc") as trainer:
            for model in (*models, UNTOUCHED):
                trainer.register_files(model, source.files)
                for step in (1, 2, 3):
                    trainer.push_folder(model, source.folder, step=step).wait(timeout=60)
        logged = stack.enter_context(tracebacks())

        def check() -> None:
            if logged:
                said = "\n".join(logged)
                logged.clear()
                raise Fault(said)

        yield running, source, check
        check()
        with EngineClient(running.address, lane="grpc") as engine:
            assert_equal(engine, UNTOUCHED, "latest", source.arrays)
        with TrainerClient(running.address, lane="grpc") as trainer:
            trainer.push_folder(UNTOUCHED, source.folder, step=4).wait(timeout=60)


class _Context:
    """gRPC's context of a handler, with messages that have arrived already.

    Args:
        messages: messages of the request.
        host: address of the caller.
    """

    def __init__(self, messages: Sequence[bytes], host: str) -> None:
        self._messages = iter(messages)
        self._host = host
        self._responses = 0
        self.code = "OK"
        self.details = ""

    async def read(self) -> Any:
        return next(self._messages, grpc.aio.EOF)

    async def send_initial_metadata(self, metadata: Any) -> None:
        """Ignored: no caller waits for it."""

    async def write(self, message: bytes) -> None:
        self._responses += 1
        if self._responses > _MOST_RESPONSES:  # the caller has gone
            raise grpc.aio.InternalError

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: Any = ()) -> None:
        self.code, self.details = code.name, details
        raise grpc.aio.AbortError

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        return ()

    def auth_context(self) -> Mapping[str, Any]:
        return {}

    def time_remaining(self) -> float:
        return _SECONDS

    def peer(self) -> str:
        return f"ipv4:{self._host}:1"


@contextmanager
def _calls() -> Iterator[Parse]:
    with _served(FUZZED) as (running, _, check):
        found = []
        for method in _METHODS:
            details: Any = SimpleNamespace(
                method=f"/{method.containing_service.full_name}/{method.name}", invocation_metadata=()
            )
            of_method: Any = running.grpc._behaviours.service(details)
            found.append(of_method.stream_stream)
        loop = running.grpc._listener.loop
        count = 0

        async def call(behaviour: Any, context: _Context) -> None:
            with suppress(TimeoutError, grpc.aio.AbortError, grpc.aio.InternalError):
                await asyncio.wait_for(behaviour(None, context), _SECONDS * 4)

        def parse(data: bytes) -> None:
            nonlocal count
            count += 1
            number = data[0] % len(_METHODS) if data else 0
            # no host calls so often that its calls are refused
            context = _Context(mutators.frames(data[1:]), f"10.{count >> 16 & 255}.{count >> 8 & 255}.{count & 255}")
            loop.begin(call(found[number], context)).result(_PATIENCE)
            if context.code in ("INTERNAL", "UNKNOWN"):
                raise Fault(f"{_METHODS[number].full_name}: {context.code}: {context.details}")
            check()

        yield parse


@functools.cache
def _examples() -> Mapping[str, Sequence[Message]]:
    with tempfile.TemporaryDirectory() as folder:
        return examples(tiny_folder(Path(folder) / "hf"))


def _call_samples() -> list[bytes]:
    found = []
    for number, method in enumerate(_METHODS):
        kind = method.input_type.full_name
        messages = [[example.SerializeToString()] for example in _examples().get(kind, ())]
        found += [bytes([number]) + mutators.framed(parts) for parts in ([], *messages)]
    return found


def _call(choose: random.Random, data: bytes) -> bytes:
    number = choose.randrange(len(_METHODS)) if not data or choose.random() < 0.2 else data[0] % len(_METHODS)
    kind = _METHODS[number].input_type
    source = Messages(choose, _examples())
    parts = mutators.frames(data[1:]) if data and data[0] % len(_METHODS) == number else []
    match choose.randrange(5):
        case 0:
            parts = [source.encoded(kind)]
        case 1 if parts:
            where = choose.randrange(len(parts))
            parts[where] = source.damaged(parts[where])
        case 2 if parts and len(parts[0]) > 32:
            with suppress(Exception):  # what is no message has no fields
                message: Message = _kind(number).FromString(b"".join(parts))
                parts = list(request_parts.encoded_parts(message, choose.randrange(16, 400)))
        case 3:
            parts += [source.encoded(kind) for _ in range(choose.choice((1, 1, 2, 30)))]
        case _:
            with suppress(Exception):
                message = _kind(number).FromString(b"".join(parts))
                source.change(message)
                parts = [message.SerializeToString()]
    return bytes([number]) + mutators.framed(parts)


@functools.cache
def _kind(number: int) -> Any:
    from google.protobuf.message_factory import GetMessageClass

    return GetMessageClass(_METHODS[number].input_type)


@contextmanager
def _requests() -> Iterator[Parse]:
    """Each input is what comes over one connection."""
    with ExitStack() as stack:
        running, _, check = stack.enter_context(_served(http_fuzzing.MODEL))
        running.health.start()
        exports = Exports(running.service)
        stack.callback(exports.close)
        config = uvicorn.Config(
            create_app(running.service, exports, running.metrics, running.health), http=connections(20.0), lifespan="off", ws="none",
            log_config=None, access_log=False, server_header=False,
        )  # fmt: skip
        config.load()
        loop = EventLoop("http")
        stack.callback(loop.stop)
        state = ServerState()

        async def answer(data: bytes) -> bytes:
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            received = 0
            made: Any = None

            def make() -> Any:
                nonlocal made
                kind: Any = config.http_protocol_class
                made = kind(config=config, server_state=state, app_state={}, _loop=asyncio.get_running_loop())
                take = made.data_received

                def counted(part: bytes) -> None:
                    nonlocal received
                    received += len(part)
                    take(part)

                made.data_received = counted
                return made

            running_loop = asyncio.get_running_loop()
            transport, _ = await running_loop.connect_accepted_socket(make, theirs)
            answered = bytearray()

            async def read() -> None:
                with suppress(ConnectionError):
                    while part := await running_loop.sock_recv(ours, 1 << 16):
                        answered.extend(part)

            reading = asyncio.ensure_future(read())
            with suppress(ConnectionError):
                await asyncio.wait_for(running_loop.sock_sendall(ours, data), _PATIENCE)
            deadline = running_loop.time() + _PATIENCE
            while not transport.is_closing():
                cycle = made.cycle
                waits = made.conn.their_state is h11.SEND_BODY or cycle is None or cycle.response_complete
                if received == len(data) and waits:
                    break  # it waits for more
                if running_loop.time() > deadline:
                    raise Fault("a request is not answered")
                await asyncio.sleep(0.0005)
            if not transport.is_closing():
                transport.abort()
            with suppress(TimeoutError):
                await asyncio.wait_for(reading, _PATIENCE)
            ours.close()
            while state.tasks:  # handlers end with their connection
                if running_loop.time() > deadline:
                    raise Fault("a request goes on without its connection")
                await asyncio.sleep(0.0005)
            return bytes(answered)

        def parse(data: bytes) -> None:
            answered = loop.run(answer(data))
            for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answered[:100_000]):
                if status.startswith(b"5"):
                    raise Fault(f"the status {status!r}: {answered[:500]!r}")
            check()

        yield parse


def _request_samples() -> list[bytes]:
    return list(islice(http_fuzzing.requests(1), 400))


@contextmanager
def _sessions() -> Iterator[Parse]:
    """Each input is what a client says over the local lane, message by message, before it goes."""
    with (
        tempfile.TemporaryDirectory() as folder,
        _served(FUZZED, local_socket=f"{folder}/lane.sock") as (running, _, check),
    ):

        def parse(data: bytes) -> None:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(_PATIENCE)
                connection.connect(running.lane.path)
                with suppress(OSError):
                    connection.sendall(data)
                    connection.shutdown(socket.SHUT_WR)
                with suppress(ConnectionError):
                    while (received := protocol.receive(connection)) is not None:
                        raw, descriptors = received
                        protocol.close_all(descriptors)
                        answer = local_lane_pb2.LaneResponse.FromString(raw)
                        if answer.error.reason == "INTERNAL":
                            raise Fault(answer.error.message)
            check()

        yield parse


def _session_samples() -> list[bytes]:
    kind = local_lane_pb2.LaneRequest
    hello = kind(id=1, hello={"client_id": "fuzz-client"})
    layouts = (
        {"full": {}},
        {"tensor_parallel": {"size": 2, "rank": 1}},
        {"boxes": {"boxes": [{"tensor": "model.norm.weight", "offset": [0], "extent": [3]}]}},
    )
    reads = [kind(id=2, begin_read={"model": FUZZED, "version": "latest", "layout": each}) for each in layouts]
    others = [
        kind(id=3, end_read={"loan": 1}), kind(id=4, begin_write={"model": FUZZED, "number": 3}), kind(id=5, end_write={"loan": 1, "complete": True}),
        kind(id=6, end_read={"loan": 1, "left_open": True}), kind(id=7, hello={"client_id": "x", "ticket": "y"}),
    ]  # fmt: skip
    sessions = [[hello, read, *others] for read in reads] + [
        [hello, *reads, others[0]],
        [reads[0]],
        [hello, hello],
    ]
    return [mutators.framed([each.SerializeToString() for each in session]) for session in sessions]


def _session(choose: random.Random, parts: list[bytes]) -> None:
    source = Messages(choose, {local_lane_pb2.LaneRequest.DESCRIPTOR.full_name: _lane_examples()})
    where = choose.randrange(len(parts) + 1)
    if where == len(parts) or choose.random() < 0.4:
        parts.insert(where, source.encoded(local_lane_pb2.LaneRequest.DESCRIPTOR))
    elif choose.random() < 0.3:
        del parts[where]
    elif choose.random() < 0.3:
        parts[where:where] = parts[where : where + 1] * choose.choice((1, 2, 40))
    else:
        parts[where] = source.damaged(parts[where])


@functools.cache
def _lane_examples() -> Sequence[Message]:
    return [
        local_lane_pb2.LaneRequest.FromString(part) for sample in _session_samples() for part in mutators.frames(sample)
    ]


TARGETS = (
    Target("grpc", _calls, _call_samples, _call, (), bounds=_BOUNDS, longest=1 << 17, weight=0.5, stateful=True),
    Target(
        "http",
        _requests,
        _request_samples,
        mutators.texts(
            "GET", "HEAD", "POST", "PUT", "DELETE", " ", "/", "?", "&", "=", "%", "\r\n", "\r\n\r\n", ":", "HTTP/1.1", "HTTP/1.0", "Host: localhost\r\n", "Range: bytes=0-",
            "Content-Length: ", "0", "Transfer-Encoding: chunked\r\n", "5\r\nabcde\r\n0\r\n\r\n", "/v1/models/", http_fuzzing.MODEL, "versions", "resolve", "latest", "%2f", "{", "}", "[", '"',
        ),
        (),
        bounds=_BOUNDS,
        weight=0.05,
        stateful=True,
    ),
    Target("lane", _sessions, _session_samples, mutators.one_of(mutators.of_frames(_session), mutators.of_frames(_session), mutators.raw), (), bounds=_BOUNDS, weight=0.1, stateful=True),
)  # fmt: skip
