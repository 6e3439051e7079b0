"""Is a stored version of which a bit has flipped, or a file was cut short, refused at every door, and by name?"""

from __future__ import annotations

import itertools
import os
import signal
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.service.api.http.hub.endpoint import MODEL, WEIGHTS, Endpoint, endpoint_of
from tests.support.reference import tiny_config, tiny_model
from tests.support.services import RunningService, running_service
from weighbridge import Boxes, EngineClient, TensorParallel, TrainerClient
from weighbridge._core.megatron_rank import MegatronRank
from weighbridge.errors import DataLoss
from weighbridge_service.api.http import hub_reading
from weighbridge_service.api.http.hub_routes import HubSizes
from weighbridge_service.exports.jobs import Exports, ExportState
from weighbridge_service.pull import serving

TENSOR = "model.layers.1.mlp.down_proj.weight"
NAMED = f"{TENSOR} in {WEIGHTS} of {MODEL}@1 does not agree with its digest"


@dataclass(frozen=True)
class Damaged:
    """A service over a folder with one version, of which `WEIGHTS` is damaged."""

    running: RunningService
    weights: Path
    content: bytes
    folder: Path

    def restore(self) -> None:
        self.weights.unlink()
        self.weights.write_bytes(self.content)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("store")
    folder = tmp_path_factory.mktemp("hf")
    tiny_model(tiny_config("llama", tied=False), 1).save_pretrained(folder)
    with running_service(root) as running, TrainerClient(running.address) as trainer:
        trainer.register_model(MODEL, folder)
        trainer.push_folder(MODEL, folder, step=1).wait(timeout=60)
    return root, folder


@pytest.fixture
def place(store: tuple[Path, Path], tmp_path: Path) -> Iterator[Damaged]:
    root, folder = store
    weights = root / f"models/{MODEL}/versions/{1:012d}/{WEIGHTS}"
    content = weights.read_bytes()
    with running_service(root, local_socket=str(tmp_path / "lane.sock"), exports=tmp_path / "exports") as running:
        found = Damaged(running, weights, content, folder)
        yield found
        found.restore()


def flip(place: Damaged) -> None:
    """One bit of `TENSOR`."""
    (length,) = struct.unpack("<Q", place.content[:8])
    tensors = load_file(place.folder / WEIGHTS)
    raw = tensors[TENSOR].numpy().tobytes()
    at = place.content.index(raw, 8 + length) + len(raw) // 2
    spoiled = bytearray(place.content)
    spoiled[at] ^= 1
    os.chmod(place.weights, 0o644)
    place.weights.write_bytes(spoiled)


def cut(place: Damaged) -> None:
    """The second half of the file, when the version is open already."""
    with EngineClient(place.running.address, lane="grpc") as engine:
        dict(engine.pull(MODEL, 1, TensorParallel(2, 0)))
    os.chmod(place.weights, 0o644)
    os.truncate(place.weights, len(place.content) // 2)


@pytest.mark.parametrize("lane", ["grpc", "local"])
def test_a_whole_pull_compares_each_tensor_and_a_restored_file_is_served_again(place: Damaged, lane: str) -> None:
    flip(place)
    with EngineClient(place.running.address, lane=lane) as engine:
        for _ in range(2):
            with pytest.raises(DataLoss, match=NAMED):
                dict(engine.pull(MODEL, 1))
        into = {name: torch.empty_like(tensor) for name, tensor in load_file(place.folder / WEIGHTS).items()}
        with pytest.raises(DataLoss, match=NAMED):
            engine.pull(MODEL, 1).into(into)
        place.restore()
        found = dict(engine.pull(MODEL, 1))
    for name, tensor in load_file(place.folder / WEIGHTS).items():
        assert torch.equal(found[name], tensor)


def test_readers_that_have_all_of_a_tensor_together_and_a_cast_are_compared_too(place: Damaged) -> None:
    flip(place)
    rows, columns = load_file(place.folder / WEIGHTS)[TENSOR].shape
    with EngineClient(place.running.address, lane="grpc") as engine:
        halves = [Boxes([(TENSOR, (start, 0), (count, columns))]) for start, count in ((0, 3), (3, rows - 3))]
        dict(engine.pull(MODEL, 1, halves[1]))
        with pytest.raises(DataLoss, match=NAMED):
            dict(engine.pull(MODEL, 1, halves[0]))
        with pytest.raises(DataLoss, match=NAMED):
            dict(engine.pull(MODEL, 1, dtype="bf16"))


def test_readers_that_open_a_version_at_once_are_compared_together(
    place: Damaged, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(place)
    rows, columns = load_file(place.folder / WEIGHTS)[TENSOR].shape
    opening, opened = threading.Barrier(2), serving.open_version

    def at_once(*arguments: Any) -> Any:
        opening.wait(60)
        return opened(*arguments)

    def pull(half: tuple[int, int]) -> None:
        with EngineClient(place.running.address, lane="grpc") as engine:
            dict(engine.pull(MODEL, 1, Boxes([(TENSOR, (half[0], 0), (half[1], columns))])))

    monkeypatch.setattr(serving, "open_version", at_once)
    with ThreadPoolExecutor(2) as pool:
        errors = [each.exception() for each in [pool.submit(pull, half) for half in ((0, 3), (3, rows - 3))]]
    assert NAMED in "".join(str(error) for error in errors if isinstance(error, DataLoss))


def test_a_restore_of_a_rank_that_holds_all_is_compared(place: Damaged) -> None:
    flip(place)
    served = place.running.service.serving
    layout = served.describe_shards(MODEL, MegatronRank())
    with pytest.raises(DataLoss, match=NAMED):
        for _ in served.restore(MODEL, "1", layout, 0).pieces():
            pass


def test_an_export_fails_and_leaves_no_folder(place: Damaged, tmp_path: Path) -> None:
    flip(place)
    exports = Exports(place.running.service)
    try:
        job = exports.start(MODEL, "1")
        end = time.monotonic() + 30
        while not exports.get(job.id).state.ended:
            assert time.monotonic() < end
            time.sleep(0.01)
        ended = exports.get(job.id)
    finally:
        exports.close()
    assert ended.state is ExportState.FAILED
    assert NAMED in ended.error
    assert not Path(ended.folder).exists()


@pytest.fixture
def hub(place: Damaged) -> Iterator[Endpoint]:
    with endpoint_of(place.running, HubSizes(read=50_000)) as found:
        yield found


def test_a_download_breaks_off_and_what_goes_on_with_it_is_refused(
    place: Damaged, hub: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    import httpx2 as httpx

    flip(place)
    url = f"/{MODEL}/resolve/{hub.sha('main')}/{WEIGHTS}"
    with pytest.raises(httpx.RemoteProtocolError):
        hub.http.get(url)
    again = hub.http.get(url, headers={"range": "bytes=60000-"})
    assert (again.status_code, again.json()["title"]) == (500, "Data loss")
    assert f"{WEIGHTS} of {MODEL}@1 does not agree with its digest" in again.text
    place.restore()
    monkeypatch.setattr(hub_reading, "_REFUSED_SECONDS", 0.0)
    assert hub.http.get(url).content == place.content


def test_ranges_of_a_file_that_are_all_of_it_together_are_compared(place: Damaged, hub: Endpoint) -> None:
    flip(place)
    url = f"/{MODEL}/resolve/{hub.sha('main')}/{WEIGHTS}"
    bounds = range(0, len(place.content) + 50_000, 50_000)
    ranges = [f"bytes={start}-{end - 1}" for start, end in itertools.pairwise(bounds)]
    answers = [hub.http.get(url, headers={"range": each}).status_code for each in reversed(ranges)]
    assert answers == [206] * (len(ranges) - 1) + [500]


@pytest.mark.parametrize("lane", ["grpc", "local"])
def test_a_file_that_was_cut_short_ends_no_process(place: Damaged, lane: str) -> None:
    assert signal.getsignal(signal.SIGBUS) is signal.SIG_DFL
    cut(place)
    with (
        EngineClient(place.running.address, lane=lane) as engine,
        pytest.raises(DataLoss, match=f"{WEIGHTS} of {MODEL}@1"),
    ):
        dict(engine.pull(MODEL, 1))
    found = place.running.service.catalog.verify(MODEL, "1")
    assert [each for each in found.problems if WEIGHTS in each]
