"""Do reads of a file bring the bytes that numpy finds there, and is a file that cannot be read an error of the call?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighbridge._formats.safetensors_files import map_file
from weighbridge._memory import file_reads
from weighbridge._memory.file_reads import OpenFile, read_into
from weighbridge.errors import DataLoss, FailedPrecondition

CONTENT = np.random.default_rng(3).integers(0, 256, 200_000, dtype=np.uint8)


@pytest.fixture(scope="module")
def descriptor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    path = tmp_path_factory.mktemp("read") / "file"
    path.write_bytes(CONTENT.tobytes())
    opened = os.open(path, os.O_RDONLY)
    yield opened
    os.close(opened)


@given(
    shape=st.lists(st.integers(0, 5), max_size=4),
    steps=st.lists(st.integers(0, 3000), min_size=4, max_size=4),
    offset=st.integers(0, 1000),
    dense=st.booleans(),
    order=st.sampled_from("CF"),
    step_bytes=st.sampled_from([64, 1 << 20]),
    short_gap=st.sampled_from([0, 100, 1 << 15]),
)
def test_strided_bytes_are_those_of_an_array_over_the_file(
    descriptor: int,
    shape: list[int],
    steps: list[int],
    offset: int,
    dense: bool,
    order: str,
    step_bytes: int,
    short_gap: int,
) -> None:
    strides = tuple(steps[: len(shape)])
    if dense and shape:
        strides = (*strides[:-1], 1)
    expected = np.ndarray(tuple(shape), np.uint8, CONTENT, offset, strides)
    target = np.full(tuple(shape), 7, np.uint8, order=order)  # type: ignore[call-overload]
    taken = np.zeros(len(CONTENT), bool)

    def took(start: int, run: np.ndarray) -> None:
        assert run.tobytes() == CONTENT[start : start + len(run)].tobytes()
        taken[start : start + len(run)] = True

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(file_reads, "STEP_BYTES", step_bytes)
        patched.setattr(file_reads, "_SHORT_GAP", short_gap)
        read_into(descriptor, target, offset, strides, took)
    assert target.tobytes() == expected.tobytes()
    assert np.ndarray(tuple(shape), bool, taken, offset, strides).all()


def test_a_slice_of_columns_takes_few_calls_and_one_of_long_rows_reads_no_more_than_it_needs(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    preadv = os.preadv

    def counted(*arguments: Any) -> int:
        read.append(preadv(*arguments))
        return read[-1]

    monkeypatch.setattr(os, "preadv", counted)
    columns = np.empty((190, 10), np.uint8)
    read_into(descriptor, columns, 500, (1000, 1))
    assert len(read) == 1
    assert (columns == CONTENT[500:190_500].reshape(190, 1000)[:, :10]).all()
    read.clear()
    read_into(descriptor, np.empty((2, 10), np.uint8), 0, (100_000, 1))
    assert read == [10, 10]


def test_a_file_that_ends_too_early_is_an_error_and_not_a_signal(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100_000))
    opened = OpenFile(path, os.open(path, os.O_RDONLY))
    assert len(opened[10:30_000]) == 29_990
    os.truncate(path, 8192)
    with pytest.raises(FailedPrecondition, match="file changed while it was read"):
        opened[50_000:60_000]
    with pytest.raises(FailedPrecondition, match="changed while it was read"):  # also what is still there
        opened[0:10]


def test_a_file_that_is_written_in_its_place_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    opened = OpenFile(path, os.open(path, os.O_RDONLY))
    with path.open("r+b") as again:
        again.write(b"x")
    os.utime(path, ns=(0, 1))  # clocks tick slowly
    with pytest.raises(FailedPrecondition, match="changed"):
        opened[50:60]


def test_a_file_that_takes_the_name_of_an_open_one_changes_nothing(tmp_path: Path) -> None:
    path, new = tmp_path / "file", tmp_path / "new"
    path.write_bytes(b"old")
    opened = OpenFile(path, os.open(path, os.O_RDONLY))
    new.write_bytes(b"new")
    new.rename(path)
    assert opened[0:3].tobytes() == b"old"


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataLoss, match="not a regular file"):
        map_file(tmp_path, "pipe")
