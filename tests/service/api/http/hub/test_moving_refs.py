"""Is what a client downloads by a ref one version, though the ref moves meanwhile?"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.api.http.hub.endpoint import MODEL, WEIGHTS, Endpoint, endpoint_of, files_of
from tests.support.raw_clients import tiny_folder
from tests.support.services import running_service
from weighbridge import TrainerClient
from weighbridge_service.api.http.hub_documents import HubVersion
from weighbridge_service.api.http.hub_reading import Hub


@pytest.fixture
def moving(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    """The tag `moving` names version 1 until the service has resolved it once, and version 2 from then on."""
    resolve = Hub.version
    with TrainerClient(endpoint.running.address) as trainer:
        trainer.set_ref(MODEL, "moving", 1)

        def resolved(self: Hub, name: str, revision: str) -> HubVersion:
            found = resolve(self, name, revision)
            if revision == "moving":
                trainer.set_ref(MODEL, "moving", 2)
            return found

        monkeypatch.setattr(Hub, "version", resolved)
        yield endpoint
        trainer.delete_ref(MODEL, "moving")


def test_a_file_that_is_downloaded_by_a_ref_is_of_the_version_under_which_it_is_kept(
    moving: Endpoint, tmp_path: Path
) -> None:
    code = f"from huggingface_hub import hf_hub_download\nsay(hf_hub_download(MODEL, {WEIGHTS!r}, revision='moving'))"
    found = Path(moving.python(tmp_path, code))
    assert found.parent.name == moving.sha("1")
    assert found.read_bytes() == (moving.folder(1) / WEIGHTS).read_bytes()


def test_a_ref_is_answered_by_a_redirect_to_its_commit_and_what_lies_there(endpoint: Endpoint) -> None:
    for method in ("HEAD", "GET"):
        for verb in ("resolve", "raw"):
            for revision, number in (("prod", 1), ("1", 1), ("main", 2), ("HEAD", 2), ("%70rod", 1)):
                url = f"/{MODEL}/{verb}/{revision}/{WEIGHTS}?download=true"
                answer = endpoint.http.request(method, url, follow_redirects=False)
                commit = endpoint.sha(str(number))
                assert answer.status_code == 307
                # a path alone: older clients follow no other redirect of a HEAD
                assert answer.headers["location"] == f"/{MODEL}/{verb}/{commit}/{WEIGHTS}?download=true"
                there = endpoint.http.head(answer.headers["location"])
                assert answer.headers["x-repo-commit"] == there.headers["x-repo-commit"] == commit
                assert answer.headers["x-linked-etag"] == there.headers["etag"]
                assert answer.headers["x-linked-size"] == there.headers["content-length"]


def test_a_file_that_a_ref_does_not_have_is_said_to_be_missing_at_once(endpoint: Endpoint) -> None:
    answer = endpoint.http.head(f"/{MODEL}/resolve/prod/no.json", follow_redirects=False)
    assert (answer.status_code, answer.headers["x-error-code"]) == (404, "EntryNotFound")
    assert answer.headers["x-repo-commit"] == endpoint.sha("1")


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_condition_on_the_content_is_kept(endpoint: Endpoint, method: str) -> None:
    url = f"/{MODEL}/resolve/1/{WEIGHTS}"
    mine = endpoint.http.head(url).headers["etag"]
    other = endpoint.http.head(f"/{MODEL}/resolve/2/{WEIGHTS}").headers["etag"]
    for name, value, status in (
        ("if-match", mine, 200),
        ("if-match", f"{other}, {mine}", 200),
        ("if-match", "*", 200),
        ("if-match", other, 412),
        ("if-match", f"W/{mine}", 412),
        ("if-none-match", other, 200),
        ("if-none-match", mine, 304),
        ("if-none-match", f"W/{mine}", 304),
        ("if-none-match", "*", 304),
    ):
        answer = endpoint.http.request(method, url, headers={name: value})
        assert answer.status_code == status, (name, value)
        assert answer.headers["etag"] == mine
        assert status == 200 or WEIGHTS.encode() not in answer.content


def test_an_etag_is_the_files_sha256_or_reads_like_no_digest_that_clients_check(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    source = tiny_folder(tmp_path / "hf")
    with running_service(tmp_path / "store", sha256=True) as running:
        with TrainerClient(running.address) as trainer:
            trainer.register_model(MODEL, source.folder)
            trainer.push_folder(MODEL, source.folder, step=1).wait(timeout=60)
        with endpoint_of(running) as hashed:
            for each in (endpoint, hashed):
                tree = {entry["path"]: entry for entry in each.http.get(f"/api/models/{MODEL}/tree/1").json()}
                assert sorted(tree) == [path.name for path in files_of(each.folder(1))]
                for path in files_of(each.folder(1)):
                    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
                    etag = each.http.head(f"/{MODEL}/resolve/1/{path.name}").headers["etag"].strip('"')
                    assert tree[path.name]["oid"] == etag
                    if re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", etag) or each is hashed:
                        assert etag == tree[path.name]["lfs"]["oid"] == sha256
                    else:
                        assert "lfs" not in tree[path.name]


def test_the_requests_of_the_javascript_client_are_answered(endpoint: Endpoint) -> None:
    paths = {"paths": ["config.json", "no.json"], "expand": True}
    [found] = endpoint.http.post(f"/api/models/{MODEL}/paths-info/prod", json=paths).json()
    assert (found["path"], found["lastCommit"]["id"]) == ("config.json", endpoint.sha("1"))
    assert endpoint.sha("HEAD") == endpoint.sha("main")
    raw = f"/{MODEL}/raw/main"
    assert endpoint.http.head(f"{raw}/no.json").status_code == 404
    assert endpoint.http.get(f"{raw}/README.md").content == (endpoint.folder(2) / "README.md").read_bytes()
    assert endpoint.http.get("/hub/raw/main/README.md").headers["x-error-code"] == "RepoNotFound"
