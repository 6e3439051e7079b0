"""How often is a model's head read for a pull?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.raw_clients import tiny_folder
from tests.services import RunningService, running_service
from weighbridge import EngineClient, TrainerClient
from weighbridge_storage.names import ModelName

MODEL = "acme/tiny"


@pytest.fixture(params=["grpc", "local"])
def lane(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningService]:
    with running_service(tmp_path / "store", local_socket=str(tmp_path / "lane.sock")) as service:
        yield service


def test_the_streams_of_a_pull_do_not_ask_the_store_again_for_what_its_plan_has_read(
    running: RunningService, tmp_path: Path, lane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_folder(tmp_path / "hf", seed=0)
    with TrainerClient(running.address) as trainer, EngineClient(running.address, lane=lane) as engine:
        trainer.register_files(MODEL, source.files)
        trainer.push_folder(MODEL, source.folder, step=1).wait(timeout=60)
        heads, reads = running.service.catalog.heads, Counter[str]()
        read = heads.read

        def counted(model: ModelName) -> Any:
            reads["head"] += 1
            return read(model)

        monkeypatch.setattr(heads, "read", counted)
        for version in ("live", "latest", 1):
            reads.clear()
            pulled = {name: tensor.numpy() for name, tensor in engine.pull(MODEL, version)}
            assert pulled.keys() == source.arrays.keys()
            assert all(np.array_equal(pulled[name], each) for name, each in source.arrays.items())
            assert reads["head"] == 1, version
