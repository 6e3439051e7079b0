"""Is a version told alike by all replicas, by all interfaces, and by a service that was started since?"""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from starlette.testclient import TestClient

from tests.service.replicas.test_replicas import FILE_BYTES, MODEL, push_all
from tests.support.raw_clients import RawClient, TinyModel, rows_layout, tiny_folder
from tests.support.services import RunningService, running_service
from tests.support.waiting import eventually
from weighbridge import EngineClient, TrainerClient
from weighbridge._cli import commands
from weighbridge._core.resources import VersionState
from weighbridge._formats.safetensors_files import lay_out_files
from weighbridge.errors import VersionFailed
from weighbridge_service.api.http.app import create_app
from weighbridge_service.exports.jobs import Exports
from weighbridge_service.models import registered_model
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head.head import Head

NAME = ModelName.parse(MODEL)


@pytest.fixture
def source(tmp_path: Path) -> TinyModel:
    """A model of several files, with eleven elements that are not finite in two of its tensors."""
    found = tiny_folder(tmp_path / "hf")
    arrays = {name: array.copy() for name, array in found.arrays.items()}
    arrays["model.embed_tokens.weight"][:2, :4] = np.nan
    arrays["model.layers.1.mlp.down_proj.weight"][0, :3] = -np.inf
    return TinyModel(found.folder, arrays)


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered_model, "lay_out_files", functools.partial(lay_out_files, max_shard_bytes=FILE_BYTES))


@contextlib.contextmanager
def serving(location: Path, count: int, **settings: Any) -> Iterator[list[RunningService]]:
    with ExitStack() as stack:
        settings = {"advertise": "127.0.0.1:0", "drain_seconds": 0.5, **settings}
        running = [stack.enter_context(running_service(location, **settings)) for _ in range(count)]
        # ranks count on those of another replica only once that is known
        eventually(lambda: all(len(each.service.directory.others()) == count - 1 for each in running))
        yield running


def told(running: RunningService, number: int) -> dict[str, Any]:
    """A version as a service tells it; all its interfaces must agree."""
    exports = Exports(running.service)
    try:
        http = TestClient(create_app(running.service, exports, running.metrics, running.health))
        listed = http.get(f"/v1/models/{MODEL}/versions", params={"include_invisible": True}).json()
        one = http.get(f"/v1/models/{MODEL}/versions/{number}").json()
    finally:
        exports.close()
    with EngineClient(running.address) as engine:
        found = engine.version(MODEL, number).to_json()
        by_list = {v.number: v.to_json() for v in engine.versions(MODEL, include_invisible=True)}
    cli = CliRunner().invoke(commands, ["versions", MODEL, "--all", "--json", "--server", running.address])
    by_cli = {each["number"]: each for each in json.loads(cli.stdout)}
    for each in by_cli.values():
        del each["refs"]  # it lists them beside each version
    of_http = [one, *(each for each in listed["versions"] if each["number"] == number)]
    assert of_http == [found, found]
    assert by_list[number] == by_cli[number] == found
    return found


@pytest.mark.parametrize("spread", [False, True])
def test_a_durable_version_is_told_alike_at_each_replica_and_after_a_restart(
    tmp_path: Path, source: TinyModel, spread: bool
) -> None:
    started_ms = int(time.time() * 1000)
    with serving(tmp_path / "store", 3) as running, ExitStack() as stack:
        trainer = stack.enter_context(TrainerClient(running[0].address))
        trainer.register_files(MODEL, source.files)
        clients = [stack.enter_context(RawClient(running[rank if spread else 0].address)) for rank in range(2)]
        number = push_all(clients, source.arrays, rows_layout, 2, "r/1")
        trainer.wait_for(MODEL, number, VersionState.DURABLE, timeout=30)
        eventually(lambda: not any(each.service.catalog.snapshots.unfinished for each in running))
        first = told(running[0], number)
        assert [told(each, number) for each in running[1:]] == [first, first]
        if spread:
            states = [each.service.registry.get(NAME, number) for each in running]
            assert sum(session is not None for session in states) == 2, "no push over two replicas"
    assert (first["state"], first["nonfinite_elements"]) == ("durable", 11)
    assert first["ranks"] == first["sealed_ranks"] == 2
    assert (first["step"], first["run"]) == (1, "r")
    nbytes = sum(array.nbytes for array in source.arrays.values())
    assert first["tensor_bytes"] == first["received_bytes"] == nbytes
    times = [first[f"{state}_time_ms"] for state in ("create", "ready", "verified", "durable")]
    in_order = [started_ms, *times, int(time.time() * 1000)]
    assert in_order == sorted(in_order)
    with serving(tmp_path / "store", 1) as (restarted,):
        assert told(restarted, number) == first
        with EngineClient(restarted.address) as engine:
            engine.set_ref(MODEL, "kept", number)
        result = CliRunner().invoke(commands, ["show", f"{MODEL}@kept", "--server", restarted.address])
        assert "11 elements are NaN or infinite" in result.stdout


def declared(client: RawClient, source: TinyModel, request_id: str) -> int:
    """A version that one rank of two has opened and declared; its number."""
    number = client.open(MODEL, ranks=2, request_id=request_id, step=7, run="night")
    layout = rows_layout(source.arrays, 0, 2)
    with contextlib.suppress(Exception):
        client.declare(MODEL, number, layout, rank=0, seconds=0.1)
    return number


@pytest.mark.parametrize("at", [0, 1])
def test_an_aborted_version_is_told_as_aborted_at_each_replica_and_after_a_restart(
    tmp_path: Path, source: TinyModel, at: int
) -> None:
    with serving(tmp_path / "store", 2) as running, ExitStack() as stack:
        trainers = [stack.enter_context(TrainerClient(each.address)) for each in running]
        trainers[0].register_files(MODEL, source.files)
        number = declared(stack.enter_context(RawClient(running[0].address)), source, "r/1")
        assert trainers[at].abort(MODEL, number, "changed my mind").state is VersionState.ABORTED
        eventually(lambda: number in running[0].service.catalog.head(NAME).failed)
        with pytest.raises(VersionFailed, match="changed my mind"):
            trainers[0].wait_for(MODEL, number, VersionState.READY, timeout=20)
        first = told(running[0], number)
        assert told(running[1], number) == first
    assert (first["state"], first["error"]) == ("aborted", "changed my mind")
    assert (first["step"], first["run"], first["ranks"], first["sealed_ranks"]) == (7, "night", 2, 0)
    assert first["create_time_ms"] > 0
    with serving(tmp_path / "store", 1) as (restarted,):
        assert told(restarted, number) == first


def test_replicas_that_receive_one_version_all_say_that_it_was_aborted(tmp_path: Path, source: TinyModel) -> None:
    with serving(tmp_path / "store", 2) as running, ExitStack() as stack:
        trainers = [stack.enter_context(TrainerClient(each.address)) for each in running]
        trainers[0].register_files(MODEL, source.files)
        clients = [stack.enter_context(RawClient(each.address)) for each in running]
        number = clients[0].open(MODEL, ranks=2, request_id="r/1")

        def declare(rank: int) -> None:
            clients[rank].declare(MODEL, number, rows_layout(source.arrays, rank, 2), rank=rank)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(declare, range(2)))
        trainers[1].abort(MODEL, number, "changed my mind")
        eventually(lambda: trainers[0].version(MODEL, number).state.given_up)
        eventually(lambda: number in running[0].service.catalog.head(NAME).failed)
        assert told(running[0], number) == told(running[1], number)
        assert told(running[0], number)["state"] == "aborted"


def test_a_version_that_is_aborted_and_opened_again_at_once_stays_aborted(tmp_path: Path, source: TinyModel) -> None:
    with serving(tmp_path / "store", 2) as running, ExitStack() as stack:
        trainer = stack.enter_context(TrainerClient(running[0].address))
        trainer.register_files(MODEL, source.files)
        raw = stack.enter_context(RawClient(running[0].address))
        for attempt in range(5):
            number = declared(raw, source, f"r/{attempt}")
            trainer.abort(MODEL, number, "changed my mind")
            again = declared(raw, source, f"r/{attempt}")
            assert again > number
            eventually(lambda: number in running[1].service.catalog.head(NAME).failed)  # noqa: B023
            assert told(running[1], number)["state"] == "aborted"
            assert told(running[1], number)["error"] == "changed my mind"


@pytest.mark.parametrize("first", ["one", "list"])
def test_a_version_whose_only_replica_is_gone_is_told_as_failed_once_its_lease_has_expired(
    tmp_path: Path, source: TinyModel, first: str
) -> None:
    with serving(tmp_path / "store", 1, open_lease=0.5) as (running,), ExitStack() as stack:
        stack.enter_context(TrainerClient(running.address)).register_files(MODEL, source.files)
        number = declared(stack.enter_context(RawClient(running.address)), source, "r/1")
    with serving(tmp_path / "store", 1) as (restarted,), EngineClient(restarted.address) as engine:

        def state() -> VersionState:
            if first == "one":
                return engine.version(MODEL, number).state
            (version,) = engine.versions(MODEL, include_invisible=True)
            return version.state

        eventually(lambda: state() is VersionState.FAILED)
        found = told(restarted, number)
    assert (found["state"], found["step"], found["run"]) == ("failed", 7, "night")
    assert "abandoned" in found["error"]


@pytest.mark.parametrize("by", ["opening", "collection", "question"])
def test_a_service_closes_orphaned_versions_and_none_that_it_has_itself(
    tmp_path: Path, source: TinyModel, by: str
) -> None:
    """After an outage of the store the lease of a version may have expired before its own process can renew it."""
    with serving(tmp_path / "store", 1) as (running,), ExitStack() as stack:
        stack.enter_context(TrainerClient(running.address)).register_files(MODEL, source.files)
        raw = stack.enter_context(RawClient(running.address))
        number = declared(raw, source, "r/1")

        def expired(head: Head) -> tuple[Head, None]:
            own = replace(head.open[number], until_ms=1)
            orphan = replace(own, number=number + 1, request_id="r/2")
            return replace(head, open={number: own, number + 1: orphan}, next_version=number + 2), None

        heads = running.service.catalog.heads
        heads.update(NAME, expired)
        if by == "opening":
            declared(raw, source, "r/3")
        elif by == "collection":
            running.service.collecting.collect(MODEL)
        else:
            running.service.catalog.get_version(MODEL, str(number + 1))
        found = heads.read(NAME)
        assert found is not None
        assert number in found[0].open
        assert number + 1 in found[0].failed
