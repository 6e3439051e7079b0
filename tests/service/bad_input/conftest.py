"""Whatever comes in: a clear error, nothing visible that should not be, and a service that goes on serving."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.service.bad_input.bench import GOOD, Bench
from tests.support.raw_clients import RawClient, assert_equal, tiny_folder
from tests.support.services import running_service
from weighbridge._clients.engine import EngineClient
from weighbridge._core.resources import VersionState
from weighbridge._trainers.trainer import TrainerClient


@pytest.fixture(scope="package")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    root = tmp_path_factory.mktemp("bad-input")
    source = tiny_folder(root / "hf")
    with (
        running_service(root / "store", receive_timeout=60.0, drain_seconds=0.1) as running,
        TrainerClient(running.address) as trainer,
        EngineClient(running.address) as engine,
    ):
        trainer.register_files(GOOD, source.files)
        trainer.push_folder(GOOD, source.folder).wait()
        yield Bench(running, root, source, trainer, engine)


@pytest.fixture(autouse=True)
def still_serves(bench: Bench) -> Iterator[None]:
    """After each test: the service answers, the good version is whole, and nothing lies outside of the store."""
    yield
    assert_equal(bench.engine, GOOD, "latest", bench.source.arrays)
    assert bench.trainer.versions(GOOD)[0].state is VersionState.DURABLE
    assert {path.name for path in bench.root.iterdir()} == {"hf", "store"}


@pytest.fixture
def raw(bench: Bench) -> Iterator[RawClient]:
    with RawClient(bench.running.address) as client:
        yield client


@pytest.fixture
def model(bench: Bench) -> str:
    return bench.new_model()
