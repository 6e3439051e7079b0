"""Does a process cache only so many models, and load an evicted one again?"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.raw_clients import (
    RawClient,
    TinyModel,
    assert_equal,
    cut,
    stream_of,
    tiny_folder,
    whole_layout,
)
from tests.support.services import RunningService, running_service
from weighbridge import EngineClient, TrainerClient


@pytest.fixture
def source(tmp_path: Path) -> TinyModel:
    return tiny_folder(tmp_path / "hf")


def remembered(running: RunningService) -> list[str]:
    return [str(name) for name in running.service.catalog.known_models.names]


def test_idle_models_are_forgotten_and_load_again_when_they_are_asked_for(tmp_path: Path, source: TinyModel) -> None:
    names = [f"acme/model-{number}" for number in range(4)]
    with running_service(tmp_path / "store") as running, TrainerClient(running.address) as trainer:
        for name in names:
            trainer.register_files(name, source.files)
            trainer.push_folder(name, source.folder).wait()
    with (
        running_service(tmp_path / "store", kept_models=2) as running,
        TrainerClient(running.address) as trainer,
        EngineClient(running.address) as engine,
    ):
        for name in [*names, *names]:
            assert_equal(engine, name, "latest", source.arrays)
            assert len(remembered(running)) <= 2
        assert remembered(running) == names[-2:]
        assert_equal(engine, names[-2], "latest", source.arrays)
        trainer.register_files("acme/further", source.files)
        assert remembered(running) == [names[-2], "acme/further"]  # used last
        # evicted models are still listed and load again
        assert [model.name for model in trainer.models()] == sorted([*names, "acme/further"])
        assert [version.number for version in trainer.versions(names[0])] == [1]
        assert trainer.register_files(names[0], source.files).refs == {"latest": 1, "live": 1}
        assert trainer.push_folder(names[1], source.folder).wait().number == 2
        assert_equal(engine, names[1], 2, source.arrays)


def test_a_model_with_a_version_under_way_is_never_forgotten(tmp_path: Path, source: TinyModel) -> None:
    layout = whole_layout(source.arrays)
    with (
        running_service(tmp_path / "store", kept_models=2) as running,
        TrainerClient(running.address) as trainer,
        EngineClient(running.address) as engine,
        RawClient(running.address) as raw,
    ):
        busy = [f"acme/busy-{number}" for number in range(3)]  # more than are kept
        for name in busy:
            trainer.register_files(name, source.files)
        opened = {name: raw.open(name) for name in busy}
        for number in range(3):
            trainer.register_files(f"acme/idle-{number}", source.files)
        assert set(busy) < set(remembered(running))
        assert len(remembered(running)) == len(busy) + 1
        for name, number in opened.items():
            assigned = raw.declare(name, number, layout)
            raw.push(name, number, cut(stream_of(source.arrays, layout, assigned)))
            trainer.register_files("acme/idle-0", source.files)
            raw.seal(name, number)
            assert_equal(engine, name, number, source.arrays)


def test_models_come_and_go_while_versions_of_all_of_them_are_pushed(tmp_path: Path, source: TinyModel) -> None:
    names = [f"acme/model-{number}" for number in range(6)]
    with (
        running_service(tmp_path / "store", kept_models=1) as running,
        EngineClient(running.address) as engine,
    ):

        def push(name: str) -> list[int]:
            with RawClient(running.address) as raw, TrainerClient(running.address) as trainer:
                trainer.register_files(name, source.files)
                return [raw.push_whole(name, source.arrays) for _ in range(3)]

        with ThreadPoolExecutor(len(names)) as pool:
            assert list(pool.map(push, names)) == [[1, 2, 3]] * len(names)
        for name in names:
            assert_equal(engine, name, 3, source.arrays)
