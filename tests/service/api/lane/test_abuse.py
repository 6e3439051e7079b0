"""Are the service and other clients safe from a client that abuses the local lane?"""

from __future__ import annotations

import array
import contextlib
import fcntl
import gc
import mmap
import os
import random
import signal
import socket
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import numpy as np
import pytest

from tests.support.alone import alone
from tests.support.identities import identity, policy_file
from tests.support.lane_client import CLIENT_ID, connected, lane_process
from tests.support.raw_clients import RawClient, TinyModel, cut, rows_layout, stream_of, tiny_folder
from tests.support.services import RunningService, lane_service, running_service
from tests.support.waiting import eventually
from weighbridge import EngineClient, TrainerClient
from weighbridge._clients.transport import find_faces
from weighbridge._core.resources import VersionState
from weighbridge._lane import protocol
from weighbridge._lane.connection import LaneConnection
from weighbridge._memory.mappings import MappedMemory, Use
from weighbridge.errors import FailedPrecondition, InvalidArgument, PermissionDenied, WeighbridgeError
from weighbridge.v1 import local_lane_pb2 as pb
from weighbridge_service.api.lane.server import LaneServer
from weighbridge_storage.memory.regions import PAGE, Region

MODEL = "acme/local"
NOBODY = 65_534


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[TinyModel]:
    root = tmp_path_factory.mktemp("sources")
    return [tiny_folder(root / str(seed), seed=seed) for seed in range(3)]


@pytest.fixture
def service(tmp_path: Path, sources: list[TinyModel]) -> Iterator[RunningService]:
    with lane_service(tmp_path, MODEL, sources[0]) as running:
        yield running


@pytest.fixture
def trainer(service: RunningService) -> Iterator[TrainerClient]:
    with TrainerClient(service.address, lane="local") as client:
        yield client


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder with a short path that other users can reach."""
    if os.getuid():
        pytest.skip("only root can become another user")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        yield folder


def in_a_fork(does: Callable[[], None], user: int | None = None) -> Callable[[], bool]:
    """Call a function in a forked process; returns a function that waits for it and says whether it succeeded."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            if user is not None:
                os.setuid(user)
            does()
            os._exit(0)
        os._exit(1)

    def ended() -> bool:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    return ended


def begin_read(version: int = 1) -> pb.LaneRequest:
    request = pb.LaneRequest(begin_read=pb.BeginRead(model=MODEL, version=str(version)))
    request.begin_read.layout.full.SetInParent()
    return request


class RawLane:
    """A connection that reads only on request."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(20)
        self.socket.connect(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.socket.close()

    def send(self, request: pb.LaneRequest) -> None:
        protocol.send(self.socket, request)

    def ask(self, request: pb.LaneRequest) -> pb.LaneResponse:
        self.send(request)
        received = protocol.receive(self.socket)
        assert received is not None
        protocol.close_all(received[1])
        return pb.LaneResponse.FromString(received[0])

    @property
    def unread(self) -> int:
        """Bytes that have come."""
        found = array.array("i", [0])
        fcntl.ioctl(self.socket, termios.FIONREAD, found)
        return found[0]


def fill_up(lane: RawLane, most: int) -> int:
    """Send requests without reading, until no answer comes or ``most`` were sent; the number of answers."""
    for count in range(most):
        before = lane.unread
        lane.send(pb.LaneRequest(id=9, end_read=pb.EndRead(loan=77)))
        deadline = time.monotonic() + 1.0
        while lane.unread <= before + 4:
            if time.monotonic() > deadline:
                return count
            time.sleep(0.0005)
    return most


def test_a_client_that_reads_nothing_keeps_nobody_waiting(service: RunningService, sources: list[TinyModel]) -> None:
    hello = pb.LaneRequest(hello=pb.LaneHello(client_id="lazy"))
    with RawLane(service.lane.path) as probe:
        probe.ask(hello)
        room = fill_up(probe, 10_000)
    lazy = [RawLane(service.lane.path) for _ in range(3)]
    with TrainerClient(service.address, lane="local") as trainer:
        for source in (*sources, *sources):
            number = trainer.push_folder(MODEL, source.folder).wait(timeout=20).number
            for lane in lazy:  # so that they hold all the memory
                lane.ask(hello)
                loan = lane.ask(begin_read(number)).read.loan
                lane.ask(pb.LaneRequest(end_read=pb.EndRead(loan=loan)))
        for more, lane in enumerate(lazy):
            # full up with nothing being sent, and with an answer that finds no room
            fill_up(lane, room - 1 + more)
        for source in sources:
            trainer.push_folder(MODEL, source.folder).wait(timeout=60)
    eventually(lambda: service.service.images.usage().memory_free > 0)
    trimming = threading.Thread(target=service.service.images.trim, daemon=True)
    trimming.start()
    trimming.join(60)
    assert not trimming.is_alive()
    eventually(lambda: service.lane.clients < len(lazy))
    for lane in lazy:
        lane.socket.close()


def test_who_connects_and_says_nothing_is_sent_away(service: RunningService, tmp_path: Path) -> None:
    lane = LaneServer(service.service, str(tmp_path / "second.sock"), 1024, hello_seconds=0.2)
    with RawLane(lane.path) as silent:
        assert silent.socket.recv(1) == b""
    lane.stop()


def test_who_has_not_said_who_it_is_gets_nothing(
    service: RunningService, trainer: TrainerClient, sources: list[TinyModel]
) -> None:
    trainer.push_folder(MODEL, sources[0].folder).wait(timeout=20)
    with RawLane(service.lane.path) as lane:
        assert lane.ask(begin_read()).error.reason == InvalidArgument.reason
        assert lane.ask(pb.LaneRequest(hello=pb.LaneHello())).HasField("hello")
        assert lane.ask(begin_read()).error.reason == InvalidArgument.reason


def test_no_more_clients_are_served_than_leave_the_service_its_descriptors(tmp_path: Path) -> None:
    with running_service(tmp_path / "store", local_socket=str(tmp_path / "s"), lane_clients=4) as service:
        lanes = [RawLane(service.lane.path) for _ in range(40)]
        hello = pb.LaneRequest(hello=pb.LaneHello(client_id="one of many"))
        served = 0
        for lane in lanes:
            with contextlib.suppress(OSError, AssertionError):
                served += lane.ask(hello).HasField("hello")
        assert served == 3, "a fourth is left to other users"
        for lane in lanes:
            lane.socket.close()


def test_a_user_that_takes_all_places_it_can_leaves_some_to_others(
    open_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    where = str(open_folder / "lane.sock")
    with running_service(open_folder / "store", local_socket=where, lane_clients=8) as service:

        def take_all() -> None:
            lanes = [RawLane(where) for _ in range(50)]
            assert [lane.socket.recv(1) for lane in lanes[6:]] == [b""] * 44
            (open_folder / "taken").touch()
            lanes[0].socket.recv(1)  # until it is sent away for its silence

        ended = in_a_fork(take_all, NOBODY)
        eventually((open_folder / "taken").exists)
        connection = connected(service.address)
        assert service.lane.clients == 7
        connection.close()
        assert ended()
        eventually(lambda: service.lane.clients == 0)
        for _ in range(6):  # what was taken is given back
            connected(service.address).close()
    told = [each.message for each in caplog.records if "places on the local lane" in each.message]
    assert len(told) == 1, "not a line for each"


def test_descriptors_that_clients_send_are_not_taken(service: RunningService) -> None:
    with RawLane(service.lane.path) as lane, RawLane(service.lane.path) as other:
        reading, writing = os.pipe()
        raw = pb.LaneRequest(hello=pb.LaneHello(client_id="me")).SerializeToString()
        for byte in len(raw).to_bytes(4, "little"):
            socket.send_fds(lane.socket, [bytes([byte])], [writing] * 100)
        os.close(writing)
        other.ask(pb.LaneRequest(hello=pb.LaneHello(client_id="other")))
        with os.fdopen(reading, "rb") as pipe:
            assert pipe.read() == b"", "while the rest of the message is still to come"
        lane.socket.sendall(raw)
        received = protocol.receive(lane.socket)
        assert received is not None
        assert pb.LaneResponse.FromString(received[0]).HasField("hello")


def test_refusals_on_the_lane_come_no_faster_than_they_may_be_written_down(tmp_path: Path) -> None:
    policy = policy_file(tmp_path, identity("me", ["pull:else/*"], users=[os.getuid()]))
    audit = tmp_path / "audit.jsonl"
    with running_service(tmp_path / "store", policy=policy, audit=audit) as service:
        slow = LaneServer(service.service, str(tmp_path / "s"), 1024, refusals_a_second=5.0, refusals_at_once=3.0)
        with RawLane(slow.path) as lane:
            lane.ask(pb.LaneRequest(hello=pb.LaneHello(client_id="me")))
            started = time.monotonic()
            for _ in range(8):
                assert lane.ask(begin_read()).error.reason == PermissionDenied.reason
            assert time.monotonic() - started > 0.9, "five of them have to wait, 0.2 s each"
            assert len(audit.read_text().splitlines()) == 8
            lane.send(begin_read())
            started = time.monotonic()
        slow.stop()
    assert time.monotonic() - started < 30, "nor does a service that stops wait for them"


def test_random_requests_are_refused_and_change_nothing(
    service: RunningService,
    trainer: TrainerClient,
    sources: list[TinyModel],
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer.push_folder(MODEL, sources[0].folder).wait(timeout=20)
    dice = random.Random(11)
    texts = ["", MODEL, "1", "live", "../..", "a" * 5000, "\x00", "\u2603"]
    numbers = [0, 1, 2, 77, 1 << 31, (1 << 32) - 1, (1 << 64) - 1]

    def fill(message: object, depth: int = 0) -> None:
        for field in message.DESCRIPTOR.fields:  # type: ignore[attr-defined]
            if dice.random() < 0.3 or depth > 4:
                continue
            count = dice.randrange(3) if field.is_repeated else 1
            for _ in range(count):
                if field.message_type is not None:
                    inner = getattr(message, field.name)
                    fill(inner.add() if field.is_repeated else inner, depth + 1)
                    continue
                bits = {field.CPPTYPE_UINT64: 64, field.CPPTYPE_INT64: 63, field.CPPTYPE_UINT32: 32}
                value: object = dice.choice(texts)
                if field.cpp_type == field.CPPTYPE_BOOL:
                    value = dice.random() < 0.5
                elif field.cpp_type == field.CPPTYPE_ENUM:
                    value = dice.randrange(4)
                elif field.type == field.TYPE_BYTES:
                    value = bytes(dice.randrange(256) for _ in range(8))
                elif field.cpp_type != field.CPPTYPE_STRING:
                    value = dice.choice([n for n in numbers if n < 1 << bits.get(field.cpp_type, 31)])
                if field.is_repeated:
                    getattr(message, field.name).append(value)
                else:
                    setattr(message, field.name, value)

    kinds = ["begin_write", "end_write", "begin_read", "end_read"]
    lane = RawLane(service.lane.path)
    lane.ask(pb.LaneRequest(hello=pb.LaneHello(client_id="dice")))
    for number in range(500):
        request = pb.LaneRequest(id=number + 1)
        asked = getattr(request, dice.choice(kinds))
        asked.SetInParent()
        fill(asked)
        response = lane.ask(request)
        while response.HasField("recall"):
            response = pb.LaneResponse.FromString((protocol.receive(lane.socket) or (b"", []))[0])
        assert response.id == number + 1
    lane.socket.close()
    lanes = ("weighbridge._lane", "weighbridge_service.api.lane")
    assert not [each for each in caplog.records if each.exc_info and each.name.startswith(lanes)]
    eventually(lambda: service.lane.clients == 1)
    for source in sources:
        handle = trainer.push_folder(MODEL, source.folder)
        assert handle.report(20).lane == "local"
        assert handle.wait(timeout=20)
        assert trainer.verify(MODEL, handle.number).problems == ()


def test_an_error_that_nobody_has_thought_of_is_told_to_one_request_and_ends_nothing(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_arguments: object) -> None:
        raise ZeroDivisionError

    connection = connected(service.address)
    monkeypatch.setattr(service.service.serving, "grant", broken)
    with pytest.raises(WeighbridgeError, match="ZeroDivisionError"):
        connection.ask(begin_read())
    assert not connection.ended
    connection.close()


def test_memory_is_asked_back_when_the_last_loan_ends_after_the_last_seal(
    service: RunningService, trainer: TrainerClient, sources: list[TinyModel]
) -> None:
    for source in sources:
        trainer.push_folder(MODEL, source.folder).wait(timeout=20)  # it has all memory mapped
    layout = rows_layout(sources[0].arrays, 0, 1)
    with RawClient(service.address) as raw:
        number = raw.open(MODEL)
        assigned = raw.declare(MODEL, number, layout)
        lane = connected(service.address, raw.client_id)
        begin = pb.LaneRequest(begin_write=pb.BeginWrite(model=MODEL, number=number, rank=0))
        answer, descriptors = lane.ask(begin)
        protocol.close_all(descriptors)
        raw.push(MODEL, number, cut(stream_of(sources[0].arrays, layout, assigned)))
        raw.seal(MODEL, number)
        assert trainer.version(MODEL, number).state is VersionState.RECEIVING
        lane.ask(pb.LaneRequest(end_write=pb.EndWrite(loan=answer.write.loan, complete=False)))
        lane.close()
    assert trainer.wait_for(MODEL, number, VersionState.DURABLE, timeout=20)
    assert trainer.verify(MODEL, number).problems == ()


def test_a_trainer_that_stands_still_disturbs_no_other_trainer_of_its_model(
    service: RunningService, sources: list[TinyModel]
) -> None:
    layout = rows_layout(sources[0].arrays, 0, 1)
    with RawClient(service.address) as raw:
        raw.client_id = CLIENT_ID
        number = raw.open(MODEL)
        assigned = raw.declare(MODEL, number, layout)
        with lane_process(service.address, "keep", MODEL, str(number)) as still:
            still.send_signal(signal.SIGSTOP)
            raw.push(MODEL, number, cut(stream_of(sources[0].arrays, layout, assigned)))
            raw.seal(MODEL, number)
            for lane in ("grpc", "local", "local"):
                with TrainerClient(service.address, lane=lane, run=lane) as trainer:
                    assert trainer.wait_for(MODEL, number, VersionState.DURABLE, timeout=20)
                    assert trainer.verify(MODEL, number).problems == ()
                    for source in sources:
                        handle = trainer.push_folder(MODEL, source.folder)
                        assert handle.wait(timeout=20).state is VersionState.DURABLE
                        assert trainer.verify(MODEL, handle.number).problems == ()


def test_a_client_that_has_not_heard_yet_of_a_recall_is_given_the_memory_anew(
    service: RunningService, sources: list[TinyModel]
) -> None:
    with RawClient(service.address) as raw:
        number = raw.open(MODEL)
        raw.declare(MODEL, number, rows_layout(sources[0].arrays, 0, 1))
        lane = connected(service.address, raw.client_id)
        begin = pb.LaneRequest(begin_write=pb.BeginWrite(model=MODEL, number=number, rank=0))
        sent = []
        for recall in (False, False, True):
            if recall:
                [image] = service.service.images._images
                service.service.mappings.recall(image.region)
            answer, descriptors = lane.ask(begin)
            protocol.close_all(descriptors)
            sent.append(answer.write.memory.descriptor_sent)
            lane.ask(pb.LaneRequest(end_write=pb.EndWrite(loan=answer.write.loan, kept=True)))
            begin.begin_write.held[:] = [answer.write.memory.key]
        assert sent == [True, False, True]
        lane.close()


def test_a_process_that_is_forked_from_an_engine_sees_the_version_for_as_long_as_it_looks(
    service: RunningService, trainer: TrainerClient, sources: list[TinyModel]
) -> None:
    trainer.push_folder(MODEL, sources[0].folder).wait(timeout=20)
    reader, writer = os.pipe()
    with EngineClient(service.address, lane="local") as engine:
        tensors = dict(engine.pull(MODEL, "live"))

        def look() -> None:
            os.read(reader, 1)
            for name, values in sources[0].arrays.items():
                assert np.array_equal(tensors[name].numpy(), values)

        unchanged = in_a_fork(look)
        tensors.clear()
        gc.collect()
        for source in (*sources[1:], *sources[1:]):
            trainer.push_folder(MODEL, source.folder).wait(timeout=20)
        os.write(writer, b"!")
        assert unchanged()
    trainer.close()
    eventually(lambda: service.service.images.usage().memory_free > 0)
    os.close(reader)
    os.close(writer)


def test_a_tensor_over_a_mapping_that_is_closed_stays_readable() -> None:
    region = Region(PAGE, None)
    region.writable[:] = 7
    for use in (Use.WRITE, Use.READ):
        fd = region.reopen(writable=use is Use.WRITE)
        memory = MappedMemory(fd, region.key, PAGE, use)
        tensor = memory.tensor
        os.close(fd)
        memory.close()
        gc.collect()
        assert int(tensor.sum()) == 7 * PAGE
    del tensor
    region.close()


@alone
def test_clients_that_nobody_has_closed_go_with_their_last_reference(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "hf")
    with (
        lane_service(tmp_path, MODEL, source) as service,
        TrainerClient(service.address, lane="local") as trainer,
    ):
        trainer.push_folder(MODEL, source.folder).wait(timeout=20)
        threads = threading.active_count()
        for _ in range(3):
            engine = EngineClient(service.address, lane="local")
            assert dict(engine.pull(MODEL, "live")).keys() == source.arrays.keys()
            del engine
        gc.collect()
        eventually(lambda: service.lane.clients == 1)
        eventually(lambda: threading.active_count() <= threads)


@alone
def test_a_thousand_operations_leave_no_descriptor_and_no_mapping_behind(tmp_path: Path) -> None:
    def used() -> tuple[int, int, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().count("weighbridge-image")
        return len(os.listdir("/proc/self/fd")), maps, threading.active_count()

    sources = [tiny_folder(tmp_path / f"hf-{seed}", seed=seed) for seed in range(3)]
    with (
        lane_service(tmp_path, MODEL, sources[0]) as service,
        TrainerClient(service.address, lane="local") as trainer,
        EngineClient(service.address, lane="local") as engine,
    ):
        for source in (*sources, *sources):
            trainer.push_folder(MODEL, source.folder).wait("ready", timeout=20)
            dict(engine.pull(MODEL, "live"))
        connection = connected(service.address)
        refused = pb.LaneRequest(begin_write=pb.BeginWrite(model=MODEL, number=999))
        before = used()
        for number in range(300):
            answer, descriptors = connection.ask(begin_read(int(engine.version(MODEL, "live").number)))
            protocol.close_all(descriptors)
            connection.ask(pb.LaneRequest(end_read=pb.EndRead(loan=answer.read.loan)))
            with pytest.raises(WeighbridgeError):
                connection.ask(refused)
            if number % 20 == 0:
                dict(engine.pull(MODEL, "live"))
                trainer.push_folder(MODEL, sources[number % 3].folder).wait("ready", timeout=20)
        eventually(lambda: max(np.subtract(used(), before)) <= 3)
        connection.close()


def test_another_user_cannot_write_through_a_descriptor_for_reading() -> None:
    if os.getuid():
        pytest.skip("only root can become another user")
    region = Region(PAGE, None)
    fd = region.reopen(writable=False)

    def write() -> None:
        with pytest.raises(PermissionError):
            os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        with pytest.raises(PermissionError):
            mmap.mmap(fd, PAGE, prot=mmap.PROT_READ | mmap.PROT_WRITE)

    assert in_a_fork(write, NOBODY)()
    os.close(fd)
    region.close()


def test_a_socket_in_the_users_own_folder_is_for_this_user_only(
    tmp_path: Path, open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(open_folder))
    with running_service(tmp_path / "store", local_socket="auto") as service:

        def connect() -> None:
            with pytest.raises(PermissionError), socket.socket(socket.AF_UNIX) as lane:
                lane.connect(service.lane.path)

        assert in_a_fork(connect, NOBODY)()
        assert find_faces(service.address).private
        connected(service.address).close()


def test_who_answers_in_place_of_the_service_must_be_the_clients_own_user(open_folder: Path) -> None:
    planted = open_folder / "planted.sock"

    def pretend() -> None:
        with socket.socket(socket.AF_UNIX) as lane:
            lane.bind(str(planted))
            lane.listen()
            planted.chmod(0o666)
            lane.accept()[0].recv(1)

    ended = in_a_fork(pretend, NOBODY)
    eventually(lambda: planted.exists() and planted.stat().st_mode & 0o777 == 0o666)
    with pytest.raises(FailedPrecondition, match="is another user's"):
        LaneConnection(str(planted), True, "id", "me", "", lambda _key: None, lambda _connection: None)
    assert ended()


def test_a_service_whose_own_folder_has_too_long_a_path_serves_without_a_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sources: list[TinyModel]
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    with running_service(tmp_path / "store", local_socket="auto") as service:
        with TrainerClient(service.address, lane="auto") as trainer:
            trainer.register_files(MODEL, sources[0].files)
            report = trainer.push_folder(MODEL, sources[0].folder).report(20)
        assert (report.lane, "longer than" in report.lane_reason) == ("grpc", True)


def test_a_service_stops_although_a_client_is_being_served_for_ever(
    service: RunningService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck, go_on, went_on = threading.Event(), threading.Event(), threading.Event()

    def grant(*_arguments: object) -> None:
        stuck.set()
        go_on.wait(60)
        went_on.set()

    monkeypatch.setattr(service.service.serving, "grant", grant)
    lane = LaneServer(service.service, str(tmp_path / "second.sock"), 1024, stop_seconds=0.2)
    with RawLane(lane.path) as client:
        client.ask(pb.LaneRequest(hello=pb.LaneHello(client_id="me")))
        client.send(begin_read())
        assert stuck.wait(60)
        lane.stop()
        assert not went_on.is_set(), "it has not waited for the client's call"
        go_on.set()
