"""Does a manifest say who pushed its version, and how, whichever rank opened it?"""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import torch

from tests.support.raw_clients import TinyModel, tiny_folder
from tests.support.services import RunningService, running_service
from weighbridge import TrainerClient
from weighbridge._formats.torch_state import torch_shards
from weighbridge_service.plan.declarations import layouts_digest
from weighbridge_storage.documents.names import MANIFEST_FILE, ModelName, version_key
from weighbridge_storage.versions.manifest import Manifest

MODEL = "acme/smol"


def manifest(running: RunningService, number: int) -> dict[str, Any]:
    text, _ = running.service.catalog.store.get(version_key(ModelName.parse(MODEL), number, MANIFEST_FILE))
    assert Manifest.from_json(text).provenance == json.loads(text)["provenance"]
    return dict(json.loads(text))


def state(source: TinyModel, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array.copy()).to(dtype) for name, array in source.arrays.items()}


def push(running: RunningService, source: TinyModel, step: int, *dtypes: torch.dtype) -> int:
    """A push of as many ranks, each of which holds all tensors, in a dtype of its own; its version."""
    numbers = []

    def of_rank(rank: int, dtype: torch.dtype) -> None:
        with TrainerClient(running.address) as trainer:
            handle = trainer.push_state_dict(MODEL, state(source, dtype), step=step, rank=rank, world_size=len(dtypes))
            numbers.append(handle.wait(timeout=60).number)

    ranks = [threading.Thread(target=of_rank, args=each) for each in enumerate(dtypes)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    assert len({*numbers}) == 1
    return numbers[0]


def test_the_manifest_says_how_a_version_was_pushed(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "hf", constant=0.5)  # which all dtypes have
    with running_service(tmp_path / "store") as running:
        with TrainerClient(running.address) as trainer:
            trainer.import_folder(MODEL, source.folder, metadata={"reward": 0.7}).wait(timeout=60)
        imported = manifest(running, 1)
        assert imported["provenance"].keys() == {"ranks", "layouts"}
        assert (imported["lineage"], imported["metadata"]) == ({}, {"reward": 0.7})
        same = push(running, source, 1, torch.float32, torch.float32)
        again = push(running, source, 2, torch.float32, torch.float32)
        cast = push(running, source, 3, torch.float64, torch.bfloat16)
        said = [manifest(running, number)["provenance"] for number in (same, again, cast)]
        assert [each["ranks"] for each in said] == [2, 2, 2]
        assert "cast_from" not in said[0]
        assert said[2]["cast_from"] == ["BF16", "F64"], "of both ranks, whichever opened the version"
        # all three pushes have the same layouts, as layouts are in the model's dtypes
        digest = torch_shards(state(source, torch.float32), {s.name: s for s in source.specs}).layout.digest
        expected = hashlib.sha256(f"{digest}\n{digest}\n".encode()).hexdigest()
        assert {each["layouts"] for each in said} == {expected, said[0]["layouts"]} == {layouts_digest([digest] * 2)}
        assert imported["provenance"]["layouts"] != expected
        assert manifest(running, again)["lineage"] == {"parent": same}
