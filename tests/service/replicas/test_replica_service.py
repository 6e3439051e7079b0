"""Do replicas exchange news at once, read each other's files to the bit, and notice a lost replica, without the
store?
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from tests.support.gate import Gate
from tests.support.waiting import eventually
from weighbridge.errors import (
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Unavailable,
    VersionFailed,
    WeighbridgeError,
)
from weighbridge.v1 import bulk_service_pb2, replica_service_pb2_grpc
from weighbridge.v1 import replica_service_pb2 as pb
from weighbridge_service.access.access import Access
from weighbridge_service.access.audit import Audit
from weighbridge_service.admission.byte_budget import LEAST_BYTES, ByteBudget, Direction
from weighbridge_service.admission.identity_quotas import IdentityQuotas
from weighbridge_service.admission.message_waits import MessageWaits
from weighbridge_service.admission.tickets import Tickets
from weighbridge_service.api.grpc.bulk_streams import BulkStreams
from weighbridge_service.api.grpc.method import Supervision, methods_of
from weighbridge_service.api.grpc.methods import Methods
from weighbridge_service.api.grpc.replica_handlers import ReplicaHandlers
from weighbridge_service.api.grpc.requests import RequestLimits
from weighbridge_service.api.grpc.server import GrpcListener
from weighbridge_service.api.grpc.weight_handlers import BulkHandlers
from weighbridge_service.plan.declarations import Home
from weighbridge_service.push.handover import HandedVersion
from weighbridge_service.replicas.heartbeat import Heartbeat
from weighbridge_service.replicas.links import Links, refuses
from weighbridge_service.replicas.liveness import Liveness, SilenceLimits
from weighbridge_service.replicas.peer_files import PeerFiles
from weighbridge_service.replicas.progress import (
    Progress,
    SharedPush,
    Stage,
    progress_from_proto,
    progress_to_proto,
)
from weighbridge_storage.cache.block_cache import BlockCache
from weighbridge_storage.documents.names import ModelName, version_key
from weighbridge_storage.memory.images import ImageHold
from weighbridge_storage.stores.local import LocalStore
from weighbridge_storage.stores.objects import ByteArray
from weighbridge_storage.threads import ThreadPool
from weighbridge_storage.versions.manifest import FileEntry
from weighbridge_storage.versions.writing import Written

MODEL = ModelName.parse("acme/peers")
CLAIM = "c1"
KEY = (str(MODEL), 3, CLAIM)
MIB = 1 << 20


class Replica:
    """A process of the service, reduced to the parts that other replicas use; a test gives `SharedPushes` and
    `OwnFiles`.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:0",
        boot: str = "b",
        advertised: str = "",
        *,
        beat_s: float = 1.0,
        silent_s: float = 1.5,
    ) -> None:
        self.budget = ByteBudget(LEAST_BYTES)
        self._listener = GrpcListener(address, 64)
        self._workers = ThreadPool("replica", 16, most_waiting=64)
        port = self._listener.port
        self.home = Home(advertised or f"127.0.0.1:{port}", boot)
        self.pushes: list[SharedPush] = []
        self.files: dict[str, np.ndarray] = {}
        self.final = True
        self.told: list[tuple[Home, Progress]] = []
        self.gone: list[tuple[Home, VersionFailed]] = []
        self.ended: Progress | None = None
        self.met: list[Home] = []
        self.left: list[Home] = []
        self.engines: list[pb.ReportedEngine] = []
        self.reads = 0
        self.leases = 0
        self.links = Links(self.home, left=self.left.append)
        self.news = threading.Event()
        self.heartbeat = Heartbeat(self.links, self, self.news, silent_s, beat_s=beat_s)
        streams = BulkStreams(self.budget, 16, 5.0, self._workers, IdentityQuotas())
        loop, workers = self._listener.loop.loop, self._workers
        self._waits = MessageWaits(lambda: 0)
        supervision = Supervision(
            Access(), Audit(None), lambda *_: None, self._waits, RequestLimits(), IdentityQuotas()
        )
        methods = Methods(loop, workers, workers, workers, workers, supervision)
        handlers = ReplicaHandlers(
            self.home, self, self, streams, self.met.append, self.left.append, lambda: self.links.leaving, self, self.engines.extend
        )  # fmt: skip
        contract = {
            pb.DESCRIPTOR.services_by_name["ReplicaService"]: handlers,
            bulk_service_pb2.DESCRIPTOR.services_by_name["BulkService"]: BulkHandlers(Tickets(b""), 0),
        }
        self._listener.answer(methods.handling(methods_of(contract.items(), {}, supervision)))

    def shared(self) -> Sequence[SharedPush]:
        return list(self.pushes)

    def progress(self, model: str, number: int, claim: str) -> Sequence[Progress]:
        there = [p.progress for p in self.pushes if p.progress.version == (model, number, claim)]
        return there or ([] if self.ended is None else [self.ended])

    def heard(self, sender: Home, progress: Progress) -> None:
        self.told.append((sender, progress))

    def lost(self, replica: Home, error: VersionFailed) -> None:
        self.gone.append((replica, error))

    def own_file(self, model: str, number: int, claim: str, file: str) -> tuple[ByteArray, ImageHold]:
        if (model, number, claim) != KEY or file not in self.files:
            raise NotFound(f"there is no image of {file} of {model}@{number}")
        if not self.final:
            raise FailedPrecondition(f"{file} is not complete yet")
        self.reads += 1
        self.leases += 1

        def end() -> None:
            self.leases -= 1

        return self.files[file], ImageHold(end)

    def take_over(self, sender: Home, version: HandedVersion, memory_wait: float, go_on: Callable[[], bool]) -> None:
        raise Unavailable(f"{version.key} of {sender} is not wanted")

    def share(self, stage: Stage, peers: Sequence[Replica], **fields: object) -> SharedPush:
        push = SharedPush(
            Progress(*KEY, stage, 0, **fields),  # type: ignore[arg-type]
            tuple(peer.home for peer in peers),
        )
        self.pushes = [push]
        return push

    def stages(self, sender: Replica) -> set[Stage]:
        return {progress.stage for home, progress in self.told if home == sender.home}

    def stop(self) -> None:
        self.heartbeat.close()
        self.links.close()
        self._listener.stop(0)
        self._workers.close()
        self._waits.close()


@pytest.fixture
def make() -> Iterator[Callable[..., Replica]]:
    with ExitStack() as stack:

        def one(**options: Any) -> Replica:
            replica = Replica(**options)
            stack.callback(replica.stop)
            return replica

        yield one


def test_what_changes_at_one_replica_is_known_at_the_others_before_the_next_heartbeat(
    make: Callable[..., Replica],
) -> None:
    replicas = [make(beat_s=600.0) for _ in range(3)]
    first, *others = replicas
    for stage in (Stage.RECEIVING, Stage.COMPLETE):
        first.share(stage, others)
        first.news.set()
        for other in others:
            eventually(lambda: stage in other.stages(first))  # noqa: B023


def test_who_is_told_answers_how_far_it_is_itself(make: Callable[..., Replica]) -> None:
    asking, answering = make(), make()
    answering.share(Stage.COMPLETE, [])
    asking.share(Stage.RECEIVING, [answering])
    eventually(lambda: Stage.COMPLETE in asking.stages(answering))


def test_of_another_agreement_nothing_is_answered(make: Callable[..., Replica]) -> None:
    asking, answering = make(), make()
    answering.pushes = [SharedPush(Progress(KEY[0], KEY[1], "another claim", Stage.COMPLETE, 0), ())]
    asking.share(Stage.RECEIVING, [answering])
    eventually(lambda: answering.told)
    asking.news.set()
    eventually(lambda: len(answering.told) > 1)
    assert asking.told == []


def test_written_files_are_delivered_once_and_to_the_bit(make: Callable[..., Replica]) -> None:
    asking, answering = make(), make()
    written = Written({"a.safetensors": FileEntry(7, "0" * 32, "0" * 64)}, {})
    asking.share(Stage.WRITTEN, [answering], written=written)
    asking.news.set()
    eventually(lambda: answering.told)
    asking.news.set()
    eventually(lambda: len(answering.told) > 1)
    assert [progress.written for _, progress in answering.told[:2]] == [written, None]


def test_how_a_version_ended_is_told_once_to_those_who_shared_it(make: Callable[..., Replica]) -> None:
    asking, answering = make(), make()
    asking.share(Stage.RECEIVING, [answering])
    eventually(lambda: answering.told)
    asking.ended = Progress(*KEY, Stage.FAILED, 0, error="the disk is full")
    asking.pushes = []
    asking.news.set()
    eventually(lambda: Stage.FAILED in answering.stages(asking))
    count = len(answering.told)
    asking.news.set()
    eventually(lambda: not asking.heartbeat._peers)  # so it receives no more heartbeats
    assert answering.told[-1][1].error == "the disk is full"
    assert len(answering.told) == count


def test_a_replica_whose_process_has_ended_is_gone_long_before_one_that_is_silent_and_named(
    make: Callable[..., Replica],
) -> None:
    watching, dying = make(silent_s=600.0), make()
    watching.share(Stage.COMPLETE, [dying])
    eventually(lambda: dying.told)
    dying.stop()
    eventually(lambda: watching.gone)
    home, error = watching.gone[0]
    assert home == dying.home
    assert dying.home.address in error.message


def test_a_replica_that_was_restarted_at_the_same_address_is_gone_at_once(
    make: Callable[..., Replica],
) -> None:
    watching, before = make(), make()
    watching.share(Stage.COMPLETE, [before])
    eventually(lambda: before.told)
    before.stop()
    make(address=before.home.address, boot="c")
    eventually(lambda: watching.gone)
    assert watching.gone[0][0] == before.home
    assert "restarted" in watching.gone[0][1].message


def test_a_replica_that_is_cut_off_is_gone_when_nothing_was_heard_for_long_enough(
    make: Callable[..., Replica],
) -> None:
    watching, stalled = make(), make()
    with Gate(stalled.home.address) as gate:
        stalled_home = Home(gate.address, "b")
        watching.pushes = [SharedPush(Progress(*KEY, Stage.COMPLETE, 0), (stalled_home,))]
        gate.hold_after(0)
        eventually(lambda: watching.gone)
        assert watching.gone[0][0] == stalled_home
        assert not refuses(gate.address)


LIMITS = SilenceLimits(refused_s=2.0, silent_s=60.0)


@pytest.mark.parametrize(
    ("calls", "lost"),
    [
        ([(1.0, True), (2.9, True)], False),
        ([(1.0, True), (3.0, True)], True),
        ([(1.0, True), (2.0, None), (3.5, True)], False),
        ([(1.0, True), (2.0, False), (3.5, True)], False),
        ([(1.0, False), (59.9, False)], False),
        ([(1.0, False), (60.0, False)], True),
        ([(30.0, None), (60.0, False), (89.9, False)], False),
    ],
)
def test_a_replica_is_lost_if_it_is_refused_for_seconds_or_silent_for_long(
    calls: list[tuple[float, bool | None]], lost: bool
) -> None:
    """Each call: when, and whether it was refused, or answered (None)."""
    health = Liveness(0.0)
    now_s = 0.0
    for now_s, refused in calls:
        health = health.answered(now_s) if refused is None else health.failed(now_s, refused=refused)
    assert health.is_lost(now_s, LIMITS) is lost


def test_progress_survives_the_wire_and_what_a_later_release_says_is_passed_over() -> None:
    written = Written({"a.safetensors": FileEntry(7, "0" * 32, "0" * 64)}, {})
    for stage in Stage:
        progress = Progress(*KEY, stage, 3, 2, written, "why")
        assert progress_from_proto(progress_to_proto(progress, with_files=True)) == progress
    later = pb.VersionProgress(model="a/b", number=1, claim="c", stage=99)  # type: ignore[arg-type]
    assert progress_from_proto(later) is None
    with pytest.raises(DataLoss):
        progress_from_proto(pb.VersionProgress(stage=pb.PUSH_STAGE_WRITTEN, written=b"[" * 1000))


FILE = "model-00001.safetensors"


@pytest.fixture
def data() -> np.ndarray:
    return np.random.default_rng(5).integers(0, 256, 5 * MIB + 12_345, np.uint8)


@pytest.mark.parametrize(("offset", "length"), [(0, 5 * MIB + 12_345), (7, 3 * MIB), (5 * MIB, 1), (3, 0)])
def test_any_part_of_a_file_is_read_from_its_owner(
    make: Callable[..., Replica], data: np.ndarray, offset: int, length: int
) -> None:
    owner, reader = make(), make()
    owner.files[FILE] = data
    found = reader.links.read_file(owner.home, KEY, FILE, offset, length)
    assert found == data[offset : offset + length].tobytes()
    eventually(lambda: owner.leases == 0)
    assert owner.budget.in_flight.nbytes[Direction.REPLICAS] == 0


def test_what_an_owner_does_not_give_is_refused_with_the_reason(make: Callable[..., Replica], data: np.ndarray) -> None:
    owner, reader = make(), make()
    owner.files[FILE] = data
    with pytest.raises(InvalidArgument, match="5255225 bytes"):
        reader.links.read_file(owner.home, KEY, FILE, len(data) - 1, 2)
    with pytest.raises(NotFound, match=r"other\.safetensors"):
        reader.links.read_file(owner.home, KEY, "other.safetensors", 0, 1)
    with pytest.raises(NotFound):
        reader.links.read_file(owner.home, (*KEY[:2], "another claim"), FILE, 0, 1)
    owner.final = False
    with pytest.raises(FailedPrecondition, match="not complete"):
        reader.links.read_file(owner.home, KEY, FILE, 0, 1)
    assert owner.leases == 0


def test_files_for_other_replicas_stay_within_their_share_of_the_byte_budget(
    make: Callable[..., Replica],
) -> None:
    owner = make()
    owner.files[FILE] = np.zeros(64 * MIB, np.uint8)
    channel = grpc.insecure_channel(owner.home.address)
    stub = replica_service_pb2_grpc.ReplicaServiceStub(channel)
    calls = [
        stub.ReadFile(pb.ReadFileRequest(model=KEY[0], number=3, claim=CLAIM, file=FILE, offset=0, length=64 * MIB))
        for _ in range(12)
    ]
    eventually(lambda: owner.budget.in_flight.waiting[Direction.REPLICAS] > 0)
    held = owner.budget.in_flight.nbytes[Direction.REPLICAS]
    assert 0 < held <= owner.budget.capacity // 4, "no connection has more than a quarter"
    for call in calls:
        call.cancel()
    channel.close()
    eventually(lambda: owner.budget.in_flight.nbytes[Direction.REPLICAS] == 0)
    eventually(lambda: owner.leases == 0)


class Source:
    """A file of a version that another replica owns, opened through a cache, and whether the version is durable."""

    def __init__(self, tmp_path: Path, owner: Home, reader: Replica, nbytes: int, **options: float) -> None:
        self.store = LocalStore(tmp_path / "store")
        self.cache = BlockCache(tmp_path / "cache", 64 * MIB)
        self.durable = False
        self.error: WeighbridgeError | None = None
        self.owner = owner
        files = PeerFiles(reader.links, self.cache, self.store, **options)
        self.file = files.open(MODEL, 3, CLAIM, lambda _file: self.owner, {FILE: nbytes}, self._is_durable)[FILE]

    def _is_durable(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.durable

    def make_durable(self, data: np.ndarray) -> None:
        self.store.put(version_key(MODEL, 3, FILE), data.tobytes(), mode="create")
        self.durable = True


def test_a_peers_file_is_read_like_any_other_and_each_block_crosses_once(
    make: Callable[..., Replica], data: np.ndarray, tmp_path: Path
) -> None:
    owner, reader = make(), make()
    owner.files[FILE] = data
    source = Source(tmp_path, owner.home, reader, len(data))
    assert not source.file.is_near
    assert source.file.place is None
    target = np.zeros((1000, 64), np.uint8)
    source.file.copy_to(target, 11, (4096, 1))
    expected = np.lib.stride_tricks.as_strided(data[11:], (1000, 64), (4096, 1))
    assert target.tobytes() == expected.tobytes()
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: source.file.read(0, len(data)), range(4)):
            assert np.asarray(found).tobytes() == data.tobytes()
    assert source.cache.usage().fetched == len(data)
    kept = source.file.prepare(0, (len(data),), (1,))
    assert kept is not None
    for each in kept:
        each.release()


def test_reading_goes_on_from_the_store_at_the_same_offset_if_the_owner_ends_after_the_version_is_durable(
    make: Callable[..., Replica], data: np.ndarray, tmp_path: Path
) -> None:
    owner, reader = make(), make()
    owner.files[FILE] = data
    source = Source(tmp_path, owner.home, reader, len(data))
    first = np.asarray(source.file.read(0, 2 * MIB)).tobytes()
    source.make_durable(data)
    owner.stop()
    rest = np.asarray(source.file.read(2 * MIB, len(data) - 2 * MIB)).tobytes()
    assert first + rest == data.tobytes()


def test_reading_goes_on_with_the_replica_that_has_taken_the_file_over(
    make: Callable[..., Replica], data: np.ndarray, tmp_path: Path
) -> None:
    owner, successor, reader = make(), make(), make()
    owner.files[FILE] = successor.files[FILE] = data
    source = Source(tmp_path, owner.home, reader, len(data))
    first = np.asarray(source.file.read(0, 2 * MIB)).tobytes()
    owner.stop()
    # its heartbeat comes in a moment
    threading.Timer(0.5, setattr, (source, "owner", successor.home)).start()
    rest = np.asarray(source.file.read(2 * MIB, len(data) - 2 * MIB)).tobytes()
    assert first + rest == data.tobytes()
    assert successor.reads


def test_reading_goes_on_from_the_store_if_the_owner_has_given_its_memory_away(
    make: Callable[..., Replica], data: np.ndarray, tmp_path: Path
) -> None:
    owner, reader = make(), make()
    owner.files[FILE] = data
    source = Source(tmp_path, owner.home, reader, len(data))
    source.file.read(0, MIB)
    source.make_durable(data)
    owner.files.clear()
    assert np.asarray(source.file.read(0, len(data))).tobytes() == data.tobytes()


def test_who_reads_while_the_owner_ends_before_that_gets_an_error_that_names_it(
    make: Callable[..., Replica], data: np.ndarray, tmp_path: Path
) -> None:
    owner, reader = make(), make()
    owner.files[FILE] = data
    source = Source(tmp_path, owner.home, reader, len(data))
    source.file.read(0, MIB)
    owner.stop()
    # the heartbeat notices it in a moment, and the session fails
    error = VersionFailed(f"the replica {owner.home} has lost what it had received")
    threading.Timer(0.5, setattr, (source, "error", error)).start()
    with pytest.raises(VersionFailed, match=owner.home.address):
        source.file.read(MIB, MIB)


def test_an_owner_that_does_not_answer_is_waited_for_no_longer_than_said(
    make: Callable[..., Replica], data: np.ndarray, tmp_path: Path
) -> None:
    owner, reader = make(), make()
    owner.stop()
    source = Source(tmp_path, owner.home, reader, len(data), patience_seconds=0.5)
    with pytest.raises(Unavailable, match=owner.home.address):
        source.file.read(0, 1)
