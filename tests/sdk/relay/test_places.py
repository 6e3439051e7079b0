"""Is no folder ever marked before it is complete, wherever the process that fills it is killed?"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import pytest

from tests.support.forked import forking
from weighbridge import FailedPrecondition, InvalidArgument
from weighbridge.relay.places import StepPlaces
from weighbridge.relay.steps import StepNames

FILES = [f"model-{number}.safetensors" for number in range(3)]
NESTED = StepNames("step_{step}/weight", "../STABLE")
KILLED = 9


def fill(folder: Path, label: str) -> None:
    folder.mkdir()
    for name in FILES:
        (folder / name).write_text(f"{name} of {label}")


def put(places: StepPlaces, step: int, label: str) -> None:
    with places.held():
        places.put(step, label, lambda folder: fill(folder, label))


def marked(root: Path, names: StepNames) -> dict[int, str]:
    """The version in each marked folder; all files of a folder must be of one version."""
    found = {}
    for step in names.steps(root):
        if names.marker_of(root, step).exists():
            folder = names.path(root, step)
            label = (folder / FILES[0]).read_text().removeprefix(f"{FILES[0]} of ")
            assert [(folder / name).read_text() for name in FILES] == [f"{name} of {label}" for name in FILES]
            found[step] = label
    return found


def test_the_last_folders_stay_and_those_of_others_are_left_alone(tmp_path: Path) -> None:
    theirs = tmp_path / "step_1"
    theirs.mkdir()
    (theirs / "STABLE").touch()
    places = StepPlaces(tmp_path, keep=2)
    for step in (2, 3, 4):
        put(places, step, f"m@{step}")
    assert sorted(path.name for path in tmp_path.glob("*")) == [".weighbridge.lock", "step_1", "step_3", "step_4"]  # fmt: skip
    assert places.label(4) == "m@4"
    assert places.label(2) is None
    assert places.label(1) is None

    put(places, 3, "m@5")
    assert (places.label(3), places.label(4)) == ("m@5", None), "the trainer has gone back to step 3"


@pytest.mark.parametrize(
    "theirs",
    ["model.safetensors", "pytorch_model.bin", "__0_0.distcp", "optimizer.pt", ".metadata", "trainer/state", "STABLE"],
)  # fmt: skip
def test_a_folder_of_someone_else_is_not_replaced_unless_it_is_empty(tmp_path: Path, theirs: str) -> None:
    places = StepPlaces(tmp_path)
    file = tmp_path / "step_7" / theirs
    file.parent.mkdir(parents=True)
    file.write_text("theirs")
    with pytest.raises(FailedPrecondition, match="was not placed by weighbridge"):
        put(places, 7, "m@1")
    assert file.read_text() == "theirs"

    (tmp_path / "step_8").mkdir()
    put(places, 8, "m@1")
    assert places.label(8) == "m@1"


def test_what_someone_else_writes_while_a_version_is_written_is_not_replaced(tmp_path: Path) -> None:
    places = StepPlaces(tmp_path)

    def write(folder: Path) -> None:
        fill(folder, "m@1")
        fill(tmp_path / "step_7", "theirs")

    with places.held(), pytest.raises(FailedPrecondition, match="was not placed by weighbridge"):
        places.put(7, "m@1", write)
    assert (tmp_path / "step_7" / FILES[0]).read_text() == f"{FILES[0]} of theirs"


def test_a_marker_of_someone_else_is_not_taken_for_that_of_a_step(tmp_path: Path) -> None:
    theirs = tmp_path / "step_7" / "STABLE"
    theirs.parent.mkdir()
    theirs.touch()
    with pytest.raises(FailedPrecondition, match="was not placed by weighbridge"):
        put(StepPlaces(tmp_path, NESTED), 7, "m@1")
    assert theirs.exists()


def test_a_version_that_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    places = StepPlaces(tmp_path)
    put(places, 7, "m@1")

    def fail(folder: Path) -> None:
        fill(folder, "half")
        raise OSError(28, "No space left on device")

    with places.held(), pytest.raises(OSError, match="No space"):
        places.put(7, "m@2", fail)
    assert marked(tmp_path, StepNames()) == {7: "m@1"}
    assert not list(tmp_path.glob(".weighbridge-*"))


def test_one_process_fills_a_folder_and_keeps_one_at_the_least(tmp_path: Path) -> None:
    places = StepPlaces(tmp_path)
    with places.held(), pytest.raises(FailedPrecondition, match="another process"), places.held():
        pass
    with places.held():
        pass
    with pytest.raises(InvalidArgument):
        StepPlaces(tmp_path, keep=0)


def die_at(point: int, root: Path, names: StepNames) -> None:
    """Place step 5 anew, and end as by ``kill -9`` before the call of the operating system that has this number."""
    left = itertools.count(point, -1)

    def count(event: str, _arguments: tuple[object, ...]) -> None:
        if event.partition(".")[0] in ("os", "open", "shutil", "tempfile", "fcntl") and next(left) == 0:
            os._exit(KILLED)

    places = StepPlaces(root, names, keep=2)
    sys.addaudithook(count)
    put(places, 5, "m@9")
    os._exit(0)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("names", [StepNames(), NESTED], ids=["flat", "nested"])
def test_whichever_call_it_is_killed_at_what_is_marked_is_complete_and_another_one_goes_on(
    tmp_path: Path, names: StepNames
) -> None:
    context = forking()
    for point in itertools.count():
        root = tmp_path / str(point)
        for step, label in ((3, "m@3"), (4, "m@4"), (5, "m@5"), (6, "m@6")):
            put(StepPlaces(root, names, keep=9), step, label)
        process = context.Process(target=die_at, args=(point, root, names))
        process.start()
        process.join(60)
        there = marked(root, names)
        assert there.items() <= {3: "m@3", 4: "m@4", 5: there.get(5), 6: "m@6"}.items()
        assert there.get(5) in (None, "m@5", "m@9")
        assert 4 in there, "the newest folder that stays is never touched"
        if process.exitcode == 0:
            break
        assert process.exitcode == KILLED
        put(StepPlaces(root, names, keep=2), 5, "m@9")
        assert marked(root, names) == {4: "m@4", 5: "m@9"}
        assert not list(root.glob(".weighbridge-*"))
    assert point > 30
    assert there == {4: "m@4", 5: "m@9"}
