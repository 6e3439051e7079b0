"""Is memory allocated before a version needs it, and only where no other push wants it?"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.support.alone import alone
from tests.support.descriptors import descriptors
from tests.support.images import acquire
from tests.support.new_threads import NewThreads
from tests.support.raw_clients import TinyModel, tiny_folder
from tests.support.services import RunningService, running_service
from tests.support.waiting import eventually
from weighbridge import TrainerClient
from weighbridge._cli import commands
from weighbridge.errors import NotFound, ResourceExhausted
from weighbridge_service.api.lane import peer_process
from weighbridge_service.api.lane.peer_process import PeerProcess
from weighbridge_storage.memory import image_pool
from weighbridge_storage.memory.image_books import HeldFor, ImageOwner
from weighbridge_storage.memory.image_pool import ImagePool
from weighbridge_storage.memory.regions import PAGE, Region

MODEL = "acme/tiny"
SIZES = {"a": PAGE}
FIRST, SECOND = ImageOwner("acme/first"), ImageOwner("acme/second")


@pytest.fixture
def model(tmp_path: Path) -> TinyModel:
    return tiny_folder(tmp_path / "hf", seed=0)


def test_a_push_by_the_local_lane_finds_memory_for_the_next_one(tmp_path: Path, model: TinyModel) -> None:
    with (
        running_service(tmp_path / "store", local_socket=str(tmp_path / "lane.sock")) as service,
        TrainerClient(service.address, lane="local") as trainer,
    ):
        usage = service.service.images.usage
        trainer.register_files(MODEL, model.files)
        trainer.push_folder(MODEL, model.folder).wait(timeout=20)
        eventually(lambda: usage().memory_free == usage().memory_in_use > 0)
        for _ in range(3):
            trainer.push_folder(MODEL, model.folder).wait(timeout=20)
        assert usage().made == 2


def test_a_push_by_grpc_takes_no_more_memory_than_it_needs(tmp_path: Path, model: TinyModel) -> None:
    since = NewThreads()
    with (
        running_service(tmp_path / "store") as service,
        TrainerClient(service.address, lane="grpc") as trainer,
    ):
        trainer.register_files(MODEL, model.files)
        trainer.push_folder(MODEL, model.folder).wait(timeout=20)
        assert not since.named("ahead-")
        assert service.service.images.usage().made == 1


def _cli(service: RunningService, *arguments: str) -> Result:
    return CliRunner().invoke(commands, [*arguments, "--server", service.address])


def test_warm_makes_the_memory_of_two_images_and_pushes_make_no_more(tmp_path: Path, model: TinyModel) -> None:
    with running_service(tmp_path / "store") as service, TrainerClient(service.address) as trainer:
        with pytest.raises(NotFound):
            trainer.warm(MODEL)
        trainer.register_files(MODEL, model.files)
        found = json.loads(_cli(service, "warm", MODEL, "--json").stdout)
        usage = service.service.images.usage()
        assert found == {"model": MODEL, "images": 2, "wanted": 2, "image_bytes": usage.memory_free // 2}
        assert (usage.made, usage.memory_in_use) == (2, 0)
        for _ in range(3):
            trainer.push_folder(MODEL, model.folder).wait(timeout=20)
            assert trainer.warm(MODEL).images == 2
        assert service.service.images.usage().made == 2


def test_warm_says_that_there_is_no_room_for_all(tmp_path: Path, model: TinyModel) -> None:
    with running_service(tmp_path / "store") as service, TrainerClient(service.address) as trainer:
        trainer.register_files(MODEL, model.files)
        nbytes = trainer.warm(MODEL).image_bytes
    with running_service(tmp_path / "store", memory_budget=2 * nbytes - 1) as service:
        result = _cli(service, "warm", MODEL)
        assert result.exit_code == 1
        assert "memory for 1 of 2 images" in result.output
        assert "no room for more" in result.output
        assert service.service.images.usage().memory_free == nbytes


def test_memory_ahead_takes_nothing_from_others(tmp_path: Path) -> None:
    pool = ImagePool(2 * PAGE, tmp_path, spill_bytes=PAGE)
    assert pool.make_ahead(SIZES, FIRST, 2) == 2
    assert pool.make_ahead(SIZES, SECOND, 2) == 0, "what is free is the first model's"
    assert pool.usage().made == 2
    image = acquire(pool, SIZES, ImageOwner("acme/second", 1))
    assert image.region.in_memory, "but who needs it has it"
    assert pool.make_ahead(SIZES, FIRST, 2) == 1
    assert pool.make_ahead(SIZES, SECOND, 2) == 1
    with pool.queue({"a": 2 * PAGE}) as waiting:
        with pytest.raises(ResourceExhausted):
            waiting.take()
        image.release()
        assert pool.make_ahead({"b": PAGE // 2}, ImageOwner("acme/third"), 2) == 0, "somebody waits"


def test_an_image_lies_in_memory_that_its_model_had_before(tmp_path: Path) -> None:
    recalled: list[Region] = []
    pool = ImagePool(4 * PAGE, tmp_path, recalled.append)
    first = [acquire(pool, SIZES, ImageOwner("acme/first", 1 + i)) for i in range(2)]
    second = [acquire(pool, SIZES, ImageOwner("acme/second", 1 + i)) for i in range(2)]
    own = {name: {image.region.key for image in images} for name, images in (("first", first), ("second", second))}
    for image in (second[0], first[0], second[1], first[1]):
        image.release()
    for name in ("first", "second", "second", "first"):
        image = acquire(pool, SIZES, ImageOwner(f"acme/{name}", 9))
        assert image.region.key in own[name]
        image.release()
    assert not recalled
    taken = [acquire(pool, SIZES, ImageOwner("acme/first", 10 + i)) for i in range(3)]
    assert [region.key in own["second"] for region in recalled] == [True], "who wrote it has to let go of it"
    for image in taken:
        image.release()


@pytest.fixture
def slow_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Delay the first region; yields the event that reports its begin, and the one that lets it finish."""
    begun, go_on = threading.Event(), threading.Event()

    def make(capacity: int, folder: str | None, on_allocated: Callable[[int], None]) -> Region:
        if not begun.is_set():
            begun.set()
            assert go_on.wait(20)
        return Region(capacity, folder, on_allocated)

    monkeypatch.setattr(image_pool, "Region", make)
    yield begun, go_on
    go_on.set()


def test_a_version_waits_for_memory_that_is_being_made_ahead_and_does_not_go_to_disk(
    tmp_path: Path, slow_memory: tuple[threading.Event, threading.Event]
) -> None:
    begun, go_on = slow_memory
    pool = ImagePool(PAGE, tmp_path)
    making = threading.Thread(target=pool.make_ahead, args=(SIZES, FIRST, 2))
    making.start()
    assert begun.wait(20)
    with pool.queue({"large": 2 * PAGE}) as large, pool.queue(SIZES, SECOND) as version:
        image = large.take()  # it could never lie in memory
        assert not image.region.in_memory
        image.release()
        with pytest.raises(ResourceExhausted) as refused:
            version.take()
        assert refused.value.retry_after
        go_on.set()
        image = version.take(patience=20)
    making.join()
    assert image.region.in_memory
    image.release()
    assert pool.usage().disk_in_use == 0


def test_memory_that_others_keep_mapped_stays_in_the_books_until_they_let_go(tmp_path: Path) -> None:
    recalled: list[str] = []
    pool = ImagePool(2 * PAGE, tmp_path, lambda region: recalled.append(region.key), spill_bytes=PAGE)
    image = acquire(pool, SIZES, ImageOwner("acme/first", 1))
    key, kept = image.region.key, image.region.reopen(writable=True)
    image.release()
    assert pool.trim() == 0
    assert recalled == [key]
    [holding] = pool.holdings()
    assert (holding.use, holding.nbytes, holding.owner.model) == (HeldFor.MAPPED, PAGE, "acme/first")
    with pytest.raises(ResourceExhausted, match="images hold"):
        pool.queue({"large": 2 * PAGE}).take()
    os.close(kept)
    assert pool.trim() == PAGE
    assert pool.usage().memory_in_use == pool.usage().memory_free == 0


def test_a_push_does_without_memory_ahead_where_no_thread_can_be_started(
    tmp_path: Path, model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("ahead-"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with (
        running_service(tmp_path / "store", local_socket=str(tmp_path / "lane.sock")) as service,
        TrainerClient(service.address, lane="local") as trainer,
    ):
        trainer.register_files(MODEL, model.files)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            handle = trainer.push_folder(MODEL, model.folder)
            assert handle.report(20).lane == "local"
            handle.wait(timeout=20)
        assert service.service.images.usage().made == 1
        trainer.push_folder(MODEL, model.folder).wait(timeout=20)
        assert service.service.images.usage().made == 2


@pytest.mark.parametrize("kernel", ["new", "old"])
@alone
def test_a_process_is_known_to_have_ended_once_it_has(tmp_path: Path, kernel: str) -> None:
    if kernel == "old":
        peer_process._PEER_PIDFD = 9999
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        code = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); input()"
        with subprocess.Popen([sys.executable, "-c", code, path], stdin=subprocess.PIPE) as process:
            connection, _ = listening.accept()
            with connection:
                seen = PeerProcess(connection)
                assert not seen.ended()
                process.kill()
                eventually(seen.ended)
                process.wait()
                assert PeerProcess(connection).ended(), "also if it is asked for later"
            assert not PeerProcess(connection).ended(), "nothing can be found out any more"
    before = descriptors()
    del seen
    assert "anon_inode:[pidfd]" in dict(before - descriptors()).values()


def test_a_process_that_nobody_can_tell_of_is_not_taken_for_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_process, "_PEER_PIDFD", 9999)
    monkeypatch.delattr(os, "pidfd_open")
    here, there = socket.socketpair(socket.AF_UNIX)
    with here, there:
        assert not PeerProcess(here).ended()
