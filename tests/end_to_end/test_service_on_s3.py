"""Does the whole service run on S3 as it does on a folder: in, out, verified, and again after a restart?"""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from tests.support.reference import tiny_config, tiny_model
from tests.support.s3_server import S3Server
from tests.support.services import running_service, service_process
from weighbridge import EngineClient, FullTensors, TensorParallel, TrainerClient
from weighbridge._core.resources import VersionState
from weighbridge_storage.opening import open_store

MODEL = "tests/smol"


def pulled(engine: EngineClient, version: str) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.pull(MODEL, version=version, layout=FullTensors())}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(found[name].equal(expected[name]) for name in expected)


@pytest.mark.smoke
def test_versions_go_through_a_service_on_s3_and_outlive_it(seaweed: S3Server, tmp_path: Path) -> None:
    location = seaweed.location()
    folders = []
    for seed in (1, 2):
        folder = tmp_path / f"hf{seed}"
        tiny_model(tiny_config("llama", tied=False), seed=seed).save_pretrained(folder)
        folders.append(folder)
    weights = [load_file(folder / "model.safetensors") for folder in folders]

    with service_process(location, "--scratch", tmp_path / "scratch1") as service:
        with TrainerClient(service.address) as trainer, EngineClient(service.address) as engine:
            trainer.register_model(MODEL, folders[0])
            for step, folder in enumerate(folders):
                version = trainer.push_folder(MODEL, folder, step=step).wait(timeout=60)
                assert version.state is VersionState.DURABLE
            assert same(pulled(engine, "latest"), weights[1])
            for number in ("1", "2"):
                assert trainer.verify(MODEL, number).problems == ()
        assert service.stop() == 0
    assert "s3://" in service.ready
    assert seaweed.endpoint not in service.ready

    with running_service(location, scratch=tmp_path / "scratch2") as again:
        with TrainerClient(again.address) as trainer, EngineClient(again.address) as engine:
            assert [version.number for version in trainer.versions(MODEL)] == [2, 1]
            assert same(pulled(engine, "1"), weights[0])
            assert same(pulled(engine, "latest"), weights[1])
            slices = dict(engine.pull(MODEL, version="1", layout=TensorParallel(size=2, rank=1)))
            name = "model.layers.0.mlp.up_proj.weight"
            assert slices[name].equal(weights[0][name].chunk(2)[1])
            assert trainer.push_folder(MODEL, folders[0], step=2).wait(timeout=60).number == 3
        assert again.service.catalog.store.discard_unfinished("", older_than_s=0.0) == 0

    store = open_store(location)
    data = store.get("models/tests/smol/versions/000000000001/model.safetensors")[0]
    (tmp_path / "copy.safetensors").write_bytes(data)
    assert same(load_file(tmp_path / "copy.safetensors"), weights[0])
    store.close()
