"""Do images lie in huge pages, here and in the processes that map them, and is everything the same where there are
none?
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.alone import alone
from weighbridge._memory.mappings import MappedMemory, Use
from weighbridge._memory.paging import HUGE_PAGE, advise, map_aligned
from weighbridge_storage.memory import regions
from weighbridge_storage.memory.regions import PAGE, Region

SIZES = {
    "a page": PAGE,
    "less than one": HUGE_PAGE - PAGE,
    "one": HUGE_PAGE,
    "some, and a rest": 5 * HUGE_PAGE + 3 * PAGE,
}


def _huge_bytes(address: int) -> int:
    """Bytes that lie in huge pages of shared memory, of the mapping that begins at an address, as the kernel counts
    them.
    """
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and len(rest) > 3:
            found = int(first.split("-")[0], 16) == address
        elif found and first == "ShmemPmdMapped:":
            return int(rest[0]) << 10
    raise AssertionError(f"nothing is mapped at {address:#x}")


def _collapses() -> bool:
    """Whether this system makes huge pages of shared memory, found out by hand."""
    descriptor = os.memfd_create("probe")
    os.ftruncate(descriptor, HUGE_PAGE)
    around, offset = map_aligned(descriptor, HUGE_PAGE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    os.close(descriptor)
    array = np.frombuffer(around, np.uint8, HUGE_PAGE, offset)
    array[:] = 1
    try:
        advise(array.ctypes.data, HUGE_PAGE, 25)
    except OSError:
        return False
    return True


huge_only = pytest.mark.skipif(not _collapses(), reason="this system makes no huge pages of shared memory")


@huge_only
@pytest.mark.parametrize("use", Use)
def test_an_image_lies_in_huge_pages_wherever_it_is_mapped(use: Use) -> None:
    region = Region(5 * HUGE_PAGE + 3 * PAGE, None)
    try:
        assert _huge_bytes(region.writable.ctypes.data) == 5 * HUGE_PAGE
        descriptor = region.reopen(writable=use is Use.WRITE)
        try:
            memory = MappedMemory(descriptor, "", region.capacity, use)
        finally:
            os.close(descriptor)
        memory.populate([(0, region.capacity)])
        assert _huge_bytes(memory.address) == 5 * HUGE_PAGE
        memory.close()
    finally:
        region.close()


@pytest.mark.parametrize("nbytes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("number", [0, errno.EINVAL, errno.ENOMEM], ids=["as it comes", "never", "none left"])
def test_an_image_holds_every_byte_whatever_its_pages(
    nbytes: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if number:
        _fail_to_collapse(monkeypatch, number)
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    region = Region(nbytes, None)
    try:
        assert region.writable.nbytes == region.readable.nbytes == nbytes
        assert not region.writable.any()
        region.writable[:] = data
        descriptor = region.reopen(writable=False)
        try:
            assert os.fstat(descriptor).st_blocks * 512 == nbytes, "room is reserved"
            memories = [MappedMemory(descriptor, "", nbytes, use) for use in (Use.READ, Use.VIEW)]
            assert os.pread(descriptor, nbytes, 0) == data.tobytes()
        finally:
            os.close(descriptor)
        for memory in memories:
            assert np.array_equal(memory.bytes, data)
            assert bytes(memory.tensor.numpy()) == data.tobytes()
            memory.close()
        with pytest.raises(ValueError, match="read-only"):
            region.readable[0] = 1
    finally:
        region.close()


def test_small_pages_are_told_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    _fail_to_collapse(monkeypatch, errno.ENOMEM)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            Region(2 * HUGE_PAGE, None).close()
    [record] = [each for each in caplog.records if each.name == regions.log.name]
    assert record.levelname == "WARNING"
    assert "small pages" in record.getMessage()
    assert "MADV_COLLAPSE" in record.getMessage()


@alone
def test_an_image_that_finds_no_room_leaves_none_mapped() -> None:
    real = os.posix_fallocate

    def full(descriptor: int, offset: int, nbytes: int) -> None:
        if nbytes > PAGE:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor, offset, nbytes)

    before = Path("/proc/self/maps").read_text().count("weighbridge-image")
    kept: list[BaseException] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        try:
            Region(4 * HUGE_PAGE, None)
        except Exception as error:
            kept.append(error)
    assert len(kept) == 1
    assert Path("/proc/self/maps").read_text().count("weighbridge-image") == before


@alone
def test_a_mapping_is_undone_as_a_whole() -> None:
    descriptor = os.memfd_create("probe")
    os.ftruncate(descriptor, 3 * HUGE_PAGE)
    before = len(Path("/proc/self/maps").read_text().splitlines())
    around, offset = map_aligned(descriptor, 3 * HUGE_PAGE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    os.close(descriptor)
    around[offset] = 1
    assert len(Path("/proc/self/maps").read_text().splitlines()) > before
    around.close()
    assert len(Path("/proc/self/maps").read_text().splitlines()) == before


@alone
def test_a_mapping_that_the_kernel_refuses_is_an_error_and_leaves_nothing() -> None:
    before = len(Path("/proc/self/maps").read_text().splitlines())
    with pytest.raises(OSError, match="Bad file descriptor"):
        map_aligned(-7, 3 * HUGE_PAGE, mmap.MAP_SHARED, mmap.PROT_READ)
    assert len(Path("/proc/self/maps").read_text().splitlines()) == before


def _fail_to_collapse(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let huge pages fail on this machine, with no failure logged so far."""

    def refuse(address: int, nbytes: int, advice: int) -> Any:
        if advice == regions.COLLAPSE:
            raise OSError(number, os.strerror(number))
        return advise(address, nbytes, advice)

    monkeypatch.setattr(regions, "advise", refuse)
    monkeypatch.setattr(regions, "_plain_pages", regions._PlainPages())


@huge_only
def test_one_mapping_that_is_not_aligned_does_not_make_the_next_ones_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def elsewhere(descriptor: int, nbytes: int, flags: int, protection: int) -> tuple[mmap.mmap, int]:
        map_aligned(descriptor, nbytes, flags, protection)[0].close()
        return mmap.mmap(descriptor, nbytes, flags, protection), 0

    monkeypatch.setattr(regions, "_plain_pages", regions._PlainPages())
    with monkeypatch.context() as patch:
        patch.setattr(regions, "map_aligned", elsewhere)
        Region(2 * HUGE_PAGE, None).close()
    region = Region(2 * HUGE_PAGE, None)
    assert _huge_bytes(region.writable.ctypes.data) == 2 * HUGE_PAGE
    region.close()
