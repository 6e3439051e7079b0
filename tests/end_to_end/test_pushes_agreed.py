"""Do all ranks of a push make it, or none, whichever of them cannot, and within the time that they allow?

Two real ranks over gloo. One job tries all, since starting ranks costs more than the rest.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.ports import reserved_port
from tests.support.reference import tiny_config, tiny_model
from tests.support.services import running_service
from tests.support.torch_ranks import run_ranks
from weighbridge import CheckpointManager, TrainerClient

MODEL = "tests/agreed"
CONFIG = tiny_config("llama", tied=False, num_hidden_layers=2, vocab_size=64)
BOUND = 60.0
"""Seconds; each wait by itself would take minutes."""


def _outcome(call: Any) -> tuple[str, str, bool]:
    """Outcome of a call: what it raises, what that says, and whether it came in time."""
    began = time.monotonic()
    try:
        handle = call()
        said = "pushed", ""
        if handle.skipped is not None:
            said = "skipped", str(handle.skipped)
    except Exception as error:
        said = type(error).__name__, str(error)
    return *said, time.monotonic() - began < BOUND


def _rank(rank: int, address: str, nowhere: str) -> dict[str, Any]:
    model = tiny_model(CONFIG, seed=1)
    optimizer = torch.optim.AdamW(model.parameters())
    found: dict[str, Any] = {}
    with (
        TrainerClient(address) as there,
        TrainerClient(nowhere if rank else address, retry_seconds=0.5) as half,
    ):
        saving = CheckpointManager(half, MODEL, model, optimizer)
        found["first save"] = _outcome(lambda: saving.save(1))
        found["its state"] = _outcome(saving.wait) if saving.last else None
        found["again"] = _outcome(lambda: CheckpointManager(there, MODEL, model, optimizer).save(1))
        # ranks that are known do not wait for each other to declare
        found["later"] = _outcome(lambda: half.push_state_dict(MODEL, model, step=2))
        warning = CheckpointManager(half, MODEL, model, optimizer, on_failure="warn")
        found["warned"] = _outcome(lambda: warning.save(3))
        wrong = {**model.state_dict(), **({"model.norms.weight": torch.ones(64)} if rank else {})}
        found["refused"] = _outcome(lambda: there.push_state_dict(MODEL, wrong, step=4, on_failure="warn"))
        found["mended"] = _outcome(lambda: there.push_state_dict(MODEL, model, step=4))
        if rank == 0:
            found["alone"] = _outcome(lambda: there.push_state_dict(MODEL, model, step=5, max_hold_s=2.0))
        dist.barrier()
        if rank == 1:
            found["alone"] = _outcome(lambda: there.push_state_dict(MODEL, model, step=5))
        dist.barrier()
        last = there.push_state_dict(MODEL, model, step=6, optimizer=optimizer, max_hold_s=BOUND)
        found["states"] = (
            last.wait(timeout=BOUND).step,
            last.training and last.training.wait(timeout=BOUND).step,
        )
    return found


def test_all_ranks_push_or_none_does_and_none_waits_longer_than_it_allows(tmp_path: Path) -> None:
    CONFIG.save_pretrained(tmp_path / "hf")
    nowhere = f"127.0.0.1:{reserved_port()}"
    with running_service(tmp_path / "store") as service:
        with TrainerClient(service.address) as trainer:
            trainer.register_model(MODEL, tmp_path / "hf", dtype="fp32")
        first, second = run_ranks(2, _rank, service.address, nowhere)
        with TrainerClient(service.address) as trainer:
            pushed = {version.step for version in trainer.versions(MODEL)}

    for name in ("first save", "later"):
        assert [first[name][0], second[name][0]] == ["VersionFailed", "Unavailable"], name
        assert f"rank 1: the service at {nowhere}" in first[name][1]
    assert [first["warned"][0], second["warned"][0]] == ["skipped", "skipped"]
    assert [first["refused"][0], second["refused"][0]] == ["skipped", "skipped"]
    assert "model.norms.weight" in first["refused"][1]
    for name in ("again", "mended"):
        assert [first[name][0], second[name][0]] == ["pushed", "pushed"], name
    assert first["alone"][0] == "DeadlineExceeded", first["alone"]
    assert "rank 1" in first["alone"][1]
    assert second["alone"][0] == "VersionFailed"
    assert first["states"] == second["states"] == (6, 6)
    assert all(each[2] for found in (first, second) for name, each in found.items() if each and name != "states")
    assert pushed == {1, 4, 6}
