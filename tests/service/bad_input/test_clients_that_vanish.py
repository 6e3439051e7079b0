"""Ranks, trainers and engines that vanish: is nothing of theirs seen, and nothing kept for them?"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.service.bad_input.bench import Bench, assert_never_visible
from tests.support.forked import forked_python
from tests.support.raw_clients import (
    RawClient,
    assert_equal,
    cut,
    rows_layout,
    stream_of,
    tiny_folder,
    whole_layout,
)
from tests.support.services import running_service
from tests.support.waiting import eventually
from weighbridge._core.resources import VersionState
from weighbridge._trainers.trainer import TrainerClient
from weighbridge.errors import AlreadyExists, DeadlineExceeded, VersionFailed
from weighbridge.v1 import weight_service_pb2


def test_a_rank_that_never_comes_is_named_and_its_version_never_seen(bench: Bench, tmp_path: Path) -> None:
    arrays = bench.source.arrays
    with (
        running_service(tmp_path / "store", receive_timeout=4.0) as running,
        RawClient(running.address) as raw,
        TrainerClient(running.address) as trainer,
    ):
        trainer.register_files("acme/late", bench.source.files)
        good = raw.push_whole("acme/late", arrays)
        seen: list[int] = []

        def watch() -> None:
            for version in trainer.watch("acme/late"):
                seen.append(version.number)
                if len(seen) == 2:
                    return

        watching = threading.Thread(target=watch, daemon=True)
        watching.start()
        number = raw.open("acme/late", ranks=3)
        with pytest.raises(DeadlineExceeded) as caught:
            raw.declare("acme/late", number, rows_layout(arrays, 1, 3), rank=1, seconds=1.0)
        assert caught.value.details == ("rank 0", "rank 2")
        half = raw.open("acme/late")
        layout = whole_layout(arrays)
        stream = stream_of(arrays, layout, raw.declare("acme/late", half, layout))
        raw.push("acme/late", half, cut(stream)[:3])
        for waited, missing in (
            (number, "- ranks 0 and 2 have not declared"),
            (half, "model.layers.0.mlp.up_proj.weight F32[48, 32]: box [0:48, 0:32] of rank 0"),
        ):
            with pytest.raises(VersionFailed) as failure:
                trainer.wait_for("acme/late", waited, VersionState.READY, timeout=60)
            assert "no rank was active" in str(failure.value)
            silent = "ranks 0 and 2 have not declared" if waited == number else "rank 0 has not pushed everything"
            assert silent in str(failure.value)
            assert str(failure.value).count("failed") + str(failure.value).count("given up") <= 2
            assert failure.value.message.count(f"@{waited}") == 1
            assert missing in str(failure.value)
        states = {v.number: v.state for v in trainer.versions("acme/late", include_invisible=True)}
        assert states[number] is states[half] is VersionState.FAILED
        assert [v.number for v in trainer.versions("acme/late")] == [good]
        newest = raw.push_whole("acme/late", arrays)
        eventually(lambda: newest in seen)
        assert seen == [good, newest]
        watching.join(60)


KILLED = """
import sys, time
import numpy as np
from tests.support.raw_clients import RawClient, whole_layout, stream_of, cut
from safetensors.numpy import load_file
address, model, file = sys.argv[1:]
arrays = load_file(file)
raw = RawClient(address)
layout = whole_layout(arrays)
number = raw.open(model, request_id="r/1")
stream = stream_of(arrays, layout, raw.declare(model, number, layout))
def messages():
    yield from raw.messages(model, number, cut(stream[: len(stream) // 2]))
    print(number, flush=True)
    time.sleep(60)
raw.checkpoints.Push(messages())
"""


def test_a_client_that_is_killed_in_mid_push_leaves_nothing_to_see(bench: Bench, model: str) -> None:
    file = bench.source.folder / "model.safetensors"
    with forked_python("-c", KILLED, bench.running.address, model, str(file)) as process:
        number = int(process.stdout.readline())
    assert_never_visible(bench, model, number)
    with RawClient(bench.running.address) as restarted:
        assert restarted.open(model, request_id="r/1") == number
        with pytest.raises(AlreadyExists) as caught:
            restarted.declare(model, number, whole_layout(bench.source.arrays))
        assert f"abort version {number}" in caught.value.fix
        bench.trainer.abort(model, number)
        again = restarted.push_whole(model, bench.source.arrays, request_id="r/1")
    assert again > number
    assert_equal(bench.engine, model, again, bench.source.arrays)


@pytest.mark.parametrize("responses", [0, 1, 2])
def test_an_engine_that_goes_away_in_mid_pull_keeps_no_memory(bench: Bench, tmp_path: Path, responses: int) -> None:
    with (
        running_service(tmp_path / "store") as running,
        RawClient(running.address) as raw,
        TrainerClient(running.address) as trainer,
    ):
        big = tiny_folder(tmp_path / "hf", hidden_size=8192)  # several messages
        trainer.register_files("acme/left", big.files)
        for _ in range(3):
            number = trainer.push_folder("acme/left", big.folder).wait().number
            calls = []
            for _ in range(3):
                request = weight_service_pb2.PullRequest(model="acme/left", version="live")
                call = raw.weights.Pull(iter([request]))
                for _ in range(responses):
                    next(call)
                call.cancel()
                calls.append(call)
        size = trainer.version("acme/left", number).tensor_bytes
        # else images of versions that are not live any more are still held
        eventually(lambda: running.service.images.usage().memory_in_use < 2 * size)
