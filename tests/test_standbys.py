"""Does memory that was lent ahead, or is being made to be, go to the version that needs it?"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.services import eventually
from weighbridge_service.push.mappings import Mappings
from weighbridge_service.push.standbys import Standbys
from weighbridge_storage import image_pool
from weighbridge_storage.image_pool import ImagePool
from weighbridge_storage.names import ModelName
from weighbridge_storage.regions import Region

SIZES = {"a.safetensors": 40_000}
IMAGE_BYTES = 40_960
FIRST, SECOND = ModelName.parse("acme/first"), ModelName.parse("acme/second")


@pytest.fixture
def slow_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """The first region is long in the making; gives the event that says that it has begun, and the one that lets it be done."""
    begun, go_on = threading.Event(), threading.Event()

    def make(capacity: int, folder: str | None, on_allocated: Callable[[int], None]) -> Region:
        if not begun.is_set():
            begun.set()
            assert go_on.wait(20)
        return Region(capacity, folder, on_allocated)

    monkeypatch.setattr(image_pool, "Region", make)
    yield begun, go_on
    go_on.set()


def test_a_version_gets_the_memory_that_was_just_being_made_ahead_for_another_model(
    tmp_path: Path, slow_memory: tuple[threading.Event, threading.Event]
) -> None:
    begun, go_on = slow_memory
    pool = ImagePool(IMAGE_BYTES, tmp_path)
    standbys = Standbys(pool, Mappings())
    assert standbys.get(FIRST, SIZES, may_make=True) is None
    assert begun.wait(20)
    threading.Timer(0.2, go_on.set).start()
    with standbys.room_for(SIZES):
        image = pool.acquire(SIZES)
        assert standbys.get(FIRST, SIZES, may_make=True) is None
    assert image.region.in_memory
    image.release()


def test_memory_made_ahead_never_lies_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ImagePool(IMAGE_BYTES, tmp_path)
    standbys = Standbys(pool, Mappings())
    image = pool.acquire(SIZES)
    # as if it had been free a moment ago
    monkeypatch.setattr(pool, "fits", lambda _sizes: True)
    assert standbys.get(FIRST, SIZES, may_make=True) is None
    eventually(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("standby-")])
    assert standbys.get(FIRST, SIZES, may_make=False) is None
    assert pool.usage().disk_in_use == 0
    image.release()


def test_memory_that_could_not_be_made_ahead_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    pool = ImagePool(IMAGE_BYTES, tmp_path)
    standbys = Standbys(pool, Mappings())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="new thread"):
            standbys.get(FIRST, SIZES, may_make=True)
    taken = pool.acquire(SIZES)
    with standbys.room_for(SIZES):
        image = pool.acquire(SIZES)
    taken.release()
    image.release()
    assert standbys.get(FIRST, SIZES, may_make=True) is not None


def test_memory_that_is_long_in_the_making_is_not_waited_for_for_ever(
    tmp_path: Path, slow_memory: tuple[threading.Event, threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weighbridge_service.push.standbys._MADE_SECONDS", 0.2)
    begun, _go_on = slow_memory
    pool = ImagePool(IMAGE_BYTES, tmp_path)
    standbys = Standbys(pool, Mappings())
    assert standbys.get(FIRST, SIZES, may_make=True) is None
    assert begun.wait(20)
    with standbys.room_for(SIZES):
        image = pool.acquire(SIZES)
    assert not image.region.in_memory
    image.release()


def test_a_version_that_fits_into_no_memory_does_not_wait_for_any(tmp_path: Path) -> None:
    pool = ImagePool(IMAGE_BYTES, tmp_path)
    standbys = Standbys(pool, Mappings())
    taken = pool.acquire(SIZES)
    with standbys.room_for(SIZES):
        image = pool.acquire(SIZES)
    assert not image.region.in_memory
    assert standbys.take(SECOND, SIZES, ()) is None
    taken.release()
    image.release()
