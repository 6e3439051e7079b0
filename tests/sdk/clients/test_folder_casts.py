"""Is a folder in another dtype than its model's pushed as torch casts it, over both lanes, and refused where that is
not wanted?
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.raw_clients import TinyModel, tiny_folder
from tests.support.services import RunningService, running_service
from weighbridge import EngineClient, LayoutError, TrainerClient
from weighbridge._cli import commands

NARROW, WIDE = "tests/narrow", "tests/wide"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Weights in fp32."""
    return tiny_folder(tmp_path_factory.mktemp("hf") / "tiny")


@pytest.fixture(scope="module")
def half(source: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in bf16, but for one tensor, with a header after which not all tensors lie at multiples of four."""
    folder = tmp_path_factory.mktemp("half")
    (folder / "config.json").write_bytes(source.files["config.json"])
    tensors = {name: tensor.bfloat16() for name, tensor in weights(source.folder).items()}
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    save_file(tensors, folder / "model.safetensors", metadata={"odd": "x" * 7})
    return folder


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, source: TinyModel) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("service")
    with running_service(folder / "store", local_socket=str(folder / "lane.sock")) as running:
        with TrainerClient(running.address) as trainer:
            trainer.register_files(NARROW, source.files, "bf16")
            trainer.register_files(WIDE, source.files, torch.float32)
        yield running


def weights(folder: Path) -> dict[str, Tensor]:
    return dict(load_file(folder / "model.safetensors"))


@pytest.mark.parametrize("lane", ["local", "grpc"])
def test_a_folder_is_cast_to_the_models_dtype_as_torch_does_it(
    service: RunningService, source: TinyModel, half: Path, lane: str
) -> None:
    with TrainerClient(service.address, lane=lane) as trainer, EngineClient(service.address) as engine:
        for model, folder, dtype, widened in (
            (NARROW, source.folder, torch.bfloat16, 0),
            (WIDE, half, torch.float32, len(source.arrays) - 1),
        ):
            handle = trainer.push_folder(model, folder, step=1, request_id=f"{lane}")
            number = handle.wait(timeout=60).number
            report = handle.report()
            assert (report.lane, report.widened_tensors) == (lane, widened)
            assert report.cast_tensors == (widened or len(source.arrays))
            found = dict(engine.pull(model, number))
            for name, tensor in weights(folder).items():
                assert torch.equal(found[name], tensor.to(dtype)), name
                assert found[name].dtype == dtype


def test_a_cast_that_loses_something_or_any_at_all_can_be_refused(
    service: RunningService, source: TinyModel, half: Path
) -> None:
    with TrainerClient(service.address) as trainer:
        with pytest.raises(LayoutError, match="would not be exact"):
            trainer.push_folder(NARROW, source.folder, cast="exact")
        with pytest.raises(LayoutError, match="casts are not allowed"):
            trainer.push_folder(WIDE, half, cast="never")
        trainer.push_folder(WIDE, half, cast="exact").wait(timeout=60)


def test_what_a_folder_in_another_dtype_lacks_is_named_without_a_word_of_megatron(
    service: RunningService, source: TinyModel, tmp_path: Path
) -> None:
    tensors = weights(source.folder)
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes(source.files["config.json"])
    for model in (NARROW, WIDE):
        with TrainerClient(service.address) as trainer, pytest.raises(LayoutError) as caught:
            trainer.push_folder(model, tmp_path).wait(timeout=60)
        assert "model.norm.weight" in "".join(caught.value.details)
        assert "sharded_state_dict" not in str(caught.value)


def test_a_folder_that_is_not_the_models_takes_no_number_of_a_version(
    service: RunningService, source: TinyModel, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes(source.files["config.json"])
    good = weights(source.folder)
    with TrainerClient(service.address) as trainer:
        trainer.register_files("tests/clean", source.files, "fp32")
        for wrong, told in (
            (
                {"model.norm.weights": torch.ones(2)},
                "model.norm.weights: the model has no such tensor",
            ),
            ({"model.norm.weight": torch.ones(3)}, r"model.norm.weight is \[3\]"),
        ):
            save_file({**good, **wrong}, tmp_path / "model.safetensors")
            with pytest.raises(LayoutError, match=told):
                trainer.push_folder("tests/clean", tmp_path)
        save_file({name: good[name] for name in list(good)[1:]}, tmp_path / "model.safetensors")
        with pytest.raises(LayoutError, match="is missing"):
            trainer.push_folder("tests/clean", tmp_path)
        assert trainer.push_folder("tests/clean", source.folder).wait(timeout=60).number == 1


def test_the_command_line_says_what_it_has_cast(service: RunningService, source: TinyModel) -> None:
    line = ["push", str(source.folder), NARROW, "--step", "3", "--server", service.address]
    done = CliRunner().invoke(commands, line)
    assert done.exit_code == 0
    assert f"{len(source.arrays)} tensors were cast to the model's dtype (rounded)" in done.stderr
    assert CliRunner().invoke(commands, [*line, "--cast", "never"]).exit_code == 1
