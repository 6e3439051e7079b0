"""Does a folder appear only when it is complete, and is nothing lost that was there?"""

from __future__ import annotations

from pathlib import Path

import pytest

from weighbridge._trainers.torch_dist.whole_folders import appearing
from weighbridge.errors import FailedPrecondition, InvalidArgument


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_folder_is_not_there_before_it_is_complete(tmp_path: Path) -> None:
    folder = tmp_path / "above" / "new"
    with appearing(folder) as unfinished:
        (unfinished / "file").write_text("x")
        assert not folder.exists()
    assert (folder / "file").read_text() == "x"
    assert names(tmp_path / "above") == {"new"}


@pytest.mark.parametrize("replace", [False, True])
def test_what_fails_leaves_things_as_they_were(tmp_path: Path, replace: bool) -> None:
    folder = tmp_path / "new"
    if replace:
        folder.mkdir()
        (folder / "old").write_text("x")

    def fail() -> None:
        with appearing(folder, replace=replace) as unfinished:
            (unfinished / "file").write_text("x")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert names(tmp_path) == ({"new"} if replace else set())
    assert not replace or names(folder) == {"old"}


def test_a_folder_with_something_in_it_is_refused_unless_it_is_to_be_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    (folder / "old").write_text("x")
    with pytest.raises(InvalidArgument, match="not an empty folder"), appearing(folder):
        pass
    assert names(folder) == {"old"}
    with appearing(folder, replace=True) as unfinished:
        (unfinished / "file").write_text("x")
    assert names(folder) == {"file"}
    assert names(tmp_path) == {"there"}


def test_what_came_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "there"

    def be_late() -> None:
        with appearing(folder):
            folder.mkdir()
            (folder / "others").write_text("x")

    with pytest.raises(InvalidArgument):
        be_late()
    assert names(folder) == {"others"}


def test_two_calls_that_make_one_folder_do_not_touch_what_the_other_writes(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    with appearing(folder, replace=True) as outer:
        (outer / "file").write_text("outer")
        with appearing(folder, replace=True) as inner:
            assert inner != outer
            assert not any(inner.iterdir())
            (inner / "file").write_text("inner")
        assert (folder / "file").read_text() == "inner"
        assert (outer / "file").read_text() == "outer"
    assert (folder / "file").read_text() == "outer"
    assert names(tmp_path) == {"new"}


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(FailedPrecondition, match="cannot be written"), appearing(tmp_path / "file" / "new"):
        pass
