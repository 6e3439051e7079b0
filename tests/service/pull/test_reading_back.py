"""Does a replica that never had a version in memory serve the same bytes as the one that received it?"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.support.fault_proxy import fault_proxy
from tests.support.reference import tiny_config, tiny_model
from tests.support.s3_server import S3Server
from tests.support.services import RunningService, running_service
from tests.support.waiting import eventually
from weighbridge import Boxes, ExpertParallel, FullTensors, TensorParallel, TrainerClient
from weighbridge._core.megatron_rank import MegatronRank
from weighbridge._core.slices import LayoutRequest
from weighbridge._formats.safetensors_files import lay_out_files
from weighbridge.errors import DataLoss, Unavailable, WeighbridgeError
from weighbridge_service import core
from weighbridge_service.exports import tensors
from weighbridge_service.exports.jobs import Exports, ExportState
from weighbridge_service.models import registered_model
from weighbridge_service.pull import read_ahead
from weighbridge_service.pull.reading import Reading
from weighbridge_service.service import Weighbridge
from weighbridge_storage.cache.block_cache import BlockCache
from weighbridge_storage.opening import open_store

MODEL = "tests/moe"
BLOCK = 16384
SMALL = 6 * BLOCK
"""A cache that holds neither a file nor a large tensor."""
LARGE = 16 << 20
DOWN = "model.layers.1.mlp.experts.3.down_proj.weight"
FOLDER = f"models/{MODEL}/versions/000000000001/"

REQUESTS: dict[str, tuple[LayoutRequest, str]] = {
    "full": (FullTensors(), ""),
    "full, cast": (FullTensors(), "bf16"),
    **{f"tp {rank}": (TensorParallel(4, rank), "") for rank in range(4)},
    "tp, cast": (TensorParallel(2, 1), "fp16"),
    **{
        f"ep {rank}": (
            TensorParallel(2, rank % 2, experts=ExpertParallel(2, rank // 2, tp_size=2, tp_rank=rank % 2)),
            "",
        )
        for rank in range(4)
    },
    "padded": (TensorParallel(2, 1, vocab_multiple=96), ""),
    "stage": (TensorParallel(1, 0, layers=(1, 3)), ""),
    "boxes": (Boxes([(DOWN, (1, 3), (50, 7)), ("model.norm.weight", (2,), (11,)), (DOWN, (0, 0), (64, 1))]), ""),
    "column": (Boxes([("model.embed_tokens.weight", (0, 5), (128, 1))]), ""),
}  # fmt: skip
RANKS = {
    "whole": MegatronRank(),
    "tp": MegatronRank(tp=(1, 2)),
    "pp": MegatronRank(tp=(0, 2), pp=(1, 2)),
    "ep": MegatronRank(ep=(1, 2)),
}


@dataclass(frozen=True)
class Written:
    """A version in a store, and what the service that wrote it sent out of its image."""

    location: str
    folder: Path
    streams: dict[str, bytes]


@contextmanager
def small_files() -> Iterator[None]:
    """Models are laid out in files of 200 kB, and read a little ahead."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registered_model, "lay_out_files", partial(lay_out_files, max_shard_bytes=200_000))
        patch.setattr(core, "BlockCache", partial(BlockCache, block=BLOCK))
        patch.setattr(read_ahead, "STEP_BYTES", 3 * BLOCK)
        patch.setattr(tensors, "STEP_BYTES", 3 * BLOCK)
        yield


def stream(reading: Reading) -> bytes:
    return b"".join(bytes(piece.data) for piece in reading.pieces())


def all_streams(replica: Weighbridge) -> dict[str, bytes]:
    serving = replica.serving
    streams = {name: stream(serving.pull(MODEL, "1", request, 0, dtype)) for name, (request, dtype) in REQUESTS.items()}
    for name, rank in RANKS.items():
        layout = serving.describe_shards(MODEL, rank)
        streams[f"restore {name}"] = stream(serving.restore(MODEL, "1", layout, 0))
    return streams


def write(location: str, tmp_path: Path) -> Written:
    folder = tmp_path / "hf"
    tiny_model(tiny_config("qwen3_moe", tied=False), seed=7).save_pretrained(folder)
    with running_service(location, scratch=tmp_path / "writer") as running:
        with TrainerClient(running.address) as trainer:
            trainer.register_model(MODEL, folder)
            trainer.push_folder(MODEL, folder, step=1).wait(timeout=60)
        streams = all_streams(running.service)
        assert running.service.read_cache.usage().fetched == 0
    return Written(location, folder, streams)


@pytest.fixture(scope="module")
def written(seaweed: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Written]:
    """On S3."""
    with small_files():
        yield write(seaweed.location(), tmp_path_factory.mktemp("written"))


@contextmanager
def replica(location: str, scratch: Path, cache: int = SMALL, **settings: Any) -> Iterator[RunningService]:
    with running_service(location, scratch=scratch, read_cache=cache, **settings) as running:
        yield running


def objects(written: Written) -> dict[str, bytes]:
    store = open_store(written.location)
    found = {key.removeprefix(FOLDER): store.get(key)[0] for key in store.list(FOLDER)}
    store.close()
    return found


def manifest(written: Written) -> Any:
    return json.loads(objects(written)["weighbridge.json"])["parts"]["weights"]


# -- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", [SMALL, LARGE])
def test_every_stream_is_the_image_s_from_s3_through_any_cache(written: Written, tmp_path: Path, cache: int) -> None:
    assert len([name for name in objects(written) if name.endswith(".safetensors")]) > 5
    with replica(written.location, tmp_path, cache) as running:
        found = all_streams(running.service)
        for name, expected in written.streams.items():
            assert found[name] == expected, name
        assert running.service.read_cache.usage().nbytes <= cache
        assert running.service.store_readers.count == 0


def test_every_stream_is_the_image_s_from_a_folder_and_nothing_is_cached(tmp_path: Path) -> None:
    with small_files():
        written = write(str(tmp_path / "store"), tmp_path)
        with replica(written.location, tmp_path / "scratch") as running:
            assert all_streams(running.service) == written.streams
            usage = running.service.read_cache.usage()
            assert (usage.fetched, usage.misses, usage.nbytes) == (0, 0, 0)
            whole = Boxes([("lm_head.weight", (0, 0), (128, 64))])
            [piece] = running.service.serving.pull(MODEL, "1", whole, 0).pieces()
            assert len(piece.data) == 128 * 64 * 4


def test_full_tensors_are_what_safetensors_reads(written: Written, tmp_path: Path) -> None:
    expected = load_file(written.folder / "model.safetensors")
    with replica(written.location, tmp_path) as running:
        layout = running.service.serving.plan_pull(MODEL, "1", FullTensors())[1]
        data = stream(running.service.serving.pull(MODEL, "1", FullTensors(), 0))
    assert {p.shard.tensor for p in layout.placements} == expected.keys()
    for p in layout.placements:
        found = np.frombuffer(data, np.float32, p.nbytes // 4, p.offset)
        assert found.tobytes() == expected[p.shard.tensor].numpy().tobytes(), p.shard.tensor


def test_a_stream_can_begin_anywhere(written: Written, tmp_path: Path) -> None:
    dice = random.Random(1)
    with replica(written.location, tmp_path) as running:
        for name in ("full", "full, cast", "tp 3"):
            request, dtype = REQUESTS[name]
            for _ in range(3):
                offset = dice.randrange(len(written.streams[name]) + 1)
                found = stream(running.service.serving.pull(MODEL, "1", request, offset, dtype))
                assert found == written.streams[name][offset:]


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_an_export_reads_through_a_cache_smaller_than_a_file(
    written: Written, tmp_path: Path, dtype: str | None
) -> None:
    with replica(written.location, tmp_path) as running:
        jobs = Exports(running.service)
        job = jobs.start(MODEL, "1", dtype=dtype)
        eventually(lambda: jobs.get(job.id).state.ended)
        done = jobs.get(job.id)
        assert done.state is ExportState.DONE, done.error
        found = load_file(Path(done.folder) / "model.safetensors")
        jobs.close()
        assert running.service.read_cache.usage().fetched > 10 * SMALL
        assert running.service.store_readers.count == 0
    for name, tensor in load_file(written.folder / "model.safetensors").items():
        expected = tensor.bfloat16() if dtype else tensor
        assert found[name].equal(expected), name


def test_pulls_side_by_side_through_a_small_cache_on_a_bad_network(
    written: Written, seaweed: S3Server, tmp_path: Path
) -> None:
    with fault_proxy(seaweed.endpoint, seed=5) as proxy:
        location = written.location.replace(seaweed.endpoint.split(":")[-1], proxy.endpoint.split(":")[-1])
        assert location != written.location
        with replica(location, tmp_path) as running:
            stream(running.service.serving.pull(MODEL, "1", REQUESTS["boxes"][0], 0))
            proxy.script = ["truncated", "reset", "slow-down", "lost"] * 3
            proxy.rate = 0.08
            names = ["full", "full, cast", "tp 0", "tp 3", "ep 1", "padded"]

            def pull(name: str) -> str:
                request, dtype = REQUESTS[name]
                try:
                    found = stream(running.service.serving.pull(MODEL, "1", request, 0, dtype))
                except Unavailable:
                    return "unavailable"
                return "same" if found == written.streams[name] else "different"

            with ThreadPoolExecutor(6) as pulls:
                outcomes = list(pulls.map(pull, names))
            proxy.rate = 0.0
            proxy.wait_until_quiet()
            assert set(outcomes) <= {"same", "unavailable"}
            assert "same" in outcomes
            assert proxy.done["truncated"] >= 3
            assert [pull(name) for name in names] == ["same"] * len(names)
            assert running.service.read_cache.usage().nbytes <= SMALL
            assert running.service.store_readers.count == 0


# -- only what is needed ---------------------------------------------------------------------------------------------


def blocks_of(written: Written, tensor: str) -> int:
    entry = manifest(written)["tensors"][tensor]
    return (entry["offset"] + entry["nbytes"] - 1) // BLOCK - entry["offset"] // BLOCK + 1


def test_a_single_tensor_costs_its_blocks_and_no_more(written: Written, tmp_path: Path) -> None:
    with replica(written.location, tmp_path, LARGE) as running:
        cache = running.service.read_cache
        shape = manifest(written)["tensors"][DOWN]["shape"]
        for _ in range(2):
            stream(running.service.serving.pull(MODEL, "1", Boxes([(DOWN, (0, 0), tuple(shape))]), 0))
            assert cache.usage().misses == blocks_of(written, DOWN)
        assert cache.usage().hits == blocks_of(written, DOWN)


def test_rows_cost_the_blocks_they_lie_in(written: Written, tmp_path: Path) -> None:
    name = "lm_head.weight"
    entry = manifest(written)["tensors"][name]
    columns = entry["shape"][1]
    row = columns * 4
    with replica(written.location, tmp_path, LARGE) as running:
        stream(running.service.serving.pull(MODEL, "1", Boxes([(name, (5, 0), (9, columns))]), 0))
        first = entry["offset"] + 5 * row
        expected = (first + 9 * row - 1) // BLOCK - first // BLOCK + 1
        assert running.service.read_cache.usage().misses == expected < blocks_of(written, name)


def test_what_is_pulled_again_or_by_another_rank_is_fetched_once(written: Written, tmp_path: Path) -> None:
    with replica(written.location, tmp_path, LARGE) as running:
        serving, cache = running.service.serving, running.service.read_cache
        for rank in range(4):
            stream(serving.pull(MODEL, "1", TensorParallel(4, rank), 0))
        fetched = cache.usage().fetched
        stream(serving.pull(MODEL, "1", FullTensors(), 0))
        assert cache.usage().fetched == fetched
        sizes = {name: len(data) for name, data in objects(written).items() if name.endswith(".safetensors")}
        assert fetched <= sum(sizes.values())


# -- what the store no longer has ------------------------------------------------------------------------------------


@pytest.fixture
def own(written: Written, seaweed: S3Server) -> Written:
    """The same version in a store that a test may spoil."""
    location = seaweed.location()
    source, target = open_store(written.location), open_store(location)
    for key in source.list(f"models/{MODEL}/"):
        target.put(key, source.get(key)[0], mode="create")
    source.close()
    target.close()
    return Written(location, written.folder, written.streams)


def weights_of(written: Written) -> list[str]:
    return sorted(name for name in objects(written) if name.endswith(".safetensors"))


@pytest.mark.parametrize("what", ["missing", "longer", "shorter", "header"])
def test_a_file_that_is_not_what_the_manifest_says_is_named(own: Written, tmp_path: Path, what: str) -> None:
    name = weights_of(own)[2]
    data = objects(own)[name]
    store = open_store(own.location)
    if what == "missing":
        store.delete(FOLDER + name)
    else:
        spoilt = {"longer": data + b"x", "shorter": data[:-1], "header": data[:8] + b" " + data[9:]}[what]
        store.put(FOLDER + name, spoilt, mode="overwrite")
    store.close()
    with replica(own.location, tmp_path) as running:
        for request in (FullTensors(), Boxes([("model.norm.weight", (0,), (1,))])):
            with pytest.raises(DataLoss, match=name) as caught:
                running.service.serving.pull(MODEL, "1", request, 0)
            assert f"{MODEL}@1" in caught.value.message or what == "header"
        assert running.service.store_readers.count == 0


def test_a_version_that_is_deleted_while_it_is_read_is_an_error_and_no_wrong_bytes(
    own: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weighbridge._transport import rpc

    monkeypatch.setattr(rpc, "MESSAGE_BYTES", 10_000)
    with replica(own.location, tmp_path) as running:
        pieces = running.service.serving.pull(MODEL, "1", FullTensors(), 0).pieces()
        came, rest = bytearray(next(pieces).data), list[bytes]()
        assert running.service.store_readers.count == 1
        store = open_store(own.location)
        for name in weights_of(own):
            store.delete(FOLDER + name)
        store.close()
        with pytest.raises(DataLoss, match=rf"of {MODEL}@1 is missing"):
            rest.extend(bytes(piece.data) for piece in pieces)
        came += b"".join(rest)
        assert own.streams["full"].startswith(came)
        assert len(came) < len(own.streams["full"])
        assert running.service.store_readers.count == 0


def test_a_damaged_tensor_is_not_sent_whole(own: Written, tmp_path: Path) -> None:
    entry = manifest(own)["tensors"][DOWN]
    data = bytearray(objects(own)[entry["file"]])
    data[entry["offset"] + entry["nbytes"] // 2] ^= 1
    store = open_store(own.location)
    store.put(FOLDER + entry["file"], bytes(data), mode="overwrite")
    store.close()
    with replica(own.location, tmp_path, LARGE) as running:
        box = Boxes([(DOWN, (0, 0), tuple(entry["shape"]))])
        for request in (box, FullTensors()):
            with pytest.raises(DataLoss, match=rf"{DOWN} in {entry['file']} of {MODEL}@1"):
                stream(running.service.serving.pull(MODEL, "1", request, 0))
        other = Boxes([("lm_head.weight", (0, 0), (128, 64))])
        assert stream(running.service.serving.pull(MODEL, "1", other, 0))


def test_a_pull_that_is_given_up_lets_go_of_everything(written: Written, tmp_path: Path) -> None:
    with replica(written.location, tmp_path) as running:
        serving = running.service.serving
        reading = serving.pull(MODEL, "1", FullTensors(), 0)
        pieces = reading.pieces()
        next(pieces)
        assert running.service.store_readers.count == 1
        pieces.close()
        serving.pull(MODEL, "1", FullTensors(), 0).close()
        with pytest.raises(WeighbridgeError, match="cannot begin"):
            serving.pull(MODEL, "1", FullTensors(), 10**12)
        assert running.service.store_readers.count == 0
        # nothing stays pinned: the whole cache can be used for something else
        threads = [
            threading.Thread(target=stream, args=(serving.pull(MODEL, "1", FullTensors(), 0),)) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()


# -- verifying -------------------------------------------------------------------------------------------------------


def test_verify_reads_each_file_once_and_names_what_is_wrong(
    own: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = manifest(own)["tensors"]
    with replica(own.location, tmp_path) as running:
        store = running.service.catalog.store
        real, streamed = store.stream, []

        def counted(key: str) -> Any:
            streamed.append(key.removeprefix(FOLDER))
            return (piece[i : i + 977] for piece in real(key) for i in range(0, len(piece), 977))

        monkeypatch.setattr(store, "stream", counted)
        found = running.service.catalog.verify(MODEL, "1")
        assert found.problems == ()
        assert found.tensors_checked == len(tensors)
        files = {n: len(data) for n, data in objects(own).items() if n in manifest(own)["files"]}
        assert files.keys() == {n for n in objects(own) if not n.endswith((".blake3", "weighbridge.json"))}
        assert found.bytes_checked == sum(files.values())
        assert sorted(streamed) == sorted(files)
        assert running.service.read_cache.usage().fetched == 0

        dice = random.Random(2)
        for name, entry in dice.sample(sorted(tensors.items()), 3):
            data = objects(own)[entry["file"]]
            spoilt = bytearray(data)
            spoilt[dice.choice([entry["offset"], entry["offset"] + entry["nbytes"] - 1])] ^= 128
            store.put(FOLDER + entry["file"], bytes(spoilt), mode="overwrite")
            found = running.service.catalog.verify(MODEL, "1")
            assert found.problems == (
                f"tensor {name} in {entry['file']} does not agree with its digest",
                f"{entry['file']} does not agree with its digest",
                # none of these files is larger than one block
                f"{entry['file']} is damaged between bytes 0 and {len(data)}; 1 of its 1 blocks are",
            )
            store.put(FOLDER + entry["file"], data, mode="overwrite")


# -- metrics ---------------------------------------------------------------------------------------------------------


def test_metrics_say_what_was_fetched(written: Written, tmp_path: Path) -> None:
    with replica(written.location, tmp_path) as running:
        stream(running.service.serving.pull(MODEL, "1", FullTensors(), 0))
        running.service.read_cache.close()  # of what was asked for ahead, some may still be on its way
        usage = running.service.read_cache.usage()
        lines = running.metrics.text().decode().splitlines()
    told = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert usage.fetched > 1_000_000
    assert float(told["weighbridge_store_fetched_bytes_total"]) == usage.fetched
    assert float(told['weighbridge_read_cache_blocks_total{result="miss"}']) == usage.misses
    assert float(told['weighbridge_read_cache_blocks_total{result="hit"}']) == usage.hits
    assert 0 < float(told["weighbridge_read_cache_bytes"]) <= SMALL
    assert float(told["weighbridge_store_readers"]) == 0
