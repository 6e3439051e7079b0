"""`weighbridge diff` on a real service: versions of all kinds, folders, and what is moved for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.numpy import save_file

from tests.support.raw_clients import TinyModel, tiny_folder
from tests.support.services import RunningService, running_service
from weighbridge import TrainerClient, VersionState
from weighbridge._cli import commands
from weighbridge._cli.showing.comparing import sides_of
from weighbridge._core.references import Reference
from weighbridge.errors import InvalidArgument

MODEL = "acme/tiny"
CHANGED = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("service")
    with running_service(folder / "store", local_socket=str(folder / "lane.sock")) as running:
        yield running


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return tiny_folder(tmp_path_factory.mktemp("first") / "hf", seed=1)


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory, first: TinyModel) -> TinyModel:
    """The first one with three elements of one tensor changed."""
    made = tiny_folder(tmp_path_factory.mktemp("second") / "hf", seed=1)
    arrays = {name: array.copy() for name, array in made.arrays.items()}
    arrays[CHANGED].flat[[0, 17, arrays[CHANGED].size - 1]] += np.float32(0.25)
    save_file(arrays, made.folder / "model.safetensors", metadata={"format": "pt"})
    return TinyModel(made.folder, arrays)


@pytest.fixture(scope="module")
def versions(service: RunningService, first: TinyModel, second: TinyModel) -> tuple[int, int]:
    """Both, durable."""
    with TrainerClient(service.address) as trainer:
        trainer.register_files(MODEL, first.files)
        numbers = [
            trainer.push_folder(MODEL, source.folder, step=step).wait().number
            for step, source in enumerate((first, second), start=1)
        ]
        trainer.set_ref(MODEL, "prod", numbers[0])
    return numbers[0], numbers[1]


def diff(service: RunningService | None, *args: object, lane: str = "auto", json: bool = True) -> Result:
    line = ["diff", *map(str, args), *(["--json"] if json else [])]
    server = ["--server", service.address if service else "127.0.0.1:1"]
    return CliRunner(env={"WEIGHBRIDGE_LANE": lane}).invoke(commands, [*line, *server])


def found(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert isinstance(said, dict)
    return said


def expected(first: TinyModel, second: TinyModel) -> dict[str, tuple[int, float]]:
    """Changed elements and the largest step of each tensor, by numpy."""
    return {
        name: (
            int((array != second.arrays[name]).sum()),
            float(np.abs(array.astype(np.float64) - second.arrays[name]).max()),
        )
        for name, array in first.arrays.items()
    }


@pytest.mark.parametrize("lane", ["local", "grpc"])
def test_two_versions_differ_as_numpy_says_by_either_lane(
    service: RunningService, versions: tuple[int, int], first: TinyModel, second: TinyModel, lane: str
) -> None:
    said = found(diff(service, MODEL, *versions, lane=lane))
    assert {each["name"]: (each["changed"], each["step"]) for each in said["tensors"]} == expected(first, second)
    assert said["total"]["changed"] == 3
    assert said["total"]["elements"] == sum(array.size for array in first.arrays.values())
    (layer,) = (each for each in said["layers"] if each["changed"])
    assert layer["name"] == "model.layers.0"


def test_only_tensors_whose_digests_differ_are_read(
    service: RunningService, versions: tuple[int, int], first: TinyModel
) -> None:
    said = found(diff(service, f"{MODEL}@prod", f"{MODEL}@{versions[1]}"))
    assert (said["before"], said["after"]) == (f"{MODEL}@{versions[0]}", f"{MODEL}@{versions[1]}")
    assert said["bytes_read"] == first.arrays[CHANGED].nbytes
    assert said["bytes_read"] + said["bytes_known"] == sum(a.nbytes for a in first.arrays.values())
    same = found(diff(service, MODEL, "prod", versions[0]))
    assert (same["bytes_read"], same["total"]["changed"]) == (0, 0)


def test_people_are_told_layers_and_the_tensors_that_have_changed_most(
    service: RunningService, versions: tuple[int, int]
) -> None:
    result = diff(service, MODEL, *versions, json=False)
    assert result.exit_code == 0, result.output
    head, _, rest = result.stdout.partition("\n")
    assert head.startswith(f"{MODEL}@{versions[0]} to {MODEL}@{versions[1]}: 3 of ")
    assert "are equal by their digests" in rest
    assert CHANGED in rest
    assert "model.layers.0" in rest
    none = diff(service, MODEL, *versions, "--top", 0, json=False)
    assert CHANGED not in none.stdout
    equal = diff(service, MODEL, versions[0], versions[0], json=False)
    assert "no difference in" in equal.stdout
    assert "LAYER" not in equal.stdout


def test_a_version_is_compared_with_a_folder_and_folders_need_no_service(
    service: RunningService, versions: tuple[int, int], first: TinyModel, second: TinyModel
) -> None:
    mixed = found(diff(service, f"{MODEL}@{versions[0]}", second.folder))
    assert {each["name"]: (each["changed"], each["step"]) for each in mixed["tensors"]} == expected(first, second)
    alone = found(diff(None, first.folder, second.folder))
    by_name = [{each["name"]: each for each in said["tensors"]} for said in (alone, mixed)]
    assert by_name[0] == by_name[1]
    assert not found(diff(service, first.folder, f"{MODEL}@{versions[0]}"))["total"]["changed"]


def test_a_live_version_that_is_in_no_store_is_read_whole(
    service: RunningService,
    versions: tuple[int, int],
    first: TinyModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = tiny_folder(tmp_path / "other", seed=9)  # what is as in the version before would need no room
    write, full = os.write, True

    def limited(file: int, data: Any) -> int:
        if full and len(data) > 50_000:
            raise OSError(28, "No space left on device")
        return write(file, data)

    monkeypatch.setattr(os, "write", limited)
    with TrainerClient(service.address) as trainer:
        push = trainer.push_folder(MODEL, other.folder, step=3)
        live = trainer.wait_for(MODEL, push.number, VersionState.READY, timeout=60)
        try:
            said = found(diff(service, f"{MODEL}@{versions[0]}", f"{MODEL}@live"))
            assert not trainer.version(MODEL, live.number).state.stored
        finally:
            full = False
        push.wait(timeout=60)
    assert said["after"] == f"{MODEL}@{live.number}"
    assert said["bytes_known"] == 0
    assert {each["name"]: (each["changed"], each["step"]) for each in said["tensors"]} == expected(first, other)


def test_training_states_differ_where_the_optimizer_has_stepped(service: RunningService, tmp_path: Path) -> None:
    model = "acme/linear"
    module = torch.nn.Linear(48, 16)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.5)
    (tmp_path / "config.json").write_text("{}")

    def step() -> dict[str, torch.Tensor]:
        module.zero_grad()
        module(torch.ones(4, 48)).square().mean().backward()
        optimizer.step()
        kept = optimizer.state[module.weight]
        return {"exp_avg": kept["exp_avg"].clone(), "exp_avg_sq": kept["exp_avg_sq"].clone()}

    with TrainerClient(service.address) as trainer:
        trainer.register_model(model, tmp_path, tensors=module, weight_map=False)
        moments, numbers = [], []
        for at in (1, 2):
            moments.append(step())
            handle = trainer.push_state_dict(model, module, step=at, optimizer=optimizer)
            handle.wait(timeout=60)
            assert handle.training is not None
            numbers.append(handle.training.wait(timeout=60).number)
    said = found(diff(service, f"{model}:training", *numbers))
    by_name = {each["name"]: each for each in said["tensors"]}
    for moment, old in moments[0].items():
        (name,) = (name for name in by_name if name.endswith(moment) and "weight" in name)
        new = moments[1][moment]
        assert by_name[name]["changed"] == int((old != new).sum())
        assert by_name[name]["step"] == float((old.double() - new.double()).abs().max())


def test_a_picture_is_drawn_of_the_layers(service: RunningService, versions: tuple[int, int], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "diff.png"
    result = diff(service, MODEL, *versions, "--plot", path, json=False)
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    assert str(path) in result.stdout


def test_without_matplotlib_a_picture_is_refused_with_what_to_install(first: TinyModel, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\nfrom weighbridge._cli import main\nsys.exit(main(sys.argv[1:]))"
    )
    line = [sys.executable, "-c", code, "diff", first.folder, first.folder, "--plot", tmp_path / "a.png"]
    ended = subprocess.run(list(map(str, line)), capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 1
    assert "matplotlib" in ended.stderr
    assert "weighbridge[plot]" in ended.stderr
    assert not (tmp_path / "a.png").exists()


def test_sides_are_named_together_or_one_by_one(tmp_path: Path) -> None:
    assert sides_of(["acme/a", "1", "prod"]) == (Reference("acme/a", "1"), Reference("acme/a", "prod"))
    assert sides_of(["acme/a@1", str(tmp_path)]) == (Reference("acme/a", "1"), tmp_path)


@pytest.mark.parametrize("named", [["acme/a"], ["acme/a", "1"], ["acme/a@1", "2", "3"], ["a/b", "1", "2", "3"]])
def test_what_are_no_two_sides_is_refused_with_how_to_write_them(named: list[str]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        sides_of(named)
    assert "acme/smol" in caught.value.fix


def test_a_version_that_is_not_there_is_an_error(service: RunningService, versions: tuple[int, int]) -> None:
    result = diff(service, MODEL, versions[0], 999)
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"]["reason"] == "NOT_FOUND"
