"""Are folders of steps found by their names, and told apart by what was written into them?"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from weighbridge import InvalidArgument
from weighbridge.relay.steps import StepNames, contents


def step(root: Path, name: str, marker: str | None = "STABLE") -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    if marker is not None:
        (folder / marker).touch()
    return folder


def test_the_newest_complete_step_is_found_among_other_things(tmp_path: Path) -> None:
    names = StepNames()
    assert names.newest_complete(tmp_path / "nowhere") is None
    for number in (2, 10, 9):
        step(tmp_path, f"step_{number}")
    step(tmp_path, "step_11", marker=None)
    step(tmp_path, "step_012")
    step(tmp_path, "step_13.partial")
    step(tmp_path, "other_14")
    (tmp_path / "step_15").touch()
    assert names.steps(tmp_path) == [11, 10, 9, 2]
    assert names.newest_complete(tmp_path) == 10
    assert names.path(tmp_path, 10) == tmp_path / "step_10"


def test_a_step_counts_once_whatever_else_has_its_number(tmp_path: Path) -> None:
    for name in ("step_0000005", "step_5", "step_05", "step_0000004"):
        step(tmp_path, name)
    assert StepNames("step_{step:07d}").steps(tmp_path) == [5, 4]
    assert StepNames("step_{step}").steps(tmp_path) == [5]


@pytest.mark.parametrize(
    ("folder", "marker", "weights", "marked"),
    [
        ("iter_{step:07d}", "STABLE", "iter_0000020", "iter_0000020/STABLE"),
        ("step_{step}/weight", "../STABLE", "step_20/weight", "step_20/STABLE"),
        ("global_step_{step}/actor/hf", "done.txt", "global_step_20/actor/hf", "global_step_20/actor/hf/done.txt"),
    ],
)  # fmt: skip
def test_other_trainers_names_are_known_by_their_pattern(
    tmp_path: Path, folder: str, marker: str, weights: str, marked: str
) -> None:
    names = StepNames(folder, marker)
    (tmp_path / weights).mkdir(parents=True)
    assert names.newest_complete(tmp_path) is None
    (tmp_path / marked).touch()
    assert names.newest_complete(tmp_path) == 20
    assert names.path(tmp_path, 20) == tmp_path / weights


@pytest.mark.parametrize(
    ("folder", "marker"),
    [
        ("step", "STABLE"),
        ("{step}_{step}", "STABLE"),
        ("runs/step_{step}", "STABLE"),
        ("step_{step}/../..", "STABLE"),
        ("/step_{step}", "STABLE"),
        ("step_{number}", "STABLE"),
        ("{run}_{step}", "STABLE"),
        ("{step}_{", "STABLE"),
        ("}_{step}", "STABLE"),
        ("step_{step}/}", "STABLE"),
        ("step_{step}", ""),
        ("step_{step}", "."),
        ("step_{step}", "../STABLE"),
        ("step_{step}", "/STABLE"),
    ],
)
def test_names_that_lead_out_of_a_step_are_refused(folder: str, marker: str) -> None:
    with pytest.raises(InvalidArgument):
        StepNames(folder, marker)


def test_contents_differ_once_a_file_or_the_marker_is_written_again(tmp_path: Path) -> None:
    folder = step(tmp_path, "step_1")
    marker = folder / "STABLE"
    first = contents(folder, marker)
    (folder / "NCCL_READY").touch()
    assert contents(folder, marker) == first, "of what is no weights, nothing is told"

    (folder / "new").write_bytes(b"heights")
    (folder / "new").rename(folder / "model.safetensors")
    second = contents(folder, marker)
    os.utime(marker, ns=(1, 1))
    third = contents(folder, marker)
    (folder / "model.safetensors.index.json").write_text("{}")
    assert len({first, second, third, contents(folder, marker)}) == 4

    marker.unlink()
    with pytest.raises(FileNotFoundError):
        contents(folder, marker)
