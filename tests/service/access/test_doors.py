"""Does each entry point identify its caller, for as long as the credential is valid, and is that audited?"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import numpy as np
import pytest

from tests.service.access.test_tls import https
from tests.service.api.http.hub.endpoint import CLIENT_PYTHON
from tests.support.identities import TokenIssuer, identity, policy_file
from tests.support.raw_clients import TinyModel, tiny_folder
from tests.support.services import RunningService, running_service
from tests.support.waiting import eventually
from weighbridge import (
    Client,
    Credentials,
    EngineClient,
    PermissionDenied,
    TrainerClient,
    Unauthenticated,
    Unavailable,
)
from weighbridge._cli import main
from weighbridge._core.operations.verbs import Verb
from weighbridge.v1 import checkpoint_service_pb2 as pb
from weighbridge.v1 import checkpoint_service_pb2_grpc
from weighbridge_service.access.audit import Audit
from weighbridge_storage.threads import ThreadPool

MODEL = "acme/smol"
TRAINER, ENGINE, RELEASES, STRANGER = (
    Credentials(token=f"token-of-{name}") for name in ("trainer", "engine", "releases", "stranger")
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return tiny_folder(tmp_path_factory.mktemp("hf") / "model")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, source: TinyModel) -> Iterator[RunningService]:
    """A service with one model and one version, whose policy gives each identity its own scopes."""
    folder = tmp_path_factory.mktemp("doors")
    policy = policy_file(
        folder,
        identity("trainer", ["push:acme/*"], token="token-of-trainer"),
        identity("engine", ["pull:acme/*"], token="token-of-engine"),
        identity("releases", ["tag:acme/smol@prod", "approve:acme/smol", "observe"], token="token-of-releases"),
        identity("stranger", ["push:else/*", "pull:else/*"], token="token-of-stranger", users=[os.getuid()]),
    )
    with running_service(
        folder / "store",
        policy=policy,
        audit=folder / "audit.jsonl",
        local_socket=str(folder / "lane.sock"),
        bulk_port="auto",
    ) as service:
        with TrainerClient(service.address, credentials=TRAINER) as trainer:
            trainer.register_model(MODEL, source.folder)
            trainer.push_folder(MODEL, source.folder, step=1).wait(timeout=60)
        yield service


def entries(running: RunningService, **wanted: str) -> list[Mapping[str, Any]]:
    """Lines of the audit log that contain these values."""
    audit = running.service.config.audit
    assert audit is not None
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    return [line for line in lines if all(line[key] == value for key, value in wanted.items())]


@pytest.mark.parametrize("lane", ["grpc", "local"])
def test_who_may_push_pushes_and_who_may_pull_pulls_by_either_lane(
    running: RunningService, source: TinyModel, lane: str
) -> None:
    with TrainerClient(running.address, lane=lane, credentials=TRAINER) as trainer:
        pushed = trainer.push_folder(MODEL, source.folder, step=2).wait(timeout=60)
        with pytest.raises(PermissionDenied, match=f"trainer may not pull {MODEL}"):
            dict(EngineClient(running.address, lane=lane, credentials=TRAINER).pull(MODEL))
    with EngineClient(running.address, lane=lane, credentials=ENGINE) as engine:
        pulled = {name: tensor.numpy() for name, tensor in engine.pull(MODEL, pushed.number)}
        assert all(np.array_equal(pulled[name], array) for name, array in source.arrays.items())
    with (
        TrainerClient(running.address, lane=lane, credentials=ENGINE) as trainer,
        pytest.raises(PermissionDenied, match=f"engine may not push {MODEL}"),
    ):
        trainer.push_folder(MODEL, source.folder, step=3).wait(timeout=60)
    face = "lane" if lane == "local" else "grpc"
    assert entries(running, identity="engine", face=face, verb="pull", model=MODEL, result="OK")


def test_on_the_lane_a_client_is_who_it_showed_itself_to_be_over_grpc(
    running: RunningService, source: TinyModel
) -> None:
    with (
        EngineClient(running.address, lane="local", credentials=STRANGER) as engine,
        pytest.raises(PermissionDenied, match="stranger may not"),
    ):
        dict(engine.pull(MODEL))


def test_a_tag_is_moved_by_those_alone_who_have_its_scope(running: RunningService) -> None:
    for shown in (TRAINER, ENGINE, STRANGER):
        with Client(running.address, credentials=shown) as client, pytest.raises(PermissionDenied) as refused:
            client.set_ref(MODEL, "prod", 1)
        assert f"tag:{MODEL}@prod" in refused.value.fix
    with Client(running.address, credentials=RELEASES) as client:
        client.set_ref(MODEL, "prod", 1)
        with pytest.raises(PermissionDenied):
            client.set_ref(MODEL, "staging", 1)
    assert len(entries(running, action="SetRef", ref="prod", result="PERMISSION_DENIED")) == 3
    assert entries(running, action="SetRef", ref="prod", result="OK", identity="releases", face="grpc")


def test_an_approval_says_who_has_given_it_whatever_they_call_themselves(
    running: RunningService, source: TinyModel
) -> None:
    with TrainerClient(running.address, credentials=TRAINER) as trainer:
        held = trainer.push_folder(MODEL, source.folder, step=4, candidate=True).wait(timeout=60)
    with Client(running.address, credentials=RELEASES) as client:
        approved = client.approve(MODEL, held.number, by="the boss", note="fine")
        assert (approved.approved_by, approved.approved_note) == ("releases", "fine")


def test_lists_hold_what_the_caller_may_look_at(running: RunningService) -> None:
    for shown, names in ((ENGINE, [MODEL]), (STRANGER, []), (RELEASES, [MODEL])):
        with Client(running.address, credentials=shown) as client:
            assert [model.name for model in client.models()] == names


_HUB = """
import json, sys
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

api, found = HfApi(), []
for call in (lambda: api.model_info(sys.argv[1]).id, api.whoami, lambda: api.hf_hub_download(sys.argv[1], "config.json", local_dir=sys.argv[2])):
    try:
        found.append(call())
    except HfHubHTTPError as error:
        found.append(error.response.status_code)
        break
print(json.dumps(found))
"""


def test_hugging_faces_clients_show_their_token_as_ever(running: RunningService, tmp_path: Path) -> None:
    def asked(token: str) -> list[Any]:
        environment = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": url, "HF_TOKEN": token}
        environment |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        folder = str(tmp_path / token)
        program = [CLIENT_PYTHON, "-W", "ignore", "-c", _HUB, MODEL, folder]
        return list(json.loads(subprocess.check_output(program, env=environment, text=True)))

    with https(running) as url:
        model, who, path = asked("token-of-engine")
        assert (who["name"], model) == ("engine", MODEL)
        assert json.loads(Path(path).read_text())["model_type"] == "qwen3"
        assert asked("token-of-stranger") == [403]
        assert asked("wrong") == [401]
    assert entries(running, face="http", action="file", identity="engine", result="OK")


def test_doctor_shows_its_token(
    running: RunningService, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with https(running) as url:
        monkeypatch.setenv("WEIGHBRIDGE_TOKEN", "token-of-engine")
        assert main(["doctor", "--http", url]) == 1
        assert "observe" in capsys.readouterr().out
        monkeypatch.setenv("WEIGHBRIDGE_TOKEN", "token-of-releases")
        main(["doctor", "--http", url])
        assert "one answers" in capsys.readouterr().out


def test_nothing_secret_is_written_down(running: RunningService) -> None:
    audit = running.service.config.audit
    assert audit is not None
    wrong = Credentials(token="wrong-and-secret")
    with Client(running.address, credentials=wrong) as client, pytest.raises(Unauthenticated):
        client.models()
    text = audit.read_text()
    assert entries(running, result="UNAUTHENTICATED")
    assert "secret" not in text
    assert "token-of" not in text


def test_what_cannot_be_written_down_is_refused_before_it_is_done(tmp_path: Path, source: TinyModel) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    policy = policy_file(
        tmp_path,
        identity("root", ["admin"], token="token-of-root", users=[os.getuid()]),
        identity("engine", [f"look:{MODEL}"], token="token-of-engine"),
    )
    root = Credentials(token="token-of-root")
    with (
        running_service(
            tmp_path / "store",
            policy=policy,
            audit=logs / "audit.jsonl",
            local_socket=str(tmp_path / "lane.sock"),
            bulk_port="auto",
        ) as service,
        https(service) as url,
        TrainerClient(service.address, credentials=root, retry_seconds=0.2) as trainer,
    ):
        trainer.import_folder(MODEL, source.folder, step=1).wait(timeout=60)
        trainer.set_ref(MODEL, "prod", 1)
        logs.rename(tmp_path / "gone")
        for _ in range(2):
            with pytest.raises(Unavailable, match="audit log cannot be written: No such file or directory"):
                trainer.delete_ref(MODEL, "prod")
            answer = httpx.delete(
                f"{url}/v1/models/{MODEL}/refs/prod", headers={"authorization": "Bearer token-of-root"}
            )
            assert (answer.status_code, "audit log" in answer.text) == (503, True)
            for lane in ("local", "grpc"):
                with (
                    EngineClient(service.address, lane=lane, credentials=root, retry_seconds=0.2) as engine,
                    pytest.raises(Unavailable, match="audit log"),
                ):
                    list(engine.pull(MODEL))
            with (
                Client(service.address, credentials=ENGINE) as engine,
                pytest.raises(PermissionDenied),
            ):
                engine.delete_ref(MODEL, "prod")
            assert trainer.refs(MODEL)["prod"] == 1, "who looks is answered, and sees that nothing was done"
        logs.mkdir()
        trainer.delete_ref(MODEL, "prod")
        lines = [json.loads(line) for line in (logs / "audit.jsonl").read_text().splitlines()]
        assert [each["result"] for each in lines if each["identity"] == "engine"] == ["PERMISSION_DENIED"] * 2
        assert (lines[-1]["action"], lines[-1]["result"]) == ("DeleteRef", "OK")


def test_a_full_disk_loses_no_line_and_lets_nothing_be_done(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.symlink_to("/dev/full")
    audit = Audit(path)
    said = {"face": "grpc", "host": "h", "identity": "me", "model": MODEL, "ref": "", "result": "OK"}
    audit.record(action="SetRef", verb=Verb.TAG, **said)  # of what was under way
    with pytest.raises(Unavailable, match="audit log cannot be written: No space left"):
        audit.check(Verb.TAG)
    audit.check(Verb.LOOK)
    path.unlink()
    audit.check(Verb.TAG)
    audit.record(action="DeleteRef", verb=Verb.TAG, **said)
    assert [json.loads(line)["action"] for line in path.read_text().splitlines()] == ["SetRef", "DeleteRef"]
    audit.close()


def test_a_stream_ends_with_its_token_and_goes_on_with_the_next_one(tmp_path: Path, source: TinyModel) -> None:
    issuer = TokenIssuer(tmp_path / "issuer")
    policy = policy_file(
        tmp_path,
        issuer.table,
        identity("trainer", ["push", "tag"], token="trainers"),
        identity("engine", ["pull"], subjects=["test|engine"]),
    )
    shown = tmp_path / "token"
    shown.write_text(issuer.token("engine", seconds=-27))  # 30 s of clock skew are allowed
    with (
        running_service(tmp_path / "store", policy=policy, policy_look=0.0, standing_look=0.2) as running,
        TrainerClient(running.address, credentials=Credentials(token="trainers")) as trainer,
        EngineClient(running.address, credentials=Credentials(token_file=str(shown))) as engine,
    ):
        trainer.register_model(MODEL, source.folder)
        trainer.push_folder(MODEL, source.folder, step=1).wait(timeout=60)
        heard: queue.SimpleQueue[int | Exception] = queue.SimpleQueue()

        def watch() -> None:
            try:
                for version in engine.watch(MODEL):
                    heard.put(version.number)
            except Exception as error:
                heard.put(error)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        assert heard.get(timeout=20) == 1
        shown.write_text(issuer.token("engine"))  # a new token, shortly before the old one expires
        ended = b'weighbridge_grpc_calls_total{code="UNAVAILABLE",method="WatchRefs"}'
        eventually(lambda: ended in running.metrics.text())
        trainer.push_folder(MODEL, source.folder, step=2).wait(timeout=60)
        assert heard.get(timeout=20) == 2
        policy.write_text(identity("trainer", ["push", "tag"], token="trainers"))
        assert isinstance(heard.get(timeout=20), Unauthenticated), "its identity was taken away"
        thread.join(20)


def test_a_new_token_is_one_that_the_policy_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["token", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    policy = policy_file(tmp_path, f'[[identity]]\nname = "a"\nmay = ["pull"]\ntokens = ["{made["digest"]}"]\n')
    with (
        running_service(tmp_path / "store", policy=policy) as running,
        Client(running.address, credentials=Credentials(token=made["token"])) as client,
    ):
        assert client.models() == []


def test_a_push_that_may_not_be_is_refused_without_a_thread_of_those_for_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = policy_file(tmp_path, identity("engine", ["pull"], token="engines"))
    with running_service(tmp_path / "store", policy=policy) as running:
        taken = list[str]()
        submit = ThreadPool.submit

        def noting(pool: ThreadPool, *said: Any) -> Any:
            taken.append(pool._name)
            return submit(pool, *said)

        monkeypatch.setattr(ThreadPool, "submit", noting)
        message = pb.PushRequest(header=pb.PushHeader(model=MODEL, number=1))
        with grpc.insecure_channel(running.address) as channel:
            push = checkpoint_service_pb2_grpc.CheckpointServiceStub(channel).Push
            with pytest.raises(grpc.RpcError) as refused:
                push(iter([message]), metadata=[("authorization", "Bearer engines")], timeout=60)
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED  # type: ignore[attr-defined]
        assert "grpc-stream" not in taken
