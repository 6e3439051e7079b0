"""Is a rank that does not come named in the service's log, to the waiting ranks, and in the version's description?"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from tests.support.raw_clients import TinyModel, rows_layout, tiny_folder
from tests.support.services import RunningService, running_service
from tests.support.waiting import answered, eventually
from weighbridge import EngineClient, TrainerClient
from weighbridge._cli import commands
from weighbridge._clients.calls import version_calls
from weighbridge._core.resources import VersionState
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._core.text import waits
from weighbridge.errors import VersionFailed, WeighbridgeError
from weighbridge_service.push import registry

MODEL, RANKS = "acme/tiny", 3


@pytest.fixture
def source(tmp_path: Path) -> TinyModel:
    return tiny_folder(tmp_path / "hf")


@pytest.fixture
def service(tmp_path: Path, source: TinyModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningService]:
    """A service that reports every 0.2 s which ranks a push waits for."""
    for module in (waits, registry, version_calls):
        monkeypatch.setattr(module, "REMIND_SECONDS", 0.2)
    with running_service(tmp_path / "store", {MODEL: source.files}, drain_seconds=0.1) as running:
        yield running


def test_who_has_not_come_is_said_on_all_sides_and_an_abort_ends_the_wait(
    service: RunningService, source: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "weighbridge")
    caplog.set_level(logging.INFO, "weighbridge_service")
    ended: list[WeighbridgeError] = []

    def push(rank: int) -> None:
        with TrainerClient(service.address) as trainer:
            state = {name: torch.from_numpy(array.copy()) for name, array in source.arrays.items()}
            try:
                trainer.push_state_dict(MODEL, state, step=1, rank=rank, world_size=RANKS).wait()
            except WeighbridgeError as error:
                ended.append(error)

    ranks = [threading.Thread(target=push, args=(rank,), daemon=True) for rank in (0, 2)]
    for rank in ranks:
        rank.start()

    def said(logger: str) -> list[str]:
        return [each.getMessage() for each in caplog.records if each.name.startswith(logger)]

    eventually(lambda: any("waits for rank 1 to declare" in line for line in said("weighbridge_service.push")))
    with EngineClient(service.address) as engine:
        assert engine.version(MODEL, 1).waits_for == ("rank 1 to declare",)
        (version,) = engine.versions(MODEL, include_invisible=True)
        assert (version.state, version.waits_for) == (VersionState.OPEN, ("rank 1 to declare",))
        assert engine.versions(MODEL) == []
    shown = CliRunner().invoke(commands, ["versions", MODEL, "--all", "--server", service.address])
    assert "waits for rank 1 to declare" in shown.stdout
    shown = CliRunner().invoke(commands, ["show", f"{MODEL}@1", "--server", service.address])
    assert "rank 1 to declare" in shown.stdout
    eventually(lambda: sum("waits for rank 1 to declare" in line for line in said("weighbridge._clients")) > 1)

    gone = CliRunner().invoke(commands, ["abort", f"{MODEL}@1", "--reason", "no rank 1", "--server", service.address])
    assert (gone.exit_code, gone.stdout) == (0, f"{MODEL}@1 (aborted, step 1): no rank 1\n")
    for rank in ranks:
        rank.join(20.0)
    assert [type(error) for error in ended] == [VersionFailed] * 2
    with EngineClient(service.address) as engine:
        assert engine.version(MODEL, 1).waits_for == ()


def test_a_rank_that_does_not_seal_is_named_to_whoever_waits_for_the_version(
    service: RunningService, source: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "weighbridge")
    opened = service.service.intake.opener.open_version(MODEL, step=1, run="r", ranks=2, request_id="q", client_id="c")
    layouts = [rows_layout(source.arrays, rank, 2) for rank in range(2)]
    pending = [
        service.service.intake.declare_layout(
            MODEL, opened.number, rank, f"c{rank}", layout.digest, layout, TensorSpace.HUGGING_FACE, 10.0
        )
        for rank, layout in enumerate(layouts)
    ]
    for each in pending:
        answered(each)
    with EngineClient(service.address) as engine:
        with pytest.raises(WeighbridgeError):
            engine.wait_for(MODEL, 1, VersionState.READY, timeout=1.5)
        assert engine.version(MODEL, 1).waits_for[0] == "ranks 0-1 to push and seal"
    heard = [each.getMessage() for each in caplog.records if each.name.startswith("weighbridge._clients")]
    assert any("waits for ranks 0-1 to push and seal" in line for line in heard), heard
