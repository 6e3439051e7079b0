"""Heads that are lost: are versions that were held held again when the head is rebuilt, and is that said?"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.service.fsck.damaged_stores import findings, history_of, repaired
from tests.support.raw_clients import RawClient, tiny_folder
from tests.support.services import running_service
from tests.support.small_stores import MODEL
from weighbridge import EngineClient, TrainerClient, VersionState
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.stores.local import LocalStore

NAME = ModelName.parse(MODEL)


def test_what_was_held_when_it_was_written_is_held_again_until_it_is_approved_again(tmp_path: Path) -> None:
    source, folder = tiny_folder(tmp_path / "hf"), tmp_path / "store"
    bad = {name: array.copy() for name, array in source.arrays.items()}
    bad["model.norm.weight"][0] = np.nan
    with running_service(folder) as running, RawClient(running.address) as raw:
        with TrainerClient(running.address) as trainer:
            trainer.register_files(MODEL, source.files)
            trainer.push_folder(MODEL, source.folder, metadata={"reward": 0.5, "ok": True}).wait()
        with EngineClient(running.address) as engine:
            raw.push_whole(MODEL, bad, nonfinite=1)
            engine.wait_for(MODEL, 2, VersionState.DURABLE)
            raw.push_whole(MODEL, bad, allow_nonfinite=True)
            engine.wait_for(MODEL, 3, VersionState.DURABLE)
            raw.push_whole(MODEL, source.arrays, candidate=True)
            engine.wait_for(MODEL, 4, VersionState.DURABLE)
            engine.approve(MODEL, 4)
            assert engine.refs(MODEL)["latest"] == 4
    store = LocalStore(folder)
    store.delete(NAME.head_key)
    found = dict(findings(folder))
    assert "it was held (nonfinite)" in found[2]
    assert "held" not in found[1] + found[3]
    assert "it was held (candidate), and will be until it is approved" in found[4]
    repaired(folder)
    history = history_of(store)
    assert {number: entry.held for number, entry in history.versions().items()} == {
        1: (),
        2: ("nonfinite",),
        3: (),
        4: ("candidate",),
    }
    assert history.head.ref_numbers == {"latest": 3}
    assert history.versions()[1].metadata == {"reward": 0.5, "ok": True}
    with running_service(folder) as running, EngineClient(running.address) as engine:
        engine.approve(MODEL, 4)
        assert engine.refs(MODEL) == {"live": 4, "latest": 4}
