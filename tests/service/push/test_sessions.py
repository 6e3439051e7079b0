"""Do sessions of pushes release their memory and threads, and proceed beside a slow object store and other calls?"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import MISSING, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.alone import alone
from tests.support.heads import open_version
from tests.support.raw_clients import RawClient, TinyModel, assert_equal, stream_of, tiny_folder, whole_layout
from tests.support.services import RunningService, running_service
from tests.support.waiting import answered, eventually
from weighbridge import EngineClient, TrainerClient
from weighbridge.errors import Unavailable, VersionFailed, WeighbridgeError
from weighbridge.v1 import resources_pb2
from weighbridge_service.models.registered_model import RegisteredModel
from weighbridge_service.plan.declarations import Home
from weighbridge_service.plan.push_plan import PreparedPush
from weighbridge_service.push import effect_runner
from weighbridge_service.push.effect_pools import IMAGES, EffectPools
from weighbridge_service.push.ended import EndedPush
from weighbridge_service.push.filling.image_writer import ImageWriter
from weighbridge_service.push.handover import HandedVersion
from weighbridge_service.push.image_allocator import VersionRequest
from weighbridge_service.push.machine import effects as do
from weighbridge_service.push.machine import events as on
from weighbridge_service.push.publisher import Publisher
from weighbridge_service.push.session import PushSession
from weighbridge_service.push.timers import Timers
from weighbridge_storage.documents.entries import OpenEntry
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head.head import Head
from weighbridge_storage.head.head_store import HeadStore
from weighbridge_storage.head.history import History
from weighbridge_storage.memory.images import Image
from weighbridge_storage.memory.regions import Region
from weighbridge_storage.versions.manifest import TensorEntry

MODEL = "acme/tiny"
NAME = ModelName.parse(MODEL)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return tiny_folder(tmp_path_factory.mktemp("tiny") / "hf")


@pytest.fixture
def running(tmp_path: Path, tiny: TinyModel, request: pytest.FixtureRequest) -> Iterator[RunningService]:
    """A service with a model; with the settings that a test names by `with_settings`."""
    with running_service(tmp_path / "store", **getattr(request, "param", {})) as service:
        with TrainerClient(service.address) as trainer:
            trainer.register_model(MODEL, tiny.folder)
        yield service


@pytest.fixture
def client(running: RunningService) -> Iterator[RawClient]:
    with RawClient(running.address) as client:
        yield client


def with_settings(**settings: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("running", [settings], indirect=True, ids=[""])


def finished(running: RunningService) -> None:
    eventually(lambda: not running.service.catalog.snapshots.unfinished)


# --- what they hold


@alone
def test_versions_that_were_published_leave_no_digests_in_memory(tmp_path: Path) -> None:
    tiny = tiny_folder(tmp_path / "hf")

    def entries() -> int:
        gc.collect()
        return sum(type(each) is TensorEntry for each in gc.get_objects())

    with (
        running_service(tmp_path / "store", {MODEL: tiny.files}) as running,
        RawClient(running.address) as client,
    ):

        def entries_after(pushes: int) -> int:
            for _ in range(pushes):
                number = client.push_whole(MODEL, tiny.arrays)
                finished(running)
            nbytes = len(stream_of(tiny.arrays, whole_layout(tiny.arrays), range(len(tiny.arrays))))
            assert client.received(MODEL, number) == [(0, nbytes)], "a rank that asks again is told that all has come"
            return entries()

        before = entries()
        first = entries_after(2)
        assert entries_after(4) <= first < before + 2 * len(tiny.arrays)


@with_settings(kept_pushes=3)
def test_ended_versions_are_remembered_up_to_a_number(running: RunningService, client: RawClient) -> None:
    for step in range(8):
        number = client.open(MODEL, step=step)
        answered(running.service.intake.abort_version(MODEL, number, "no", 10.0))
    # the oldest go when another one is opened
    assert sorted(running.service.catalog.snapshots.of_model(ModelName.parse(MODEL))) == [5, 6, 7, 8]


def live_objects(*kinds: type) -> Counter[type]:
    gc.collect()
    return Counter(type(each) for each in gc.get_objects() if type(each) in kinds)


def push_to(running: RunningService, client: RawClient, tiny: TinyModel, names: Iterable[str]) -> None:
    with TrainerClient(running.address) as trainer:
        for name in names:
            trainer.register_files(name, tiny.files)
            client.push_whole(name, tiny.arrays)
            finished(running)


@alone
def test_many_models_with_a_durable_version_each_hold_no_more_than_a_few(tmp_path: Path) -> None:
    tiny = tiny_folder(tmp_path / "hf")
    names = [f"acme/m{i}" for i in range(12)]
    kinds = (PushSession, ImageWriter, Image, Region, RegisteredModel, PreparedPush)
    with (
        running_service(tmp_path / "store", {MODEL: tiny.files}, kept_images=3, kept_models=2) as running,
        RawClient(running.address) as client,
    ):
        before = live_objects(*kinds)
        push_to(running, client, tiny, names)
        held = live_objects(*kinds)
        held.subtract(before)
        # one more each: the push that was the last to begin, and what it has taken the place of
        most = {PushSession: 5, ImageWriter: 1, Image: 5, Region: 5, RegisteredModel: 7, PreparedPush: 7}
        assert all(held[kind] <= most[kind] for kind in kinds), held
        with EngineClient(running.address) as engine:
            for name in names:
                assert_equal(engine, name, "live", tiny.arrays)
        push_to(running, client, tiny, names[:2])
        with EngineClient(running.address) as engine:
            assert_equal(engine, names[0], "latest", tiny.arrays)
            assert engine.version(names[0], "latest").number == 2


@with_settings(kept_images=3)
def test_the_images_that_were_read_last_are_kept(running: RunningService, client: RawClient, tiny: TinyModel) -> None:
    def in_memory() -> list[str]:
        known = running.service.catalog.snapshots.get
        return [name for name in names if (v := known(ModelName.parse(name), 1)) is not None and v.image]

    names = [f"acme/m{i}" for i in range(6)]
    push_to(running, client, tiny, names[:3])
    assert in_memory() == names[:3]
    with EngineClient(running.address) as engine:
        assert_equal(engine, names[0], "live", tiny.arrays)
        push_to(running, client, tiny, names[3:5])
        assert in_memory() == [
            names[0],
            *names[2:5],
        ]  # the newest was not durable when the others were counted
        reading = engine.pull(names[0], "live")
        push_to(running, client, tiny, names[5:])
        assert in_memory() == [names[0], *names[3:]]
        assert len(dict(reading)) == len(tiny.arrays)


@pytest.mark.parametrize("ending", ["durable", "aborted"])
def test_who_asks_again_after_the_end_of_a_push_is_told_how_it_ended(
    running: RunningService, client: RawClient, tiny: TinyModel, ending: str
) -> None:
    layout = whole_layout(tiny.arrays)
    number = client.open(MODEL, request_id="r/1")
    stream = stream_of(tiny.arrays, layout, client.declare(MODEL, number, layout))
    if ending == "durable":
        client.push(MODEL, number, [(0, stream)])
        client.seal(MODEL, number)
        finished(running)
        push_to(running, client, tiny, [MODEL])  # takes its image
    else:
        answered(running.service.intake.abort_version(MODEL, number, "changed my mind", 10.0))

    def answers() -> list[Any]:
        calls: list[Callable[[], Any]] = [
            lambda: client.open(MODEL, request_id="r/1"),
            lambda: client.received(MODEL, number),
            lambda: client.seal(MODEL, number).state,
            lambda: client.declare(MODEL, number, layout),
            lambda: client.push(MODEL, number, [(0, stream)]),
            lambda: answered(running.service.intake.abort_version(MODEL, number, "no", 10.0)).state,
            lambda: client.received(MODEL, number, rank=1),
            lambda: running.service.taking_over.has_taken(handed("other")),
        ]
        found = []
        for call in calls[ending == "aborted" :]:  # an aborted version that is opened again is another one
            try:
                found.append(call())
            except WeighbridgeError as error:
                found.append((type(error), error.message, error.fix))
        return found

    def handed(claim: str) -> HandedVersion:
        model = running.service.catalog.model(NAME)
        entry = OpenEntry(number, "r/1", 1, "r", 1, 1, 1, model.files_id, 0)
        return HandedVersion(model, entry, claim, 1, [])

    known = running.service.registry
    assert isinstance(known.find(NAME, number), PushSession)
    before = answers()
    client.open(MODEL, request_id="r/2")
    assert isinstance(known.find(NAME, number), EndedPush)
    assert answers() == before
    if ending == "durable":
        assert before[:3] == [number, [(0, len(stream))], resources_pb2.VERSION_STATE_DURABLE]
    else:
        assert all("changed my mind" in str(each) for each in before[:4])


def test_a_rank_that_comes_while_a_push_ends_does_not_begin_it_again(
    running: RunningService, client: RawClient, tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = client.open(MODEL, request_id="r/1")
    head = running.service.catalog.head(NAME)
    answered(running.service.intake.abort_version(MODEL, number, "changed my mind", 10.0))
    client.open(MODEL, request_id="r/2")
    known = running.service.registry
    assert isinstance(known.find(NAME, number), EndedPush)
    monkeypatch.setattr(running.service.catalog, "head", lambda _name: head)  # does not say so yet
    answers, find = iter([None]), known.find
    monkeypatch.setattr(known, "find", lambda *which: next(answers, find(*which)))
    with pytest.raises(VersionFailed, match="changed my mind"):
        client.declare(MODEL, number, whole_layout(tiny.arrays))
    assert known.get(NAME, number) is None


def test_an_image_goes_back_if_nothing_can_write_to_it(
    running: RunningService, client: RawClient, tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(effect_runner, "ImageWriter", broken)
    number = client.open(MODEL)
    with pytest.raises(WeighbridgeError, match="the image could not be allocated"):
        client.declare(MODEL, number, whole_layout(tiny.arrays))
    assert running.service.images.usage().memory_in_use == 0


# --- what keeps them going


@pytest.mark.parametrize("kind", [do.Awaited, do.Release])
def test_messages_name_effects_in_words(kind: type[do.Effect]) -> None:
    known: dict[str, Any] = {
        "file": "model.safetensors", "to": Home("host:1", "boot"), "error": Unavailable("it is away"), "unless_claimed": False,
    }  # fmt: skip
    for each in kind.__subclasses__():
        required = [f.name for f in fields(each) if f.default is MISSING]
        words = str(each(**{name: known[name] for name in required}))
        assert words.startswith(("the ", "its ")), each
        assert not set("()=_") & set(words.replace("(boot)", "")), "no word of a program"


def test_a_store_that_is_away_is_said_once_and_again_when_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Heads:
        away = True

        def history(self, model: ModelName) -> History:
            if self.away:
                raise Unavailable("the store is away")
            head, _ = open_version(Head(), request_id="r", step=1, run="r", ranks=1, now_ms=1, lease_ms=1)
            return History(head, lambda ref: pytest.fail(f"no node was written: {ref}"))

    heads: Any = Heads()
    store: Any = None
    model: Any = SimpleNamespace(name=NAME)
    publisher = Publisher(store, heads, model, OpenEntry(1, "r", 1, "r", 1, 1, 2, "", 0), Home("host:1", "boot"))
    with caplog.at_level("INFO"):
        for away in (True, True, True, False, False, True, True):
            heads.away = away
            verdict = publisher.look(do.LookAtHead()).verdict
            assert verdict is (on.Verdict.UNKNOWN if away else on.Verdict.OPEN)
    said = [each.getMessage() for each in caplog.records if each.name == Publisher.__module__]
    assert [("could not" in text, "again" in text) for text in said] == [
        (True, False),
        (False, True),
        (True, False),
    ]


def test_a_version_that_was_aborted_while_it_waited_gets_no_image(
    tmp_path: Path, tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy, done, taken = threading.Semaphore(0), threading.Event(), list[int]()
    take = VersionRequest.take

    def slow(self: VersionRequest) -> Image:
        taken.append(self._owner.number)
        busy.release()
        done.wait(30)
        return take(self)

    monkeypatch.setattr(VersionRequest, "take", slow)
    layout = whole_layout(tiny.arrays)
    with running_service(tmp_path / "store") as running, RawClient(running.address) as client:
        with TrainerClient(running.address) as trainer:
            trainer.register_model(MODEL, tiny.folder)
        # as many as are made at a time
        before = [client.open(MODEL, request_id=str(i)) for i in range(IMAGES)]
        second = client.open(MODEL, request_id="b")
        with ThreadPoolExecutor(IMAGES + 1) as pool:
            declared = [pool.submit(client.declare, MODEL, number, layout) for number in before]
            assert all(busy.acquire(timeout=60) for _ in before)
            refused = pool.submit(client.declare, MODEL, second, layout)
            waiting = running.service.registry
            eventually(lambda: do.AcquireImage() in waiting.get(NAME, second).state.running)  # type: ignore[union-attr]
            answered(running.service.intake.abort_version(MODEL, second, "changed my mind", 10.0))
            done.set()
            assert all(each.result(60) for each in declared)
            with pytest.raises(VersionFailed, match="changed my mind"):
                refused.result(60)
        third = client.open(MODEL, request_id="c")
        client.declare(MODEL, third, layout)
        assert set(taken) == {*before, third}
        assert running.service.images.usage().made == IMAGES + 1


def test_a_timer_calls_at_the_earliest_time_that_was_asked_for_and_holds_nothing_for_the_others() -> None:
    timers, called = Timers(), list[tuple[str, float]]()

    class Sleeper:
        def __init__(self, name: str) -> None:
            self.name = name

        def tick(self) -> None:
            called.append((self.name, time.monotonic()))

    try:
        early, late, never = Sleeper("early"), Sleeper("late"), Sleeper("never")
        begun = time.monotonic()
        for step in range(1000):  # each deadline is earlier than the previous one
            timers.wake(late, begun + 1000 - step / 1000)
            timers.wake(never, begun + 1000 - step / 1000)
            timers.wake(early, begun + 1000 - step / 1000)
        assert len(timers._queue) < 300
        timers.wake(late, begun + 0.3)
        timers.wake(early, begun + 0.1)
        timers.wake(early, begun + 0.2)
        timers.forget(never)
        gone = weakref.ref(never)
        del never
        gc.collect()
        assert gone() is None
        eventually(lambda: len(called) == 2)
        assert [name for name, _ in called] == ["early", "late"]
        assert [at >= begun + due for (_, at), due in zip(called, (0.1, 0.3), strict=True)] == [True, True]
        timers.wake(early, 0.0)
        eventually(lambda: len(called) == 3)
    finally:
        timers.stop()


def test_calls_of_the_store_that_hang_keep_no_others_from_it() -> None:
    pools = EffectPools()
    kinds: tuple[do.Effect, ...] = (
        do.MakePlan(), do.AcquireImage(), do.Digest("a"), do.Upload("a"), do.LookAtHead(), do.Claim(), do.Confirm(),
        do.WriteManifestAndPublish(), do.GiveUp(Unavailable(""), False), do.HandOver(Home("h", "b")),
    )  # fmt: skip
    assert {kind.POOL for kind in kinds} == set(do.Pool)
    hung = {kind: threading.Event() for kind in kinds}
    try:
        for hang in kinds:
            hanging = hung[hang]
            for _ in range(100):
                pools.submit(hang, hanging.wait)
            others = [kind for kind in kinds if kind is not hang]
            done = threading.Semaphore(0)
            for kind in others:
                pools.submit(kind, lambda done=done: done.release())  # type: ignore[misc]
            assert all(done.acquire(timeout=60) for _ in others), f"others wait for {hang}"
            hanging.set()
    finally:
        for hanging in hung.values():
            hanging.set()
        pools.stop(10.0)


@pytest.mark.parametrize("kind", [do.Digest, do.Confirm, do.Upload, do.UploadDigests, do.WriteManifestAndPublish])
def test_an_effect_that_cannot_be_begun_is_tried_again(
    tmp_path: Path, tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, kind: type[do.Effect]
) -> None:
    refused: list[do.Effect] = []
    submit = EffectPools.submit

    def refusing_once(self: EffectPools, effect: do.Effect, carry_out: Any) -> None:
        if isinstance(effect, kind) and not refused:
            refused.append(effect)
            raise RuntimeError("can't start new thread")
        submit(self, effect, carry_out)

    monkeypatch.setattr(EffectPools, "submit", refusing_once)
    with running_service(tmp_path / "store") as running, RawClient(running.address) as client:
        with TrainerClient(running.address) as trainer:
            trainer.register_model(MODEL, tiny.folder)
        number = client.push_whole(MODEL, tiny.arrays)
        finished(running)
        found = running.service.catalog.get_version(MODEL, str(number))
    assert refused
    assert (found.state.value, found.error) == ("durable", "")


@with_settings(opening_wait=0.2)
def test_calls_that_open_versions_do_not_pile_up_behind_a_store_that_hangs(
    running: RunningService, client: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, hanging, update = threading.Event(), threading.Event(), HeadStore.update

    def slow(self: HeadStore, *args: Any, **more: Any) -> Any:
        entered.set()
        hanging.wait(60)
        return update(self, *args, **more)

    monkeypatch.setattr(HeadStore, "update", slow)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.open, MODEL, request_id="a")
        assert entered.wait(60)
        with pytest.raises(Unavailable, match="does not answer"):
            client.open(MODEL, request_id="b")
        assert not first.done(), "the store hangs still"
        hanging.set()
        assert first.result(60) == 1
    assert client.open(MODEL, request_id="b") == 2


def test_a_service_that_loses_a_visible_version_when_it_ends_says_so(
    running: RunningService,
    client: RawClient,
    tiny: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def away(*_: Any) -> None:
        raise Unavailable("the store is away")

    monkeypatch.setattr(Publisher, "publish", away)
    number = client.push_whole(MODEL, tiny.arrays)
    eventually(lambda: [version.number for version in running.service.catalog.snapshots.not_durable] == [number])
    assert not running.service.drain()
    assert "is lost: not durable: the store is away" in caplog.text
