"""Do large files come from the store itself, with no secret given away and no reading ended early?"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import huggingface_hub
import pytest

from tests.service.api.http.hub.endpoint import CLIENT_PYTHON, MODEL, WEIGHTS, Endpoint, endpoint_of, is_copy
from tests.support import fault_proxy as fault_proxy_module
from tests.support.reference import tiny_config, tiny_model
from tests.support.s3_server import SECRET_KEY, S3Server
from tests.support.services import running_service
from tests.support.waiting import eventually
from weighbridge import TrainerClient
from weighbridge_service.api.http.hub_routes import HubSizes


@dataclass(frozen=True)
class Elsewhere:
    """A service on S3 that sends clients there for large files, by a name of S3 that only they use.

    Attributes:
        endpoint: the service.
        folder: the version's files.
        store_url: S3 as clients reach it.
        asked: headers of the requests that came to S3 under that name.
    """

    endpoint: Endpoint
    folder: Path
    store_url: str
    asked: list[dict[str, str]]


@pytest.fixture
def elsewhere(seaweed: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Elsewhere]:
    asked: list[dict[str, str]] = []
    forward = fault_proxy_module._Handler._forward

    def watched(self: Any, body: bytes) -> Any:
        asked.append({name.lower(): value for name, value in self.headers.items()})
        return forward(self, body)

    monkeypatch.setattr(fault_proxy_module._Handler, "_forward", watched)
    folder = tmp_path / "hf"
    tiny_model(tiny_config("llama", tied=False), 4).save_pretrained(folder)
    with fault_proxy_module.fault_proxy(seaweed.endpoint) as proxy:
        location = f"{seaweed.location()}&public_endpoint={proxy.endpoint}"
        with running_service(location, scratch=tmp_path / "scratch", redirect_downloads=True) as running:
            with TrainerClient(running.address) as trainer:
                trainer.register_model(MODEL, folder)
                trainer.push_folder(MODEL, folder, step=1).wait(timeout=60)
            stored = tmp_path / "stored"
            stored.mkdir()
            store = running.service.catalog.store
            for key in store.list(f"models/{MODEL}/versions/"):
                (stored / Path(key).name).write_bytes(store.get(key)[0])
            with endpoint_of(running, HubSizes(redirect=100_000)) as endpoint:
                assert asked == []
                yield Elsewhere(endpoint, stored, proxy.endpoint, asked)
                assert running.service.store_readers.count == 0


@pytest.fixture
def no_credentials(monkeypatch: pytest.MonkeyPatch, elsewhere: Elsewhere) -> None:
    """Clients have none of the store's, but a token of the Hub's."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    python = Endpoint.python
    token = "import os; os.environ['HF_TOKEN'] = 'hf_clients_own'\n"
    monkeypatch.setattr(
        Endpoint, "python", lambda self, home, code, *arguments: python(self, home, token + code, *arguments)
    )


def test_large_files_come_from_the_store_and_small_ones_from_the_service(
    elsewhere: Elsewhere, no_credentials: None, tmp_path: Path
) -> None:
    code = "from huggingface_hub import snapshot_download\nsay(snapshot_download(MODEL))"
    found = elsewhere.endpoint.python(tmp_path, code)
    is_copy(Path(found), elsewhere.folder)
    statuses = {seen.path.rpartition("/")[2]: seen.status for seen in elsewhere.endpoint.recorder.files()}
    assert statuses.pop(WEIGHTS) == 302
    assert set(statuses.values()) == {200}
    assert len(elsewhere.asked) == 1
    # what the client tells the service is nothing for the store
    assert "authorization" not in elsewhere.asked[0]
    assert not any("hf_clients_own" in value for value in elsewhere.asked[0].values())


def test_a_download_from_the_store_goes_on_where_it_stopped(
    elsewhere: Elsewhere, no_credentials: None, tmp_path: Path
) -> None:
    etag = elsewhere.endpoint.http.head(f"/{MODEL}/resolve/main/{WEIGHTS}").headers["etag"].strip('"')
    weights = (elsewhere.folder / WEIGHTS).read_bytes()
    blobs = tmp_path / "hub" / f"models--{MODEL.replace('/', '--')}" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{etag}.incomplete").write_bytes(weights[:123_456])
    code = f"from huggingface_hub import hf_hub_download\nsay(hf_hub_download(MODEL, {WEIGHTS!r}))"
    found = elsewhere.endpoint.python(tmp_path, code)
    assert Path(found).read_bytes() == weights
    # the newest clients no longer go on with what another process has begun
    resumed = (
        "bytes=123456-"
        if sys.executable == CLIENT_PYTHON and huggingface_hub.__version__ < "1"
        else elsewhere.asked[0].get("range")
    )
    assert [request.get("range") for request in elsewhere.asked] == [resumed]


def test_the_file_system_reads_ranges_from_the_store(
    elsewhere: Elsewhere, no_credentials: None, tmp_path: Path
) -> None:
    code = f"""
from huggingface_hub import HfFileSystem
fs = HfFileSystem()
with fs.open(MODEL + "/{WEIGHTS}", "rb", block_size=1000) as file:
    size = file.size
    file.seek(-5000, 2)
    tail = file.read(3000).hex()
say({{"size": size, "tail": tail, "part": fs.cat_file(MODEL + "/{WEIGHTS}", start=8, end=100).hex()}})
"""
    found = elsewhere.endpoint.python(tmp_path, code)
    weights = (elsewhere.folder / WEIGHTS).read_bytes()
    assert found["size"] == len(weights)
    assert bytes.fromhex(found["tail"]) == weights[-5000:-2000]
    assert bytes.fromhex(found["part"]) == weights[8:100]
    assert {seen.status for seen in elsewhere.endpoint.recorder.files()} <= {302, 307}
    assert all(request["range"].startswith("bytes=") for request in elsewhere.asked)


def test_a_redirect_says_what_lies_behind_it_and_gives_no_secret_away(elsewhere: Elsewhere) -> None:
    http, url = elsewhere.endpoint.http, f"/{MODEL}/resolve/{elsewhere.endpoint.sha('main')}/{WEIGHTS}"
    head = http.head(url)
    assert head.status_code == 200
    answer = http.get(url, follow_redirects=False)
    assert answer.status_code == 302
    assert answer.headers["x-linked-etag"] == head.headers["etag"]
    assert answer.headers["x-linked-size"] == head.headers["content-length"]
    assert answer.headers["x-repo-commit"] == head.headers["x-repo-commit"]
    location = answer.headers["location"]
    assert location.startswith(elsewhere.store_url + "/")
    assert "X-Amz-Algorithm=AWS4-HMAC-SHA256" in location
    assert "X-Amz-Expires=3600" in location
    assert SECRET_KEY not in location
    whole = httpx.get(location)
    assert (whole.status_code, whole.content) == (200, (elsewhere.folder / WEIGHTS).read_bytes())
    for method in ("PUT", "DELETE"):
        assert httpx.request(method, location).status_code == 403
    other = location.replace(WEIGHTS, "config.json")
    assert httpx.get(other).status_code == 403


def test_what_cannot_be_had_elsewhere_comes_from_the_service(elsewhere: Elsewhere, endpoint: Endpoint) -> None:
    url, http = f"/{MODEL}/resolve/main/{WEIGHTS}", elsewhere.endpoint.http
    weights = (elsewhere.folder / WEIGHTS).read_bytes()
    # one origin for both, as behind a proxy
    same = http.get(url, headers={"host": elsewhere.store_url.removeprefix("http://")})
    assert (same.status_code, same.content) == (200, weights)
    # the condition names our ETag, which the store does not know
    etag = http.head(url).headers["etag"]
    part = http.get(url, headers={"range": "bytes=5-9", "if-range": etag})
    assert (part.status_code, part.content) == (206, weights[5:10])
    matching = http.get(url, headers={"if-match": etag})
    assert (matching.status_code, matching.content) == (200, weights)
    behind = http.get(url, headers={"range": f"bytes={len(weights)}-"})
    assert behind.status_code == 416
    assert elsewhere.asked == []


def test_a_folder_has_no_urls_to_redirect_to(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    tiny_model(tiny_config("llama", tied=False), 4).save_pretrained(folder)
    with running_service(tmp_path / "store", redirect_downloads=True) as running:
        with TrainerClient(running.address) as trainer:
            trainer.register_model(MODEL, folder)
            trainer.push_folder(MODEL, folder, step=1).wait(timeout=60)
        with endpoint_of(running, HubSizes(redirect=1)) as endpoint:
            assert endpoint.http.get(f"/{MODEL}/resolve/main/{WEIGHTS}").status_code == 200


def test_a_download_is_a_reading_until_it_ends_or_its_client_goes_away(
    small_pieces: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = small_pieces.running.service
    read_range, counts = service.catalog.store.read_range, []

    def counted(key: str, start: int, length: int) -> bytes:
        counts.append(service.store_readers.count)
        return read_range(key, start, length)

    monkeypatch.setattr(service.catalog.store, "read_range", counted)
    url = f"/{MODEL}/resolve/1/{WEIGHTS}"
    assert small_pieces.http.get(url).status_code == 200
    assert len(counts) > 3
    assert set(counts) == {1}
    with small_pieces.http.stream("GET", url) as answer:
        next(answer.iter_raw(10))
    eventually(lambda: service.store_readers.count == 0)
