"""Is what the Hub endpoint offers durable, of one model, and named by one commit?"""

from __future__ import annotations

import re
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from httpx2 import URL
from safetensors.torch import load_file

from tests.service.api.http.hub.endpoint import MODEL, WEIGHTS, Endpoint, endpoint_of
from tests.support.reference import tiny_config, tiny_model
from tests.support.s3_server import S3Server
from tests.support.services import running_service
from tests.support.waiting import eventually
from weighbridge import TrainerClient
from weighbridge._core.resources import VersionState
from weighbridge.errors import DeadlineExceeded, Unavailable
from weighbridge_service.api.http.hub_routes import HubSizes
from weighbridge_service.push import publisher


def test_a_version_that_is_only_ready_is_not_offered(
    endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Event()

    def fails(*_: Any) -> None:
        asked.wait(60)
        raise Unavailable("the store is away")

    name = "tests/ready"
    folder = tmp_path / "hf"
    tiny_model(tiny_config("llama", tied=False), 3).save_pretrained(folder)
    with TrainerClient(endpoint.running.address) as trainer:
        trainer.register_model(name, folder)
        with monkeypatch.context() as patch:
            patch.setattr(publisher, "write_weights", fails)
            number = trainer.push_folder(name, folder, step=1).number
            trainer.wait_for(name, number, VersionState.READY, timeout=20)
            assert trainer.refs(name) == {"live": number}
            for revision in ("main", "latest", "live", str(number), f"{number:040x}"):
                for path in (
                    f"api/models/{name}/revision/{revision}",
                    f"{name}/resolve/{revision}/config.json",
                ):
                    answer = endpoint.http.get(path)
                    assert (answer.status_code, answer.headers["x-error-code"]) == (404, "RevisionNotFound")
            assert endpoint.http.get(f"api/models/{name}/refs").json()["branches"] == []
            asked.set()
            eventually(lambda: endpoint.running.service.catalog.snapshots.not_durable)
            with pytest.raises(DeadlineExceeded, match="the store is away"):
                trainer.wait_for(name, number, VersionState.DURABLE, timeout=1)
        durable = trainer.push_folder(name, folder, step=2).wait(timeout=20).number
    found = endpoint.http.get(f"api/models/{name}").json()
    assert int(found["sha"][-10:], 16) == durable == number + 1


def test_a_commit_stands_for_one_version_of_one_model(endpoint: Endpoint) -> None:
    one, two = endpoint.sha("1"), endpoint.sha("2")
    assert one != two
    assert re.fullmatch(r"[0-9a-f]{40}", one)
    assert endpoint.sha(one) == one
    mixed = two[:30] + one[30:]
    for revision in (mixed, one.upper(), one[:39], one + "0"):
        answer = endpoint.http.get(f"/{MODEL}/resolve/{revision}/config.json")
        assert (answer.status_code, answer.headers["x-error-code"]) == (404, "RevisionNotFound")


def test_a_tag_called_main_is_what_clients_get_unasked(endpoint: Endpoint) -> None:
    with TrainerClient(endpoint.running.address) as trainer:
        trainer.set_ref(MODEL, "main", 1)
        try:
            assert endpoint.http.get(f"/api/models/{MODEL}").json()["sha"] == endpoint.sha("1")
            assert endpoint.sha("latest") == endpoint.sha("2")
            refs = endpoint.http.get(f"/api/models/{MODEL}/refs").json()
            assert [ref["targetCommit"] for ref in refs["branches"]] == [endpoint.sha("1"), endpoint.sha("2")]
        finally:
            trainer.delete_ref(MODEL, "main")
    assert endpoint.http.get(f"/api/models/{MODEL}").json()["sha"] == endpoint.sha("2")


def test_versions_on_s3_are_offered_too(seaweed: S3Server, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    tiny_model(tiny_config("llama", tied=False), 4).save_pretrained(folder)
    with running_service(seaweed.location(), scratch=tmp_path / "scratch") as running:
        with TrainerClient(running.address) as trainer:
            trainer.register_model(MODEL, folder)
            trainer.push_folder(MODEL, folder, step=1).wait(timeout=60)
        with endpoint_of(running, HubSizes(read=100_000)) as endpoint:
            http, url = endpoint.http, f"/{MODEL}/resolve/main/{WEIGHTS}"
            (tmp_path / WEIGHTS).write_bytes(whole := http.get(url).content)
            assert http.get(url, headers={"range": "bytes=99999-250001"}).content == whole[99_999:250_002]
            config = (folder / "config.json").read_bytes()
            assert http.get(f"/{MODEL}/resolve/1/config.json").content == config
    expected = load_file(folder / WEIGHTS)
    found = load_file(tmp_path / WEIGHTS)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("forwarded", "scheme"),
    [(None, "http"), ("http", "http"), ("https", "https"), ("HTTPS", "https"), ("https, http", "https")],
)
def test_who_asks_by_tls_is_sent_on_by_tls(small_pieces: Endpoint, forwarded: str | None, scheme: str) -> None:
    asked = {"host": "hub.internal", **({} if forwarded is None else {"x-forwarded-proto": forwarded})}
    answer = small_pieces.http.get(f"/api/models/{MODEL}/tree/1", headers=asked)
    where = URL(answer.links["next"]["url"])
    assert (where.scheme, where.host, where.params["cursor"]) == (scheme, "hub.internal", "config.json")
