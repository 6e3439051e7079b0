"""Do pushes, readers, watches, other replicas and caches handle the deletion of a model by a running service?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Event

import pytest
from starlette.testclient import TestClient

from tests.support.raw_clients import TinyModel, assert_equal, tiny_folder
from tests.support.services import RunningService, running_service
from tests.support.waiting import eventually
from weighbridge import EngineClient, TrainerClient
from weighbridge._core.resources import VersionState
from weighbridge.errors import FailedPrecondition, NotFound, VersionFailed
from weighbridge_service.api.http.app import create_app
from weighbridge_service.exports.jobs import Exports
from weighbridge_service.fsck.repair import check_store
from weighbridge_service.push import publisher
from weighbridge_service.push.machine.events import Broken
from weighbridge_storage.documents.names import ModelName

MODEL = "acme/wrong"


@pytest.fixture
def narrow(tmp_path: Path) -> TinyModel:
    return tiny_folder(tmp_path / "narrow")


@pytest.fixture
def wide(tmp_path: Path) -> TinyModel:
    """A model of other tensors."""
    return tiny_folder(tmp_path / "wide", hidden_size=48)


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[list[RunningService]]:
    """Two services over one store."""
    with ExitStack() as stack:
        yield [stack.enter_context(running_service(tmp_path / "store")) for _ in range(2)]


def push(running: RunningService, source: TinyModel, step: int = 1) -> int:
    with TrainerClient(running.address) as trainer:
        return trainer.import_folder(MODEL, source.folder, step=step).wait(timeout=60).number


def check_pulled(running: RunningService, source: TinyModel) -> None:
    with EngineClient(running.address) as engine:
        assert_equal(engine, MODEL, "latest", source.arrays)


def test_a_model_that_was_registered_wrongly_is_deleted_and_registered_anew_at_every_replica(
    replicas: list[RunningService], narrow: TinyModel, wide: TinyModel
) -> None:
    first, second = replicas
    assert push(first, narrow) == 1
    check_pulled(second, narrow)
    with pytest.raises(FailedPrecondition, match="registered already, with different tensors"):
        push(second, wide)
    with EngineClient(first.address) as client:
        deleted = client.delete_model(MODEL)
        assert (deleted.model, deleted.versions) == (MODEL, 1)
        for running in replicas:
            assert running.service.catalog.list_models() == []
            with pytest.raises(NotFound, match=f"no model {MODEL}"):
                running.service.catalog.resolve(ModelName.parse(MODEL), "latest")
        with pytest.raises(NotFound):
            client.delete_model(MODEL)
    # the first replica has deleted the model, the second one has the old tensors cached
    assert push(second, wide) == 2
    for running in replicas:
        check_pulled(running, wide)
        with EngineClient(running.address) as engine, pytest.raises(NotFound):
            engine.pull(MODEL, 1)


def test_a_repeated_request_does_not_delete_what_was_registered_since(
    replicas: list[RunningService], narrow: TinyModel, wide: TinyModel
) -> None:
    running = replicas[0]
    push(running, narrow)
    first = running.service.collecting.delete_model(MODEL, "request")
    assert push(replicas[1], wide) == 2
    for replica in replicas:  # a client whose answer was lost asks any of them
        assert replica.service.collecting.delete_model(MODEL, "request") == first
        check_pulled(replica, wide)


def test_no_replica_knows_a_deleted_model_s_versions_for_those_of_its_successor(
    replicas: list[RunningService], narrow: TinyModel, wide: TinyModel
) -> None:
    """One replica has the old version in memory; another one deletes the model, which is registered again with other
    tensors.
    """
    holder, other = replicas
    push(holder, narrow)
    name = ModelName.parse(MODEL)
    assert holder.service.catalog.snapshots.get(name, 1) is not None
    other.service.collecting.delete_model(MODEL)
    with TrainerClient(other.address) as trainer:
        trainer.register_model(MODEL, wide.folder)
    assert holder.service.catalog.refs(MODEL) == {}
    assert holder.service.catalog.list_versions(MODEL, include_invisible=True) == []
    with EngineClient(holder.address) as engine, pytest.raises(NotFound):
        engine.pull(MODEL, 1)
    with TrainerClient(holder.address) as trainer:  # the same run, step and client as before
        assert trainer.push_folder(MODEL, wide.folder, step=1).wait(timeout=60).number == 2
    holder.service.collecting.collect(MODEL)
    eventually(lambda: {holding.owner.number for holding in holder.service.memory().holdings} <= {2, 0})
    check_pulled(holder, wide)


def test_what_is_being_pushed_keeps_a_model_until_it_is_given_up(
    replicas: list[RunningService], narrow: TinyModel
) -> None:
    running = replicas[0]
    push(running, narrow)
    with TrainerClient(running.address) as trainer:
        number = running.service.intake.opener.open_version(
            MODEL, step=2, run="r", ranks=2, request_id="q", client_id="c"
        ).number
        with pytest.raises(FailedPrecondition, match=f"being received: {number}"):
            trainer.delete_model(MODEL)
        trainer.abort(MODEL, number)
        assert trainer.delete_model(MODEL).versions == 1
    running.service.collecting.collect(MODEL)
    assert not running.service.registry.of_model(ModelName.parse(MODEL))
    assert push(running, narrow, step=2) == number + 1, "the same run and step as before"


@pytest.mark.parametrize("failed", [False, True], ids=["aborted", "failed"])
def test_a_model_is_deleted_while_a_thread_still_closes_a_version_that_was_given_up(
    replicas: list[RunningService], narrow: TinyModel, failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, closing = replicas[0], Event()
    push(running, narrow)
    close = publisher.give_up
    monkeypatch.setattr(publisher, "give_up", lambda *call, **named: (closing.wait(30), close(*call, **named))[1])
    number = running.service.intake.opener.open_version(
        MODEL, step=2, run="r", ranks=2, request_id="q", client_id="c"
    ).number
    with TrainerClient(running.address) as trainer:
        if failed:
            session = running.service.registry.find(ModelName.parse(MODEL), number)
            assert session is not None
            session.post(Broken(VersionFailed("a fault")))
        else:
            trainer.abort(MODEL, number)
        assert trainer.delete_model(MODEL).versions == 1
        closing.set()
        assert push(running, narrow, step=2) == number + 1
    check_pulled(replicas[1], narrow)


def test_watches_end_and_images_are_given_back(replicas: list[RunningService], narrow: TinyModel) -> None:
    running = replicas[0]
    push(running, narrow)
    with EngineClient(running.address, lane="grpc") as engine:
        watch = engine.watch(MODEL, "latest")
        assert next(watch).state is VersionState.DURABLE
        engine.delete_model(MODEL)
        with pytest.raises(NotFound):
            next(watch)
    assert not any(holding.owner.number for holding in running.service.memory().holdings)


def test_fsck_finds_nothing_wrong_and_collections_leave_only_the_numbers(
    replicas: list[RunningService], narrow: TinyModel, tmp_path: Path
) -> None:
    running = replicas[0]
    push(running, narrow)
    running.service.collecting.delete_model(MODEL)
    clock = running.service.catalog.readers.clock
    running.service.catalog.readers.clock = lambda: clock() + running.service.config.grace.ms + 1
    report = running.service.collecting.collect(MODEL)
    assert [swept.number for swept in report.swept] == [1]
    (folder,) = (tmp_path / "store" / "models").glob("*/*")
    assert [path.name for path in folder.rglob("*") if path.is_file()] == ["head.json"]
    assert all(not found.findings for found in check_store(running.service.catalog.store))


@pytest.mark.parametrize("whole_model", [True, False])
def test_held_versions_that_another_replica_deletes_are_counted_no_more(
    replicas: list[RunningService], narrow: TinyModel, whole_model: bool
) -> None:
    receiver, other = replicas
    push(receiver, narrow)
    with TrainerClient(receiver.address) as trainer:
        for step in (2, 3):
            trainer.push_folder(MODEL, narrow.folder, step=step, candidate=True).wait(timeout=60)
    assert receiver.service.gates.held == 2
    with EngineClient(other.address) as client:
        if whole_model:
            client.delete_model(MODEL)
        else:
            client.delete_version(MODEL, 2)
    assert receiver.service.gates.held == (0 if whole_model else 1)


def test_over_http_a_model_is_deleted_likewise(replicas: list[RunningService], narrow: TinyModel) -> None:
    running = replicas[0]
    push(running, narrow)
    app = create_app(running.service, Exports(running.service), running.metrics, running.health)
    web = TestClient(app, raise_server_exceptions=False)
    running.service.intake.opener.open_version(MODEL, step=2, run="r", ranks=2, request_id="q", client_id="c")
    assert web.delete(f"/v1/models/{MODEL}").status_code == 400
    assert web.delete(f"/v1/models/{MODEL}", params={"confirm": "acme/other"}).status_code == 400
    meant = {"confirm": MODEL}
    assert web.delete(f"/v1/models/{MODEL}", params=meant).status_code == 409
    with TrainerClient(running.address) as trainer:
        trainer.abort(MODEL, 2)
    answer = web.delete(f"/v1/models/{MODEL}", params=meant)
    assert (answer.status_code, answer.json()) == (200, {"model": MODEL, "versions": 1})
    assert web.get(f"/v1/models/{MODEL}").status_code == 404
    assert web.delete(f"/v1/models/{MODEL}", params=meant).status_code == 404
