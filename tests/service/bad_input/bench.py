"""A service with one good version, and what tests of bad input say about it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.support.raw_clients import TinyModel
from tests.support.services import RunningService
from weighbridge._clients.engine import EngineClient
from weighbridge._trainers.trainer import TrainerClient
from weighbridge.errors import FailedPrecondition, NotFound
from weighbridge_service.push.session import PushSession
from weighbridge_storage.documents.names import ModelName

GOOD = "acme/good"
EMBEDDING = "model.embed_tokens.weight"
_numbers = count()


@dataclass(frozen=True)
class Bench:
    """A service with one good version, and clients of it."""

    running: RunningService
    root: Path
    source: TinyModel
    trainer: TrainerClient
    engine: EngineClient

    def new_model(self) -> str:
        """Register one more model of the same kind."""
        name = f"acme/model-{next(_numbers)}"
        self.trainer.register_files(name, self.source.files)
        return name


def assert_never_visible(bench: Bench, model: str, number: int) -> None:
    assert number not in [v.number for v in bench.trainer.versions(model)]
    assert number not in bench.trainer.refs(model).values()
    for version in (str(number), "live", "latest"):
        with pytest.raises((NotFound, FailedPrecondition)):
            bench.engine.pull(model, version)


def session_of(bench: Bench, model: str, number: int) -> PushSession:
    """The service's session of a push that has begun."""
    found = bench.running.service.registry.get(ModelName.parse(model), number)
    assert found is not None
    return found


def config(bench: Bench, **changes: Any) -> bytes:
    read = json.loads(bench.source.files["config.json"])
    read.pop("layer_types", None)  # would be checked against the number of layers first
    return json.dumps({**read, **changes}).encode()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
