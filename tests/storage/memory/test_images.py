"""Do images have the memory that a version needs: really allocated, used again, and kept while a reader uses it?"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.alone import alone
from tests.support.descriptors import descriptors
from tests.support.images import acquire
from weighbridge.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, Unavailable
from weighbridge_storage.memory.image_books import PoolUsage
from weighbridge_storage.memory.image_pool import ImagePool
from weighbridge_storage.memory.regions import PAGE

MIB = 1 << 20
SIZES = {
    "model-00001-of-00002.safetensors": MIB + 1,
    "model-00002-of-00002.safetensors": 3 * PAGE,
    "empty": 0,
}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", os.fsencode(folder), b"tmpfs", 0, b"size=4m") != 0:
        pytest.skip(f"cannot mount: {os.strerror(ctypes.get_errno())}")
    yield folder
    libc.umount2(os.fsencode(folder), 2)


def test_files_lie_on_pages_of_their_own_and_do_not_touch() -> None:
    image = acquire(ImagePool(64 * MIB), SIZES)
    assert image.region.in_memory
    assert {name: b.nbytes for name, b in image.buffers.items()} == SIZES
    for i, buffer in enumerate(image.buffers.values()):
        buffer[:] = i + 1
    for i, (name, buffer) in enumerate(image.read_only_buffers.items()):
        assert (buffer == i + 1).all()
        assert image.offsets[name] % mmap.PAGESIZE == 0
    # An independent look through the descriptor, as another process has.
    with mmap.mmap(image.region.fd, 0, access=mmap.ACCESS_READ) as whole:
        for i, (name, offset) in enumerate(image.offsets.items()):
            assert whole[offset : offset + SIZES[name]] == bytes([i + 1]) * SIZES[name]


@pytest.mark.process
def test_another_process_maps_the_same_bytes() -> None:
    image = acquire(ImagePool(64 * MIB), SIZES)
    name, offset = list(image.offsets.items())[1]
    image.buffers[name][:5] = np.frombuffer(b"hello", np.uint8)
    script = f"import mmap; print(mmap.mmap({image.region.fd}, 0, prot=mmap.PROT_READ)[{offset}:{offset + 5}])"
    out = subprocess.run(
        [sys.executable, "-c", script], pass_fds=[image.region.fd], capture_output=True, text=True, check=True
    )
    assert out.stdout == "b'hello'\n"


def test_nobody_can_cut_an_image_in_memory_short() -> None:
    image = acquire(ImagePool(64 * MIB), SIZES)
    with pytest.raises(PermissionError):
        os.ftruncate(image.region.fd, 0)


@pytest.mark.parametrize("budget", [64 * MIB, 0])
def test_all_room_is_there_before_the_first_byte_is_written(tmp_path: Path, budget: int) -> None:
    image = acquire(ImagePool(budget, tmp_path), SIZES)
    assert image.region.in_memory is (budget > 0)
    assert os.fstat(image.region.fd).st_blocks * 512 >= image.region.capacity >= sum(SIZES.values())
    image.buffers["empty"][:] = 1
    assert os.listdir(tmp_path) == []


def test_what_is_read_only_cannot_be_made_writable() -> None:
    image = acquire(ImagePool(64 * MIB), SIZES)
    for buffer in image.read_only_buffers.values():
        with pytest.raises(ValueError, match="WRITEABLE"):
            buffer.flags.writeable = True
    assert image.buffers
    image.freeze()
    with pytest.raises(FailedPrecondition):
        _ = image.buffers
    assert image.read_only_buffers


def test_a_region_is_used_again_and_not_made_anew() -> None:
    pool = ImagePool(64 * MIB)
    first = acquire(pool, SIZES)
    inode = os.fstat(first.region.fd).st_ino
    capacity = first.region.capacity
    first.release()
    assert pool.usage() == PoolUsage(0, capacity, 0, 0, made=1, reused=0)
    second = acquire(pool, SIZES)
    assert os.fstat(second.region.fd).st_ino == inode
    assert pool.usage() == PoolUsage(capacity, 0, 0, 0, made=1, reused=1)
    third = acquire(pool, SIZES)
    assert os.fstat(third.region.fd).st_ino != inode
    assert pool.usage() == PoolUsage(2 * capacity, 0, 0, 0, made=2, reused=1)


def test_a_much_larger_region_is_not_wasted_on_a_small_image() -> None:
    pool = ImagePool(64 * MIB)
    acquire(pool, {"a": 40 * MIB}).release()
    small = acquire(pool, {"a": MIB})
    assert small.region.capacity == MIB
    near = acquire(pool, {"a": 31 * MIB})
    assert near.region.capacity == 40 * MIB
    assert near.buffers["a"].nbytes == 31 * MIB


def test_free_regions_give_way_to_what_is_needed_within_the_budget() -> None:
    pool = ImagePool(10 * MIB)
    for size in (4 * MIB, 6 * MIB):
        acquire(pool, {"a": size}).release()
    image = acquire(pool, {"a": 9 * MIB // 2})
    assert image.region.in_memory
    usage = pool.usage()
    assert usage.memory_in_use == 9 * MIB // 2
    assert usage.memory_in_use + usage.memory_free <= 10 * MIB


@alone
def test_free_regions_of_many_sizes_do_not_use_up_the_descriptors() -> None:
    pool, before = ImagePool(256 * MIB), descriptors()
    images = [acquire(pool, {"a": (1 + i) * PAGE}) for i in range(200)]
    assert len(descriptors() - before) >= 200
    for image in images:
        image.release()
    del image, images
    assert len(descriptors() - before) <= 130
    usage = pool.usage()
    assert usage.memory_in_use == 0
    assert usage.memory_free == sum((1 + i) * PAGE for i in range(200 - 64, 200)), "the last are kept"


def test_what_is_over_the_budget_goes_to_disk_and_comes_back(tmp_path: Path) -> None:
    pool = ImagePool(4 * MIB, tmp_path)
    inside = acquire(pool, {"a": 3 * MIB})
    outside = acquire(pool, {"a": 3 * MIB})
    assert (inside.region.in_memory, outside.region.in_memory) == (True, False)
    outside.buffers["a"][:] = 7
    assert (outside.read_only_buffers["a"] == 7).all()
    assert pool.usage() == PoolUsage(3 * MIB, 0, 3 * MIB, 0, made=2, reused=0)
    outside.release()
    again = acquire(pool, {"a": 3 * MIB})
    assert not again.region.in_memory
    assert pool.usage() == PoolUsage(3 * MIB, 0, 3 * MIB, 0, made=2, reused=1)
    again.release()
    inside.release()
    assert acquire(pool, {"a": 3 * MIB}).region.in_memory
    assert pool.trim() == 3 * MIB
    assert pool.usage().disk_free == 0


def test_over_the_budget_without_a_folder_is_an_error_that_leaves_no_trace() -> None:
    pool = ImagePool(4 * MIB)
    held = acquire(pool, {"a": 3 * MIB})
    for _ in range(3):
        with pytest.raises(ResourceExhausted, match=r"3\.1 MB do not fit: images hold 3\.1 MB of memory"):
            acquire(pool, {"a": 3 * MIB})
    assert pool.usage().memory_in_use == 3 * MIB
    held.release()
    acquire(pool, {"a": 4 * MIB})


def open_files(folder: Path) -> list[str]:
    """Files in a folder that this process has open, those without a name included."""
    return [path for _, path in descriptors() if path.startswith(f"{folder}/")]


def test_a_full_disk_is_an_error_and_not_a_signal(small_disk: Path) -> None:
    pool = ImagePool(0, small_disk)
    assert not open_files(small_disk)
    for _ in range(3):
        with pytest.raises(ResourceExhausted):
            acquire(pool, {"a": 5 * MIB})
    assert os.statvfs(small_disk).f_bfree * os.statvfs(small_disk).f_frsize == 4 * MIB
    assert not open_files(small_disk)
    image = acquire(pool, {"a": 3 * MIB})
    assert open_files(small_disk)
    image.buffers["a"][:] = 1
    with pytest.raises(ResourceExhausted):
        acquire(pool, {"a": 2 * MIB})
    image.release()
    # The free region of another size makes room.
    acquire(pool, {"a": MIB + PAGE}).buffers["a"][:] = 1
    assert pool.usage() == PoolUsage(0, 0, MIB + PAGE, 0, made=2, reused=0)


@alone
def test_a_disk_that_fills_up_while_room_is_reserved_is_an_error(tmp_path: Path) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        for pool in (ImagePool(0, tmp_path), ImagePool(MIB)):
            before = descriptors()
            with pytest.raises(ResourceExhausted):
                acquire(pool, {"a": 100})
            assert pool.usage() == PoolUsage(0, 0, 0, 0, 0, 0)
            assert not descriptors() - before
    assert os.listdir(tmp_path) == []


def test_a_missing_spill_folder_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="nowhere"):
        acquire(ImagePool(0, tmp_path / "nowhere"), {"a": 1})


def test_an_image_stays_as_long_as_anyone_holds_it() -> None:
    pool = ImagePool(64 * MIB)
    image = acquire(pool, {"a": 100})
    hold = image.hold()
    with image.hold():
        image.release()
        image.release()
        hold.release()
        hold.release()
        assert pool.usage().memory_in_use == PAGE
        assert image.read_only_buffers["a"].nbytes == 100
    assert pool.usage() == PoolUsage(0, PAGE, 0, 0, made=1, reused=0)
    for use in (image.hold, lambda: image.buffers, lambda: image.read_only_buffers, lambda: image.region.fd):
        with pytest.raises(FailedPrecondition):
            use()
    image.release()
    assert pool.usage().memory_free == PAGE


def test_an_array_that_somebody_kept_outlives_the_pool() -> None:
    pool = ImagePool(64 * MIB)
    image = acquire(pool, {"a": 100})
    kept = image.buffers["a"]
    kept[:] = 9
    image.release()
    assert pool.trim() == PAGE
    del pool, image
    assert (kept == 9).all()


@alone
def test_regions_given_up_give_their_memory_back() -> None:
    def shared() -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("RssShmem"))

    pool = ImagePool(64 * MIB)
    before = shared()
    image = acquire(pool, {"a": 32 * MIB})
    assert shared() - before > 30_000, "pages are faulted in when the image is made"
    image.release()
    assert shared() - before > 30_000
    pool.trim()
    assert shared() - before < 2_000


@pytest.mark.parametrize("sizes", [{"a": -1}, {"a": 5, "b": -(10**20)}])
def test_sizes_that_cannot_be_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument):
        acquire(ImagePool(MIB), sizes)


def test_absurd_sizes_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    for size in (1 << 50, 1 << 62, 1 << 80):
        pool = ImagePool(MIB, tmp_path)
        with pytest.raises(ResourceExhausted):
            acquire(pool, {"a": size})
        assert pool.usage() == PoolUsage(0, 0, 0, 0, 0, 0)


def test_many_threads_never_share_an_image_and_the_books_balance(tmp_path: Path) -> None:
    pool = ImagePool(MIB, tmp_path)
    failures: list[object] = []

    def work(me: int) -> None:
        rng = np.random.default_rng(me)
        try:
            for _ in range(40):
                image = acquire(pool, {"a": int(rng.integers(1, 400_000)), "b": 10}, patience=20.0)
                image.buffers["a"][:] = me
                with image.hold():
                    image.release()
                    if not (image.read_only_buffers["a"] == me).all():
                        failures.append(me)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(me,)) for me in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    usage = pool.usage()
    assert (usage.memory_in_use, usage.disk_in_use) == (0, 0)
    assert usage.memory_free <= MIB
    assert usage.made + usage.reused == 8 * 40
    pool.trim()
    assert pool.usage().memory_free == pool.usage().disk_free == 0
