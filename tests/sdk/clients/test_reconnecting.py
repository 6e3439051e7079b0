"""Does a client reach a service that is back after a long outage?"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from tests.support.killable_service import KillableService
from tests.support.raw_clients import tiny_folder
from tests.support.waiting import eventually
from weighbridge import EngineClient, TrainerClient
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._formats.folder_weights import FolderWeights
from weighbridge._transport import rpc
from weighbridge.errors import Unavailable, VersionFailed
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head.head_store import HeadStore
from weighbridge_storage.stores.local import LocalStore

MODEL = "acme/tiny"


def claimed(folder: Path, number: int) -> bool:
    """Whether the head in a store names the replica that receives an open version."""
    with closing(LocalStore(folder)) as store:
        found = HeadStore(store).read(ModelName.parse(MODEL))
    assert found is not None
    return bool(found[0].open[number].claim)


def test_a_client_whose_calls_have_failed_for_seconds_is_answered_soon_after_the_service_is_back(
    tmp_path: Path,
) -> None:
    service = KillableService(tmp_path / "store")
    service.start()
    try:
        source = tiny_folder(tmp_path / "hf")
        with TrainerClient(service.address) as trainer:
            trainer.register_files(MODEL, source.files)
            trainer.push_folder(MODEL, source.folder, step=1).wait(timeout=60)
        with EngineClient(service.address, retry_seconds=8.0) as engine:
            assert engine.version(MODEL, 1).number == 1
            service.kill()
            with pytest.raises(Unavailable):
                engine.version(MODEL, 1)
            service.start()
            # gRPC's own pauses have grown as long as they may by now
            assert dict(rpc.CHANNEL_OPTIONS)["grpc.max_reconnect_backoff_ms"] == 1000
            assert engine.version(MODEL, 1).number == 1
    finally:
        service.kill()


def test_a_push_whose_version_was_lost_with_the_service_fails_with_the_reason_that_the_list_shows(
    tmp_path: Path,
) -> None:
    service = KillableService(tmp_path / "store")
    service.start()
    try:
        source = tiny_folder(tmp_path / "hf")
        with TrainerClient(service.address, lane="grpc") as trainer:
            trainer.register_files(MODEL, source.files)
            weights = FolderWeights.read(source.folder, source.files["config.json"])
            handle = trainer.push_shards(
                MODEL, weights.layout, TensorSpace.HUGGING_FACE, weights.shards,
                step=1, rank=0, world_size=1, hold_seal=True,
            )  # fmt: skip
            handle.report()
            # an open version that no replica has claimed is not lost: a trainer that pushes the step again continues it
            eventually(lambda: claimed(tmp_path / "store", handle.number))
            service.kill()
            service.start()
            with pytest.raises(VersionFailed, match="was restarted") as lost:
                handle.seal()
            (version,) = trainer.versions(MODEL, include_invisible=True)
        assert version.error
        assert version.error in lost.value.message
    finally:
        service.kill()
