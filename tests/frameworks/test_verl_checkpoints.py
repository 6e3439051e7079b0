"""Does verl 0.9 resume from the service when its settings say so: its own FSDP2 engine, and its Megatron manager with
real Megatron-core ranks?
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.reference import tiny_config, tiny_model
from tests.support.services import RunningService, running_service
from tests.support.verl_jobs import checkpoint_job, needs_verl
from weighbridge import EngineClient, TrainerClient
from weighbridge.integrations.checkpoint_names import step_named
from weighbridge_service.converting.convert import convert_folder

pytestmark = [needs_verl, pytest.mark.slow, pytest.mark.timeout(900)]

MODEL = "tests/policy"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[RunningService]:
    with running_service(tmp_path / "store") as running:
        yield running


@pytest.fixture
def hf_dir(service: RunningService, tmp_path: Path) -> Path:
    model = tiny_model(tiny_config("llama", tied=False), seed=3).bfloat16()
    model.config.torch_dtype = "bfloat16"
    model.save_pretrained(tmp_path / "hf")
    with TrainerClient(service.address) as client:
        client.register_model(MODEL, tmp_path / "hf")
    return tmp_path / "hf"


@pytest.mark.parametrize(
    ("kind", "sizes", "others", "manager"),
    [
        ("fsdp2", {"dp": 2}, [{"dp": 3}, {"dp": 1}], "WeighbridgeFSDPCheckpointManager"),
        ("megatron", {"tp": 2, "dp": 2}, [{"pp": 2}], "WeighbridgeMegatronCheckpointManager"),
    ],
)
def test_ranks_that_were_killed_go_on_to_the_bit_and_others_with_every_tensor(
    service: RunningService,
    tmp_path: Path,
    hf_dir: Path,
    kind: str,
    sizes: dict[str, int],
    others: list[dict[str, int]],
    manager: str,
) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    said = {"kind": kind, "hf_dir": str(hf_dir), "folder": str(folder)}
    with checkpoint_job(tmp_path, service.address, MODEL) as job:
        assert "died with exit code -9" in job.ask("train", **said, sizes=sizes)
        assert job.ask("managers", folder=str(folder)) == {manager}
        (saved,) = folder.glob("global_step_*")
        assert list((saved / "actor").iterdir()) == []
        # a critic's remain verl's; and verl writes this file itself unless the save is asynchronous, as that of the
        # Megatron ranks
        assert any((saved / "critic").glob("model_*")) is (kind == "fsdp2")
        tracker = folder / "latest_checkpointed_iteration.txt"
        assert (tracker.exists() and int(tracker.read_text())) == (kind == "megatron" and step_named(saved))
        assert job.ask("resume", **said, sizes=sizes, exactly=True) == []
        for other in others:
            assert job.ask("resume", **said, sizes=other, exactly=False) == []
    with TrainerClient(service.address) as client:
        steps = {client.version(name).step for name in (MODEL, f"{MODEL}:training")}
    assert steps == {step_named(saved)}
    if kind == "fsdp2":
        _check_taken_in(service, saved / "critic", torch.load(folder / "saved-0", weights_only=False)[1], tmp_path)


def _check_taken_in(service: RunningService, folder: Path, gathered: dict[str, Tensor], tmp_path: Path) -> None:
    """Check that verl's own checkpoint, converted and imported, equals what torch gathered of the same module and
    optimizer.
    """
    report = convert_folder(folder, tmp_path / "converted")
    assert report.left_out == {"extra_state (files)": 2, "optim (files)": 2}
    weights = {name: each for name, each in gathered.items() if not name.startswith("state.")}
    with TrainerClient(service.address) as client, EngineClient(service.address) as engine:
        imported = client.import_training(MODEL, folder).wait(timeout=60)
        state = dict(engine.pull(f"{MODEL}:training", imported.number))
    assert imported.step == step_named(folder.parent)
    for found, expected in (
        (load_file(tmp_path / "converted" / "model.safetensors"), weights),
        (
            {name: each for name, each in state.items() if not name.startswith("rank_state.")},
            {f"{'model' if name in weights else 'optimizer'}.{name}": each for name, each in gathered.items()},
        ),
    ):
        assert found.keys() == expected.keys()
        assert all(
            found[name].dtype == each.dtype and torch.equal(found[name], each) for name, each in expected.items()
        )
