"""Does the C extension copy what torch and numpy copy, and nothing else?"""

from __future__ import annotations

import importlib
import logging
import math
import mmap
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.rounds import rounds
from weighbridge._core.byte_copies import ByteCopy
from weighbridge._memory import native_copies
from weighbridge._memory.copying import read_tensors, write_tensors
from weighbridge._memory.mappings import MappedMemory, Use
from weighbridge._memory.native_copies import AddressRange, copy_natively, region_of
from weighbridge._memory.strided import Bytes, ShardCopies, view_bytes, write_bytes

SOURCES = Path(__file__).parents[3] / "clients/native"
needs_extension = pytest.mark.skipif(
    importlib.util.find_spec("weighbridge._memory._native") is None,
    reason="the C extension is not built: make install",
)
sources_here = pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")


@st.composite
def copies_of(draw: st.DrawFn) -> ByteCopy[int]:
    """Up to six axes, dense in the shard and apart in memory, some of them empty, at any offsets."""
    extent = draw(st.lists(st.integers(1, 4), max_size=5))
    extent.append(draw(st.sampled_from([1, 2, 7, 63, 64, 300, 1024, 2048, 5000])))
    if draw(st.integers(0, 9)) == 0:
        extent[draw(st.integers(0, len(extent) - 1))] = 0
    dense, apart = [1], [1]
    for n in reversed(extent[1:]):
        dense.append(dense[-1] * max(n, 1))
        apart.append(apart[-1] * max(n, 1) + draw(st.sampled_from([0, 0, 1, 64, 999])))
    offsets = draw(st.integers(0, 200)), draw(st.integers(0, 200))
    return ByteCopy(tuple(extent), offsets[0], tuple(dense[::-1]), 0, offsets[1], tuple(apart[::-1]))


def end_of(offset: int, extent: Sequence[int], strides: Sequence[int]) -> int:
    """One past the last byte of a box; where it begins if it is empty."""
    last = sum((n - 1) * stride for n, stride in zip(extent, strides, strict=True))
    return offset + last + 1 if math.prod(extent) else offset


def noise(nbytes: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def run(copies: Sequence[ByteCopy[int]], shard: Bytes, memory: Bytes, *, into_memory: bool, threads: int = 2) -> None:
    regions = [region_of(memory, written=into_memory)]
    plan = ShardCopies(copies).packed
    counts = copy_natively(
        [(region_of(shard, written=not into_memory), plan)], regions, into_memory=into_memory, threads=threads
    )
    assert counts == [0]


def run_plainly(copies: Sequence[ByteCopy[int]], shard: Bytes, memory: Bytes, *, into_memory: bool) -> None:
    for copy in copies:
        ours = view_bytes(shard, copy.stream_offset, copy.extent, copy.stream_strides)
        theirs = view_bytes(memory, copy.file_offset, copy.extent, copy.file_strides)
        np.copyto(*((theirs, ours) if into_memory else (ours, theirs)))


@needs_extension
@settings(max_examples=300, deadline=None)
@given(plan=st.lists(copies_of(), max_size=4), into_memory=st.booleans(), threads=st.integers(-1, 5))
def test_any_plan_puts_every_byte_where_numpy_puts_it(
    plan: list[ByteCopy[int]], into_memory: bool, threads: int
) -> None:
    start, placed = 0, []  # one behind the other: bytes that are written twice may have either value
    for copy in plan:
        end = max(end_of(0, copy.extent, copy.file_strides), end_of(0, copy.extent, copy.stream_strides))
        placed.append(copy._replace(file_offset=start + copy.file_offset, stream_offset=start + copy.stream_offset))
        start += end + 200
    memory, shard = noise(start + 1, 1), noise(start + 1, 2)
    expected = [memory.copy(), shard.copy()]
    run_plainly(placed, expected[1], expected[0], into_memory=into_memory)
    run(placed, shard, memory, into_memory=into_memory, threads=threads)
    assert np.array_equal(memory, expected[0])
    assert np.array_equal(shard, expected[1])


@needs_extension
@pytest.mark.parametrize("width", [1, 100, 512, 2048, 10_000, 3 << 20])
@pytest.mark.parametrize("shift", [0, 1, 24])
@pytest.mark.parametrize("into_memory", [True, False])
def test_large_plans_are_the_same_from_several_threads(width: int, shift: int, into_memory: bool) -> None:
    rows = (12 << 20) // width if width > 1 else 100_000
    copy = ByteCopy((rows, width), shift, (width, 1), 0, 2 * shift, (2 * width, 1))
    shard, memory = noise(rows * width + shift, 1), noise(2 * rows * width + 2 * shift, 2)
    expected = [memory.copy(), shard.copy()]
    run_plainly([copy], expected[1], expected[0], into_memory=into_memory)
    run([copy], shard, memory, into_memory=into_memory, threads=3)
    assert np.array_equal(memory, expected[0])
    assert np.array_equal(shard, expected[1])


GOOD = ByteCopy((2, 8), 0, (8, 1), 0, 0, (16, 1))
HUGE = (1 << 63) - 1


@needs_extension
@pytest.mark.parametrize(
    "changes",
    [
        {"file": 1},
        {"file": -1},
        {"file_offset": -1},
        {"stream_offset": -1},
        {"file_offset": 9},
        {"stream_offset": 1},
        {"file_offset": HUGE},
        {"file_strides": (25, 1)},
        {"file_strides": (-16, 1)},
        {"file_strides": (HUGE, 1)},
        {"file_strides": (HUGE, HUGE)},
        {"stream_strides": (9, 1)},
        {"extent": (3, 8)},
        {"extent": (-1, 8)},
        {"extent": (HUGE, HUGE)},
        {"extent": (HUGE, HUGE), "file_strides": (0, 0), "stream_strides": (0, 0)},
        {"extent": (), "file_strides": (), "stream_strides": ()},
        {"extent": (1,) * 20, "file_strides": (1,) * 20, "stream_strides": (1,) * 20},
    ],
)
@pytest.mark.parametrize("into_memory", [True, False])
def test_a_plan_beyond_its_bounds_is_refused_before_any_byte_is_copied(
    changes: dict[str, Any], into_memory: bool
) -> None:
    shard, memory = noise(16, 1), noise(32, 2)
    before = shard.copy(), memory.copy()
    with pytest.raises(ValueError, match=r"copy|extent|bytes"):
        run([GOOD, GOOD._replace(**changes)], shard, memory, into_memory=into_memory)
    assert np.array_equal(shard, before[0])
    assert np.array_equal(memory, before[1])
    run([GOOD], shard, memory, into_memory=into_memory)


@needs_extension
def test_sides_that_overlap_truncated_plans_and_read_only_targets_are_refused() -> None:
    data = noise(100)
    with pytest.raises(ValueError, match="overlap"):
        run([ByteCopy((60,), 0, (1,), 0, 30, (1,))], data, data, into_memory=True)
    plan = ShardCopies([GOOD]).packed
    whole = AddressRange(data.ctypes.data, data.nbytes)
    for words in (plan[:-1], plan[:3]):
        with pytest.raises(ValueError, match="ends within"):
            copy_natively([(whole, words)], [whole], into_memory=True, threads=1)
    data.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        write_bytes(noise(16), [GOOD], [data])


@needs_extension
def test_others_run_while_a_plan_is_carried_out() -> None:
    """One long copy that the interpreter's lock would not let anybody else into."""
    row, rows = 1 << 20, 4000
    shard, memory = noise(row), np.zeros(row, np.uint8)
    copy = ByteCopy((rows, row), 0, (0, 1), 0, 0, (0, 1))  # the same row again and again
    times: list[float] = []
    ended = threading.Event()

    def copying() -> None:
        run([copy], shard, memory, into_memory=True, threads=1)
        ended.set()

    worker = threading.Thread(target=copying)
    worker.start()
    while not ended.is_set():
        times.append(time.monotonic())
        time.sleep(0.001)
    worker.join()
    assert len(times) > 5
    assert np.array_equal(memory, shard)


@needs_extension
def test_several_threads_copy_at_once() -> None:
    copy = ByteCopy((3000, 2048), 0, (2048, 1), 0, 0, (4096, 1))

    def once(seed: int) -> bool:
        shard, memory = noise(3000 * 2048, seed), np.zeros(3000 * 4096, np.uint8)
        run([copy], shard, memory, into_memory=True)
        back = np.zeros_like(shard)
        run([copy], back, memory, into_memory=False)
        return np.array_equal(back, shard) and not memory.reshape(3000, 4096)[:, 2048:].any()

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(once, range(12)))


def mapped(nbytes: int) -> MappedMemory:
    descriptor = os.memfd_create("test")
    try:
        os.ftruncate(descriptor, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        return MappedMemory(descriptor, "test", nbytes, Use.WRITE)
    finally:
        os.close(descriptor)


@pytest.fixture(params=["extension", "plain"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plain":
        monkeypatch.setattr(native_copies, "_extension", lambda: None)
    elif native_copies._extension() is None:
        pytest.skip("the C extension is not built: make install")
    return str(request.param)


def test_tensors_of_every_kind_go_to_memory_and_back_either_way(way: str) -> None:
    memory = mapped(1 << 20)
    values = torch.arange(64 * 32, dtype=torch.float32).view(64, 32)
    kinds = [
        values,
        torch.nn.Parameter(values.clone()),
        values.clone().t().contiguous().t(),
        torch.imag(torch.complex(values, -values).conj()),  # its sign is only noted down
        values.bfloat16(),
        torch.empty(0),
    ]
    for shard in kinds:
        width = shard.shape[-1] * shard.element_size() if shard.numel() else 0
        rows = shard.shape[0] if shard.numel() else 0
        copies = [ByteCopy((rows, width), 0, (width, 1), 0, 40, (2 * width, 1))] if rows else []
        memory.bytes[...] = 7
        write_tensors([(shard, copies)], [memory])
        found = memory.bytes[40 : 40 + rows * 2 * width].reshape(rows, 2 * width if rows else 0)
        raw = shard.detach().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy().reshape(rows, width)
        assert np.array_equal(found[:, :width], raw)
        assert (found[:, width:] == 7).all()
        back = torch.ones_like(shard)
        list(read_tensors([(back, copies)], [memory]))
        assert torch.equal(back, shard)
    memory.close()


def test_bytes_that_no_copy_brings_are_zeros_either_way(way: str) -> None:
    memory = mapped(4096)
    memory.bytes[...] = 1
    target = torch.ones(64, dtype=torch.uint8)
    list(read_tensors([(target, [ByteCopy((10,), 5, (1,), 0, 3, (1,))])], [memory]))
    assert target.tolist() == [0] * 5 + [1] * 10 + [0] * 49
    memory.close()


def test_a_missing_extension_is_told_once_and_everything_works(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "weighbridge._memory._native", None)
    monkeypatch.delattr("weighbridge._memory._native", raising=False)
    native_copies._extension.cache_clear()
    try:
        with caplog.at_level(logging.INFO, "weighbridge._memory.native_copies"):
            for _ in range(3):
                shard, memory = noise(16), np.zeros(32, np.uint8)
                write_bytes(shard, [GOOD], [memory])
                assert np.array_equal(memory.reshape(2, 16)[:, :8].ravel(), shard)
        [line] = [each for each in caplog.records if each.name == native_copies.log.name]
        assert "pip install" in line.getMessage()
    finally:
        native_copies._extension.cache_clear()


@pytest.mark.process
@sources_here
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_sanitizers_find_nothing_in_random_plans(tmp_path: Path, sanitizers: str) -> None:
    program = _sanitized(tmp_path, sanitizers, "random_plans.c", "strided_copy.c", "nonfinite.c", "helpers.c")
    plans = rounds("PLANS") // (1 if "address" in sanitizers else 4)
    ended = subprocess.run([program, str(plans)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.process
@sources_here
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_work_that_callers_share_out_at_one_time_is_done_once(tmp_path: Path, sanitizers: str) -> None:
    program = _sanitized(tmp_path, sanitizers, "shared_work.c", "helpers.c")
    # that of threads knows no forks of processes with several of them
    forks = ["fork"] if "address" in sanitizers else []
    ended = subprocess.run([program, *forks], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr


def _sanitized(folder: Path, sanitizers: str, driver: str, *sources: str) -> Path:
    """A program of the tests with parts of the extension, under sanitizers; skips the test where there are none."""
    program = folder / "program"
    warnings = ["-Wall", "-Wextra", "-Werror"]
    flags = ["-g", "-O1", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-pthread", *warnings]
    (folder / "empty.c").write_text("int main(void) { return 0; }\n")
    probe = ["gcc", *flags, str(folder / "empty.c"), "-o", str(program)]
    if subprocess.run(probe, capture_output=True).returncode or subprocess.run([program]).returncode:
        pytest.skip(f"gcc has no sanitizers of {sanitizers} here")
    paths = [str(Path(__file__).parent / "native" / driver), *(str(SOURCES / name) for name in sources)]
    subprocess.run(["gcc", *flags, f"-I{SOURCES}", *paths, "-o", str(program)], check=True)
    return program
