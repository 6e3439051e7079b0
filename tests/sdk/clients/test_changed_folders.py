"""Is a folder whose files change while it is pushed refused by name, over both lanes, whatever reads it?"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.raw_clients import TinyModel, tiny_folder
from tests.support.services import RunningService, running_service
from weighbridge import TrainerClient
from weighbridge._memory.file_reads import OpenFile
from weighbridge.errors import FailedPrecondition, VersionFailed

SAME, NARROW = "tests/same", "tests/narrow"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return tiny_folder(tmp_path_factory.mktemp("hf") / "tiny")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, source: TinyModel) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("service")
    with running_service(folder / "store", local_socket=str(folder / "lane.sock")) as running:
        with TrainerClient(running.address) as trainer:
            trainer.register_files(SAME, source.files)
            trainer.register_files(NARROW, source.files, "bf16")
        yield running


@pytest.mark.parametrize("model", [SAME, NARROW])
@pytest.mark.parametrize("lane", ["local", "grpc"])
@pytest.mark.parametrize("how", ["cut short", "written again"])
def test_a_file_that_changes_while_it_is_pushed_makes_an_error_that_says_so(
    service: RunningService,
    source: TinyModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    lane: str,
    how: str,
) -> None:
    folder = tmp_path / "step"
    shutil.copytree(source.folder, folder)
    weights = folder / "model.safetensors"
    read_into, reads = OpenFile.read_into, []

    def changing(self: OpenFile, *args: Any) -> None:
        reads.append(args)
        if len(reads) == 6:  # the header is two of them
            if how == "cut short":
                os.truncate(weights, 4096)
            else:
                weights.write_bytes(weights.read_bytes())
                os.utime(weights, ns=(0, 1))
        read_into(self, *args)

    with TrainerClient(service.address, lane=lane) as trainer:
        monkeypatch.setattr(OpenFile, "read_into", changing)
        with pytest.raises((FailedPrecondition, VersionFailed), match=r"model\.safetensors changed while it was read"):
            trainer.push_folder(model, folder, step=1).wait(timeout=20)
