"""Does a running service keep the versions that its policy names, delete the others, and disturb no reader, over gRPC
and HTTP?
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from starlette.testclient import TestClient

from tests.support.raw_clients import RawClient, TinyModel, assert_equal, tiny_folder
from tests.support.services import RunningService, running_service
from tests.support.waiting import eventually
from weighbridge import EngineClient, Retention, TrainerClient
from weighbridge._cli import commands
from weighbridge._cli.parsing import parse_duration
from weighbridge._core.reports.collection import Collection, DeletedVersion
from weighbridge._core.resources import VersionState
from weighbridge.errors import FailedPrecondition, InvalidArgument, NotFound, WeighbridgeError
from weighbridge.v1 import model_service_pb2, resources_pb2
from weighbridge_service.api.http.app import create_app
from weighbridge_service.exports.jobs import Exports
from weighbridge_storage.documents.names import ModelName, version_prefix

MODEL = "acme/tiny"
GRACE_MS = 900_000


class Clock:
    """The time of a service, moved by hand."""

    def __init__(self) -> None:
        self.ms = time.time_ns() // 1_000_000

    def __call__(self) -> int:
        return self.ms


class Bench:
    """A service whose clock is moved by hand, and clients of it."""

    def __init__(self, running: RunningService, folder: Path) -> None:
        self.running = running
        self.service = running.service
        self.clock = Clock()
        self.service.catalog.readers.clock = self.clock
        self.sources = [tiny_folder(folder / f"hf{seed}", seed=seed) for seed in range(2)]
        self.trainer = TrainerClient(running.address)
        self.engine = EngineClient(running.address)
        self.http = TestClient(
            create_app(self.service, Exports(self.service), running.metrics, running.health),
            raise_server_exceptions=False,
        )
        self.trainer.register_files(MODEL, self.sources[0].files)
        self.pushed = 0

    def close(self) -> None:
        self.trainer.close()
        self.engine.close()

    def source(self, number: int) -> TinyModel:
        """The model from which version ``number`` was pushed."""
        return self.sources[number % 2]

    def add(self, count: int = 1) -> None:
        for _ in range(count):
            self.pushed = number = self.pushed + 1
            version = self.trainer.push_folder(MODEL, self.source(number).folder, step=number).wait(timeout=60)
            assert (version.number, version.state) == (number, VersionState.DURABLE)

    def collect_after_grace(self) -> Collection:
        self.trainer.collect(MODEL)
        self.clock.ms += GRACE_MS
        return self.trainer.collect(MODEL)

    def stored(self) -> set[int]:
        """Versions that have objects in the store."""
        prefix = ModelName.parse(MODEL).prefix + "versions/"
        return {int(key[len(prefix) :][:12]) for key in self.service.catalog.store.list(prefix)}

    def cli(self, *line: object, json: bool = False) -> Result:
        arguments = [*map(str, line), "--server", self.running.address, *(["--json"] if json else [])]
        return CliRunner().invoke(commands, arguments)


@pytest.fixture
def bench(location: str, tmp_path: Path) -> Iterator[Bench]:
    with running_service(location, scratch=tmp_path / "scratch", collect_every=0) as running:
        bench = Bench(running, tmp_path)
        yield bench
        bench.close()


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Bench]:
    with running_service(tmp_path / "store", collect_every=0) as running:
        bench = Bench(running, tmp_path)
        yield bench
        bench.close()


def test_a_model_keeps_what_it_is_told_to_and_nothing_else(bench: Bench) -> None:
    bench.add(5)
    nbytes = bench.service.catalog.store.size(f"{version_prefix(ModelName.parse(MODEL), 1)}model.safetensors")
    assert bench.trainer.retention(MODEL) == Retention()
    assert bench.collect_after_grace().deleted == ()
    bench.trainer.set_ref(MODEL, "prod", 2)
    rules = Retention(keep_last=2, keep_younger_s=0, keep_every=0)
    assert bench.trainer.set_retention(MODEL, rules) == bench.trainer.retention(MODEL) == rules
    planned = bench.trainer.collect(MODEL, dry_run=True)
    assert (planned.retired, planned.deleted) == ((1, 3), ())
    assert [v.number for v in bench.trainer.versions(MODEL)] == [5, 4, 3, 2, 1]
    assert bench.trainer.collect(MODEL).retired == (1, 3)
    assert [v.number for v in bench.trainer.versions(MODEL)] == [5, 4, 2]
    bench.clock.ms += GRACE_MS
    report = bench.trainer.collect(MODEL)
    assert report.deleted == (DeletedVersion(1, nbytes), DeletedVersion(3, nbytes))
    assert bench.stored() == {2, 4, 5}
    for number in (2, 4, 5):
        assert_equal(bench.engine, MODEL, number, bench.source(number).arrays)
        assert bench.trainer.verify(MODEL, number).problems == ()
    for number in (1, 3):
        for ask in (
            bench.trainer.version,
            bench.trainer.model_files,
            bench.trainer.verify,
            bench.engine.pull,
        ):
            with pytest.raises(NotFound):
                ask(MODEL, number)  # type: ignore[operator]
    assert bench.trainer.refs(MODEL) == {"prod": 2, "latest": 5, "live": 5}
    metrics = bench.running.metrics.text().decode()
    assert "weighbridge_deleted_versions_total 2.0" in metrics
    assert f"weighbridge_deleted_bytes_total {float(2 * nbytes)}" in metrics
    assert "weighbridge_collection_failures_total 0.0" in metrics
    bench.add()
    assert bench.trainer.version(MODEL).number == 6


def test_a_retired_version_is_in_no_list_and_can_be_read_by_its_number(bench: Bench) -> None:
    bench.add(3)
    deleted = bench.trainer.delete_version(MODEL, 1)
    assert (deleted.number, deleted.state) == (1, VersionState.RETIRED)
    assert "taken out of history" in deleted.error
    assert bench.trainer.delete_version(MODEL, 1) == deleted, "a lost answer is asked for again"
    assert [v.number for v in bench.trainer.versions(MODEL, include_invisible=True)] == [3, 2]
    assert bench.trainer.version(MODEL, 1) == deleted
    with pytest.raises(NotFound):
        bench.trainer.set_ref(MODEL, "prod", 1)
    assert_equal(bench.engine, MODEL, 1, bench.source(1).arrays)
    assert bench.trainer.verify(MODEL, 1).problems == ()
    assert "config.json" in bench.trainer.model_files(MODEL, 1)
    assert bench.trainer.wait_for(MODEL, 1, VersionState.DURABLE, timeout=60).number == 1


def test_what_is_in_memory_of_a_deleted_version_is_not_found_either(tmp_path: Path) -> None:
    """One replica still has version 1 in memory when another has published the next one and deleted the first."""
    with (
        running_service(tmp_path / "store", collect_every=0) as one,
        running_service(tmp_path / "store", collect_every=0) as other,
    ):
        source = tiny_folder(tmp_path / "hf")
        with TrainerClient(one.address) as here, TrainerClient(other.address) as there:
            here.register_files(MODEL, source.files)
            here.push_folder(MODEL, source.folder, step=1).wait(timeout=60)
            there.push_folder(MODEL, source.folder, step=2).wait(timeout=60)
            there.delete_version(MODEL, 1)
            assert here.version(MODEL, 1).error
            clock = Clock()
            clock.ms += 2 * GRACE_MS
            other.service.catalog.readers.clock = clock
            assert [v.number for v in there.collect(MODEL).deleted] == [1]
            for ask in (here.version, EngineClient(one.address).pull, here.model_files):
                with pytest.raises(NotFound, match="deleted"):
                    ask(MODEL, 1)  # type: ignore[operator]
            assert [v.number for v in here.versions(MODEL, include_invisible=True)] == [2]
            assert here.refs(MODEL) == {"latest": 2, "live": 2}


def eighths(bench: Bench, count: int) -> Iterator[None]:
    """Let an eighth of the grace time pass this many times; each time leases are renewed and versions collected."""
    for _ in range(count):
        yield
        bench.clock.ms += GRACE_MS // 8
        bench.service.catalog.readers.renew()
        bench.trainer.collect(MODEL)


def test_a_stream_of_any_length_is_not_disturbed(bench: Bench) -> None:
    bench.add(2)
    bench.trainer.set_retention(MODEL, Retention(keep_last=1))
    whole = b"".join(bench.engine.pull(MODEL, 1).stream())
    asked = model_request(bench.engine, 1)
    reading = bench.service.serving.pull(*asked)
    pieces = reading.pieces()
    found = bytes(next(pieces).data)
    for _ in eighths(bench, 40):
        assert bench.stored() == {1, 2}
    resumed = bench.service.serving.pull(*asked[:3], len(found) // 2)
    assert b"".join(bytes(piece.data) for piece in resumed.pieces()) == whole[len(found) // 2 :]
    assert found + b"".join(bytes(piece.data) for piece in pieces) == whole
    for _ in eighths(bench, 12):
        pass
    assert bench.stored() == {2}, "it is over"
    with pytest.raises(NotFound):
        bench.service.serving.pull(*asked)


def model_request(engine: EngineClient, number: int) -> tuple[Any, ...]:
    from weighbridge import FullTensors

    return MODEL, str(number), FullTensors(), 0


def test_quick_pulls_write_nothing(bench: Bench) -> None:
    bench.add(2)
    keys = set(bench.service.catalog.store.list(""))
    for number in (1, 2):
        assert_equal(bench.engine, MODEL, number, bench.source(number).arrays)
        for file in ("config.json", "model.safetensors"):
            assert bench.http.get(f"/{MODEL}/resolve/{number}/{file}").status_code == 200
    assert set(bench.service.catalog.store.list("")) == keys


def test_a_download_file_by_file_goes_on_when_its_version_is_retired(bench: Bench) -> None:
    bench.add(2)
    commit = bench.http.get(f"/api/models/{MODEL}/revision/1").json()["sha"]
    file = f"/{MODEL}/resolve/{commit}/model.safetensors"
    whole = bench.http.get(file).content
    bench.trainer.set_retention(MODEL, Retention(keep_last=1))
    for n, _ in enumerate(eighths(bench, 40)):
        response = bench.http.get(file, headers={"Range": f"bytes={n}-{n + 9}"})
        assert (response.status_code, response.content) == (206, whole[n : n + 10])
        assert bench.http.get(f"/{MODEL}/resolve/1/config.json").status_code == 200
    for _ in eighths(bench, 14):
        pass
    assert bench.stored() == {2}
    for revision in (commit, "1"):
        gone = bench.http.get(f"/{MODEL}/resolve/{revision}/model.safetensors")
        assert (gone.status_code, gone.headers["X-Error-Code"]) == (404, "RevisionNotFound")
    assert bench.http.get(f"/api/models/{MODEL}").json()["sha"] != commit


def test_a_reader_that_comes_too_late_is_told_that_the_version_was_deleted(local: Bench) -> None:
    """The objects are deleted between the reader's read of the head and its read of them."""
    local.add(2)
    local.trainer.delete_version(MODEL, 1)
    store = local.service.catalog.store
    for key in list(store.list(version_prefix(ModelName.parse(MODEL), 1))):
        store.delete(key)
    commit = f"{'0' * 30}{1:010x}"
    for ask in (local.trainer.model_files, local.trainer.verify):
        with pytest.raises(NotFound, match="was deleted"):
            ask(MODEL, 1)  # type: ignore[operator]
    with pytest.raises(NotFound, match="was deleted"):
        list(local.engine.pull(MODEL, 1).stream())
    for revision in (commit, "1"):
        gone = local.http.get(f"/{MODEL}/resolve/{revision}/config.json")
        assert (gone.status_code, gone.headers["X-Error-Code"]) == (404, "RevisionNotFound")


def test_a_service_collects_by_itself_and_leaves_readers_alone(tmp_path: Path) -> None:
    with running_service(tmp_path / "store", collect_every=0.1, grace_seconds=1.0) as running:
        source = tiny_folder(tmp_path / "hf")
        with TrainerClient(running.address) as trainer:
            trainer.register_files(MODEL, source.files)
            for step in (1, 2, 3):
                trainer.push_folder(MODEL, source.folder, step=step).wait(timeout=60)
            reading = running.service.serving.pull(*model_request(EngineClient(running.address), 2))
            trainer.set_retention(MODEL, Retention(keep_last=1))
            model, store = ModelName.parse(MODEL), running.service.catalog.store
            eventually(lambda: not list(store.list(version_prefix(model, 1))))
            end = time.monotonic() + 2.5
            while time.monotonic() < end:
                assert list(store.list(version_prefix(model, 2))), "it is being read"
                time.sleep(0.05)
            reading.close()
            eventually(lambda: not list(store.list(version_prefix(model, 2))))
            eventually(lambda: not list(store.list(model.prefix + "leases/")))
            eventually(lambda: running.service.catalog.history(model).retired() == {})
            assert [v.number for v in trainer.versions(MODEL)] == [3]


def test_one_model_that_cannot_be_collected_stops_no_other(local: Bench) -> None:
    local.add(2)
    local.trainer.set_retention(MODEL, Retention(keep_last=1))
    local.service.catalog.store.put("models/aaa/damaged/head.json", b"{", mode="create")
    local.service.collecting.collect_all()
    local.clock.ms += GRACE_MS
    local.service.collecting.collect_all()
    assert local.stored() == {2}
    assert local.service.collecting.failures == 2


# -- invalid requests ----------------------------------------------------------------------------------------------------


def test_what_a_ref_names_and_what_is_not_there_cannot_be_deleted(local: Bench) -> None:
    local.add(3)
    local.trainer.set_ref(MODEL, "prod", 1)
    with RawClient(local.running.address) as raw:
        opened = raw.open(MODEL)
        for number, error, says in (
            (3, FailedPrecondition, "latest"),
            (1, FailedPrecondition, "prod"),
            (opened, FailedPrecondition, "still being received"),
            (99, NotFound, "no version 99"),
            (2**40, NotFound, "no version"),
            (2**63, NotFound, "no version"),
        ):
            with pytest.raises(error, match=says):
                local.trainer.delete_version(MODEL, number)
        for number in (0, -1, 2**64):
            with pytest.raises(InvalidArgument):
                local.trainer.delete_version(MODEL, number)
        with pytest.raises(NotFound):
            raw.call(raw.models.DeleteVersion, model_service_pb2.DeleteVersionRequest(model=MODEL))
    assert [v.number for v in local.trainer.versions(MODEL)] == [3, 2, 1]


def test_unknown_models_and_impossible_rules_are_refused(local: Bench) -> None:
    for name, error in (("acme/none", NotFound), ("none", InvalidArgument), ("../x", InvalidArgument)):
        for ask in (
            local.trainer.retention,
            lambda model: local.trainer.set_retention(model, Retention(keep_last=1)),
            local.trainer.collect,
            lambda model: local.trainer.collect(model, dry_run=True),
            lambda model: local.trainer.delete_version(model, 1),
        ):
            with pytest.raises(error):
                ask(name)
    with RawClient(local.running.address) as raw:
        for rule in ("keep_last", "keep_every", "keep_younger_s", "keep_every_steps"):
            message = resources_pb2.Retention(**{rule: 2**60})
            request = model_service_pb2.SetRetentionRequest(model=MODEL, retention=message)
            with pytest.raises(InvalidArgument, match=rule):
                raw.call(raw.models.SetRetention, request)
    assert local.trainer.retention(MODEL) == Retention()


@pytest.mark.parametrize(
    "body",
    [
        '{"keep_last": -1}', '{"keep_last": 1.5}', '{"keep_last": "3"}', '{"keep_last": null}', '{"keep_last": true}',
        '{"keep_every": 1e400}', '{"keep_younger_s": 9007199254740993}', '{"keep_lots": 1}', "[]", "3", "", "{",
    ],
)  # fmt: skip
def test_rules_over_http_that_make_no_sense_are_refused(local: Bench, body: str) -> None:
    response = local.http.put(
        f"/v1/models/{MODEL}/retention", content=body, headers={"Content-Type": "application/json"}
    )
    assert response.status_code == 400, response.text
    assert response.headers["content-type"] == "application/problem+json"
    assert local.trainer.retention(MODEL) == Retention()


def test_retention_over_http(bench: Bench) -> None:
    bench.add(3)
    url = f"/v1/models/{MODEL}"
    rules = {"keep_last": 0, "keep_every": 0, "keep_younger_s": 0, "keep_every_steps": 0}
    assert bench.http.get(f"{url}/retention").json() == rules
    assert bench.http.put(f"{url}/retention", json={"keep_last": 2}).json() == rules | {"keep_last": 2}
    assert bench.http.get(f"{url}/retention").json() == rules | {"keep_last": 2}
    assert bench.http.put(f"{url}/retention", json={"keep_last": 2.0}).json() == rules | {"keep_last": 2}
    planned = bench.http.post(f"{url}/collect", json={"dry_run": True}).json()
    done = bench.http.post(f"{url}/collect", json={"dry_run": False}).json()
    assert done == planned | {"dry_run": False}
    assert done["retired"] == [1]
    assert done["kept"][-1] == {"number": 3, "rules": ["keep_last"], "refs": ["latest"], "engines": []}
    deleted = bench.http.delete(f"{url}/versions/2")
    assert (deleted.status_code, deleted.json()["number"]) == (200, 2)
    bench.clock.ms += GRACE_MS
    done = bench.http.post(f"{url}/collect", json={"dry_run": False}).json()
    assert [version["number"] for version in done["deleted"]] == [1, 2]
    assert bench.stored() == {3}
    for number, status in (
        ("3", 409),
        ("2", 404),
        ("7", 404),
        ("latest", 400),
        ("0", 400),
        ("-1", 400),
        ("9" * 30, 400),
    ):
        refused = bench.http.delete(f"{url}/versions/{number}")
        assert refused.status_code == status, (number, refused.text)
        assert refused.headers["content-type"] == "application/problem+json"
    assert bench.http.post(f"{url}/collect", json={"dry": True}).status_code == 400
    # nothing is deleted without an explicit setting
    for body in (None, {}, {"dry_run": "yes"}, {"dry_run": 1}):
        assert bench.http.post(f"{url}/collect?dry_run=true", json=body).status_code == 400
    assert bench.http.post("/v1/models/acme/none/collect", json={"dry_run": True}).status_code == 404


def test_rules_for_training_states_are_set_beside_those_of_the_weights(local: Bench) -> None:
    training = f"{MODEL}:training"
    both = local.cli(
        "retention", MODEL, "--keep-last", 4, "--keep-training-last", 2, "--keep-training-every-numbers", 500
    )
    assert both.output.splitlines() == [
        f"{MODEL}: keeps the last 4, what refs name or engines serve",
        f"{training}: keeps the last 2, one of every 500 numbers, what refs name or engines serve",
    ]
    assert local.trainer.retention(MODEL) == Retention(4)
    assert local.trainer.retention(training) == Retention(2, 500)
    one = json.loads(local.cli("retention", MODEL, "--keep-training-last", 7, json=True).output)
    assert (one["keep_last"], one["training"]["model"], one["training"]["keep_last"]) == (4, training, 7)
    assert local.trainer.retention(MODEL) == Retention(4), "those of the weights stay"
    assert local.trainer.retention(training) == Retention(7)
    assert local.cli("retention", training, "--keep-training-last", 1).exit_code == 2
    assert local.cli("retention", MODEL, "--keep-everything", "--keep-training-last", 1).exit_code == 2


def test_the_command_line_says_whether_it_counts_steps_or_numbers(local: Bench) -> None:
    steps = local.cli("retention", MODEL, "--keep-every-steps", 100, "--keep-training-every-steps", 1000)
    assert steps.output.splitlines() == [
        f"{MODEL}: keeps one of every 100 steps, what refs name or engines serve",
        f"{MODEL}:training: keeps one of every 1000 steps, what refs name or engines serve",
    ]
    assert local.trainer.retention(MODEL) == Retention(keep_every_steps=100)
    assert local.http.get(f"/v1/models/{MODEL}/retention").json()["keep_every_steps"] == 100
    said = local.cli("retention", MODEL, "--keep-every-numbers", 100).output
    assert said == f"{MODEL}: keeps one of every 100 numbers, what refs name or engines serve\n"
    assert local.trainer.retention(MODEL) == Retention(keep_every=100)


def test_retention_on_the_command_line(local: Bench) -> None:
    local.add(4)
    shown = local.cli("retention", MODEL)
    assert (shown.exit_code, shown.output) == (0, f"{MODEL}: keeps everything\n")
    said = local.cli("retention", MODEL, "--keep-last", 1, "--keep-every-numbers", 2, "--keep-younger", "7d")
    assert said.output == (
        f"{MODEL}: keeps the last 1, one of every 2 numbers, those younger than 7 d, what refs name or engines serve\n"
    )
    assert local.trainer.retention(MODEL) == Retention(1, 2, 7 * 86400)
    assert local.cli("retention", MODEL).output == said.output
    assert json.loads(local.cli("retention", MODEL, "--keep-last", "1", json=True).output) == {
        "model": MODEL, "keep_last": 1, "keep_every": 0, "keep_younger_s": 0, "keep_every_steps": 0,
    }  # fmt: skip
    assert json.loads(local.cli("collect", MODEL, "--dry-run", json=True).output)["retired"] == [1, 2, 3]
    assert "nothing was changed" in local.cli("collect", MODEL, "--dry-run").output
    assert json.loads(local.cli("retention", MODEL, "--keep-everything", json=True).output)["keep_last"] == 0
    assert local.trainer.retention(MODEL) == Retention()
    assert local.cli("delete", f"{MODEL}@2").output == f"{MODEL}: version 2 is deleted\n"
    assert json.loads(local.cli("delete", f"{MODEL}@1", json=True).output) == {"model": MODEL, "number": 1}
    waiting = local.cli("collect", MODEL)
    assert "the grace time, until" in waiting.output
    local.clock.ms += GRACE_MS
    collected = local.cli("collect", MODEL)
    assert collected.exit_code == 0
    lines = [line.split() for line in collected.output.splitlines()]
    assert [line[:2] for line in lines[1:-1]] == [
        ["3", "kept"],
        ["4", "kept"],
        ["1", "deleted"],
        ["2", "deleted"],
    ]
    assert lines[-1][1:4] == ["2", "versions", "deleted,"]
    assert local.stored() == {3, 4}


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        (["retention", MODEL, "--keep-last", "0"], 2, "keep-last"),
        (["retention", MODEL, "--keep-last", "-1"], 2, "keep-last"),
        (["retention", MODEL, "--keep-last", str(2**60)], 1, "keep_last"),
        (["retention", MODEL, "--keep-younger", "soon"], 2, "not a time"),
        (["retention", MODEL, "--keep-younger", "0d"], 2, "not a time"),
        (["retention", MODEL, "--keep-younger", "7"], 2, "with a unit"),
        (["retention", MODEL, "--keep-everything", "--keep-last", "1"], 2, "excludes all other rules"),
        (["retention", "acme/none"], 1, "there is no model"),
        (["collect", "acme/none"], 1, "there is no model"),
        (["delete", MODEL], 2, "--yes"),
        (["delete", f"{MODEL}@latest"], 2, "is not a version number"),
        (["delete", f"{MODEL}@1"], 1, "latest"),
        (["delete", f"{MODEL}@9"], 1, "no version 9"),
    ],
)
def test_commands_that_make_no_sense_say_why(local: Bench, line: list[str], code: int, says: str) -> None:
    local.add()
    result = local.cli(*line)
    assert (result.exit_code, says in result.output) == (code, True), result.output
    assert local.trainer.retention(MODEL) == Retention()
    assert [v.number for v in local.trainer.versions(MODEL)] == [1]


def test_times_have_units() -> None:
    assert [parse_duration(text) for text in ("90s", "30m", "12h", "7d", "2w", "7 D")] == [
        90, 1800, 43_200, 604_800, 1_209_600, 604_800,
    ]  # fmt: skip
    for text in ("", "d", "-1d", "0", "90", "1.5h", "1y", "1dd", "٣d"):
        with pytest.raises(InvalidArgument, match="is not a time"):
            parse_duration(text)


def test_a_grace_time_that_is_none_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(WeighbridgeError, match="grace"):
        RunningService(tmp_path / "store", grace_seconds=0.0)
