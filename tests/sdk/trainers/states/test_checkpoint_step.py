"""Is the step of a folder the one that its trainer has written into it, or else that of its name?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from weighbridge._trainers.states.checkpoints.checkpoint_step import known_step, step_named, step_of_folder
from weighbridge._trainers.torch_dist.folder import read_torch_dist
from weighbridge.errors import InvalidArgument


@pytest.mark.parametrize(
    ("path", "step"),
    [
        ("iter_0000100", 100),
        ("global_step_12/actor", 12),
        ("ckpt/step-123", 123),
        ("run7-step_45", 45),
        ("step123", 123),
        ("checkpoint-500", 500),
        ("checkpoint-500/pytorch_model_fsdp_0", 500),
        ("iteration=9", 9),
        ("step-0", 0),
        ("smol-135", None),
        ("epoch-3", None),
        ("misstep5", None),
        ("step-12-old", None),
        ("2026-11-26", None),
    ],
)
def test_names_of_folders_say_steps(tmp_path: Path, path: str, step: int | None) -> None:
    assert step_named(tmp_path / path) == step


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("more", "step"),
    [
        ({"train_state": {"step": torch.tensor(31, dtype=torch.int64)}}, 31),  # torchtitan
        ({"train_state": {"step": 32}}, 32),
        ({"step": 33}, 33),
        ({"global_step": torch.tensor(34)}, 34),
        ({"weighbridge.step": 35, "step": 1}, 35),
        ({"step": -1}, 7),
        ({"step": "many"}, 7),
        ({"step": torch.tensor(2.5)}, 7),
        ({"optimizer": {"state": {"w": {"step": 900}}}, "lr_scheduler": {"step": 900, "last_epoch": 900}}, 7),
        ({}, 7),
    ],
)
def test_what_a_checkpoint_says_counts_more_than_its_name(tmp_path: Path, more: dict[str, Any], step: int) -> None:
    folder = tmp_path / "step-7"
    dcp.save({"model": {"w": torch.ones(2)}, **more}, checkpoint_id=folder, no_dist=True)
    assert step_of_folder(folder, read_torch_dist(folder)) == step


def test_a_folder_of_transformers_trainer_says_its_step(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    assert step_of_folder(folder) is None
    for written, step in (
        ('{"global_step": 500}', 500),
        ("{", None),
        ("[]", None),
        ('{"global_step": true}', None),
    ):
        (folder / "trainer_state.json").write_text(written)
        assert step_of_folder(folder) == step
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 2**60}))
    assert step_of_folder(folder) is None


def test_no_step_is_not_step_0(tmp_path: Path) -> None:
    assert known_step(0, tmp_path) == 0
    with pytest.raises(InvalidArgument, match="contains its step"):
        known_step(None, tmp_path)
