"""Do Hugging Face's own clients find, load and resume durable versions, with nothing but HF_ENDPOINT set?"""

from __future__ import annotations

import filecmp
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Semaphore
from typing import Any

import httpx2 as httpx
import pytest
import torch
from safetensors.torch import load_file
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests import fault_proxy as fault_proxy_module
from tests.reference import tiny_config, tiny_model
from tests.s3_server import SECRET_KEY, S3Server
from tests.services import RunningService, running_service
from weighbridge import TrainerClient
from weighbridge.errors import DeadlineExceeded, Unavailable
from weighbridge.resources import VersionState
from weighbridge_service import http_hub
from weighbridge_service.exports import Exports
from weighbridge_service.http_app import create_app
from weighbridge_service.http_problems import MAX_BODY_BYTES
from weighbridge_service.hub_reading import Hub
from weighbridge_service.push import publisher
from weighbridge_service.server import HttpServer

pytestmark = pytest.mark.xdist_group("hub")

CLIENT_PYTHON = os.environ.get("WEIGHBRIDGE_HUB_PYTHON", sys.executable)
"""Runs the clients: `make test-hub` names environments with other versions of them."""
MODEL = "tests/hub"
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Seen:
    """A request that the service answered."""

    method: str
    path: str
    range: str
    status: int


class Recorder:
    """Remembers the requests about the model that go through it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.seen: list[Seen] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def watched(message: Message) -> None:
            # newer clients also ask the Hub about themselves
            if message["type"] == "http.response.start" and MODEL in scope["path"]:
                asked = dict(scope["headers"]).get(b"range", b"").decode("latin-1")
                self.seen.append(Seen(scope["method"], scope["path"], asked, message["status"]))
            await send(message)

        await self._app(scope, receive, watched)

    def files(self) -> list[Seen]:
        """Requests for files' bytes."""
        return [seen for seen in self.seen if seen.method == "GET" and "/resolve/" in seen.path]


class Endpoint:
    """A service with two durable versions of one model, the first of them tagged; and Hugging Face's clients for it."""

    def __init__(self, running: RunningService, url: str, recorder: Recorder) -> None:
        self.running = running
        self.url = url
        self.recorder = recorder
        self.http = httpx.Client(base_url=url, timeout=20)

    def folder(self, number: int) -> Path:
        """Where the store keeps a version."""
        return Path(self.running.service.config.store) / f"models/{MODEL}/versions/{number:012d}"

    def sha(self, revision: str) -> str:
        answer = self.http.get(f"/api/models/{MODEL}/revision/{revision}")
        assert answer.status_code == 200, answer.text
        return str(answer.json()["sha"])

    def raw(self, method: str, path: str) -> httpx.Response:
        """The answer to a request for this path as it is: a client library would tidy it up."""
        where = httpx.URL(self.url)
        with socket.create_connection((where.host, where.port or 80), timeout=10) as connection:
            request = f"{method} {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n"
            connection.sendall(request.encode("latin-1"))
            with connection.makefile("rb") as stream:
                head, _, body = stream.read().partition(b"\r\n\r\n")
        status, *fields = head.decode("latin-1").split("\r\n")
        headers = [(name, value.strip()) for name, _, value in (field.partition(":") for field in fields)]
        return httpx.Response(int(status.split()[1]), headers=headers, content=body)

    def run(self, home: Path, command: list[str]) -> str:
        """Run a client with a cache of its own."""
        mine = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        mine |= {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        mine |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        self.recorder.seen.clear()
        done = subprocess.run(command, env=mine, cwd=home, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def python(self, home: Path, code: str, *arguments: str) -> Any:
        """Run Python code in a process of its own; what it calls ``say`` with last."""
        script = f"import json, sys\ndef say(value): print(json.dumps(value))\nMODEL = {MODEL!r}\n{code}"
        return json.loads(self.run(home, [CLIENT_PYTHON, "-c", script, *arguments]).splitlines()[-1])


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    with running_service(tmp_path_factory.mktemp("store")) as running:
        with TrainerClient(running.address) as trainer:
            for seed in (1, 2):
                folder = tmp_path_factory.mktemp("hf")
                tiny_model(tiny_config("llama", tied=False), seed).save_pretrained(folder)
                (folder / "README.md").write_text("# A model card, é\n")
                if seed == 1:
                    trainer.register_model(MODEL, folder)
                trainer.push_folder(MODEL, folder, step=seed).wait(timeout=60)
            trainer.set_ref(MODEL, "prod", 1)
        exports = Exports(running.service)
        recorder = Recorder(create_app(running.service, exports, running.metrics, running.health))
        server = HttpServer("127.0.0.1:0", 1024)
        server.start(recorder)
        found = Endpoint(running, f"http://{server.address}", recorder)
        yield found
        found.http.close()
        server.stop()
        exports.close()


def files_of(folder: Path) -> list[Path]:
    """What the Hub has of a version's folder: everything but block digests."""
    return sorted(path for path in folder.iterdir() if path.suffix != ".blake3")


def is_copy(folder: Path, original: Path) -> None:
    names = [path.name for path in files_of(original)]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert filecmp.cmpfiles(folder, original, names, shallow=False) == (names, [], [])


def test_downloads_that_wait_for_the_store_keep_no_thread_from_other_requests(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, reading = Event(), Semaphore(0)
    read = Hub.read

    def hanging(*arguments: Any) -> bytes:
        reading.release()
        go_on.wait(60)
        return read(*arguments)

    monkeypatch.setattr(Hub, "read", hanging)
    url = f"/{MODEL}/resolve/main/{WEIGHTS}"
    with ThreadPoolExecutor(60) as clients:
        try:
            downloads = [clients.submit(endpoint.http.get, url, timeout=60) for _ in range(60)]
            for _ in range(40):
                assert reading.acquire(timeout=30)
            for path in ("/v1/models", f"/v1/models/{MODEL}", "/livez", "/metrics"):
                assert endpoint.http.get(path, timeout=5).status_code == 200
        finally:
            go_on.set()
        assert [each.result().status_code for each in downloads] == [200] * 60


# -- Hugging Face's clients ------------------------------------------------------------------------------------------


def test_a_snapshot_is_the_versions_folder_whatever_names_it(endpoint: Endpoint, tmp_path: Path) -> None:
    expected = {"": 2, "main": 2, "latest": 2, "2": 2, "1": 1, "prod": 1, endpoint.sha("1"): 1}
    code = (
        "from huggingface_hub import snapshot_download\n"
        "say({r: snapshot_download(MODEL, revision=r or None) for r in sys.argv[1:]})"
    )
    found = endpoint.python(tmp_path, code, *expected)
    assert {revision: Path(folder).name for revision, folder in found.items()} == {
        revision: endpoint.sha(str(number)) for revision, number in expected.items()
    }
    for number in (1, 2):
        is_copy(Path(found[str(number)]), endpoint.folder(number))
        assert not list(Path(found[str(number)]).glob("*.blake3"))
    # what both versions have in common came once
    came = [seen.path.rpartition("/")[2] for seen in endpoint.recorder.files()]
    assert came.count("config.json") == came.count("README.md") == 1
    assert came.count(WEIGHTS) == came.count("weighbridge.json") == 2


def test_what_is_in_the_cache_is_not_sent_again(endpoint: Endpoint, tmp_path: Path) -> None:
    code = (
        "from huggingface_hub import hf_hub_download\n"
        f"say(hf_hub_download(MODEL, {WEIGHTS!r}, revision=sys.argv[1]))"
    )
    first = endpoint.python(tmp_path, code, "prod")
    assert filecmp.cmp(first, endpoint.folder(1) / WEIGHTS, shallow=False)
    assert [seen.status for seen in endpoint.recorder.files()] == [200]
    assert endpoint.python(tmp_path, code, "prod") == first
    assert [seen.method for seen in endpoint.recorder.seen] == ["HEAD"]
    assert endpoint.python(tmp_path, code, endpoint.sha("1")) == first
    assert endpoint.recorder.seen == []  # a commit never changes: nobody has to be asked


def test_the_command_line_tool_downloads(endpoint: Endpoint, tmp_path: Path) -> None:
    tool = str(Path(CLIENT_PYTHON).parent / "hf")
    endpoint.run(
        tmp_path, [tool, "download", MODEL, "--revision", "1", "--local-dir", str(tmp_path / "here")]
    )
    names = [path.name for path in files_of(endpoint.folder(1))]
    assert filecmp.cmpfiles(tmp_path / "here", endpoint.folder(1), names, shallow=False) == (names, [], [])


def test_the_file_system_lists_and_reads_ranges(endpoint: Endpoint, tmp_path: Path) -> None:
    code = f"""
from huggingface_hub import HfFileSystem
fs = HfFileSystem()
with fs.open(MODEL + "@prod/{WEIGHTS}", "rb", block_size=1000) as file:
    size = file.size
    file.seek(-5000, 2)
    tail = file.read(3000).hex()
say({{
    "names": [path.rpartition("/")[2] for path in fs.ls(MODEL, detail=False)],
    "sizes": [entry["size"] for entry in fs.ls(MODEL + "@1")],
    "found": [path.rpartition("/")[2] for path in fs.glob(MODEL + "/*.safetensors")],
    "size": size,
    "tail": tail,
    "part": fs.cat_file(MODEL + "@1/{WEIGHTS}", start=8, end=100).hex(),
    "text": fs.read_text(MODEL + "/README.md"),
    "there": [fs.exists(MODEL + "/config.json"), fs.exists(MODEL + "/no.json"), fs.exists("tests/no")],
    "modified": fs.modified(MODEL + "/config.json").timestamp(),
}})
"""
    found = endpoint.python(tmp_path, code)
    files = files_of(endpoint.folder(1))
    weights = (endpoint.folder(1) / WEIGHTS).read_bytes()
    assert sorted(found["names"]) == [path.name for path in files]
    assert sorted(found["sizes"]) == sorted(path.stat().st_size for path in files)
    assert found["found"] == [WEIGHTS]
    assert found["size"] == len(weights)
    assert bytes.fromhex(found["tail"]) == weights[-5000:-2000]
    assert bytes.fromhex(found["part"]) == weights[8:100]
    assert found["text"] == "# A model card, é\n"
    assert found["there"] == [True, False, False]
    created = json.loads((endpoint.folder(2) / "weighbridge.json").read_bytes())["created_ms"]
    assert found["modified"] == pytest.approx(created / 1000, abs=0.01)
    assert {seen.status for seen in endpoint.recorder.files()} <= {200, 206}
    assert any(seen.range for seen in endpoint.recorder.files())


def test_transformers_loads_a_revision(endpoint: Endpoint, tmp_path: Path) -> None:
    code = (
        "import torch\n"
        "from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained(MODEL, revision='prod')\n"
        "torch.save(model.state_dict(), 'loaded.pt')\n"
        "say(model.config.hidden_size)"
    )
    assert endpoint.python(tmp_path, code) == 64
    loaded = torch.load(tmp_path / "loaded.pt")
    expected = load_file(endpoint.folder(1) / WEIGHTS)
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name


def test_what_is_not_there_has_the_clients_own_errors(endpoint: Endpoint, tmp_path: Path) -> None:
    code = """
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
api = HfApi()
wrong = sys.argv[1]
def error(call, *args, **settings):
    try:
        call(*args, **settings)
    except Exception as error:
        return type(error).__name__
    return "no error"
say({
    "RepositoryNotFoundError": [
        error(snapshot_download, "tests/no"),
        error(hf_hub_download, "tests/no", "config.json"),
        error(hf_hub_download, "hub", "config.json"),
        error(api.model_info, "tests/no"),
        error(api.model_info, "hub"),
        error(api.list_repo_refs, "tests/no"),
    ],
    "RevisionNotFoundError": [
        error(snapshot_download, MODEL, revision="no"),
        error(snapshot_download, MODEL, revision="99"),
        error(hf_hub_download, MODEL, "config.json", revision="refs/pr/1"),
        error(hf_hub_download, MODEL, "config.json", revision=wrong),
        error(api.model_info, MODEL, revision="a b/../c"),
        error(lambda: list(api.list_repo_tree(MODEL, revision="no"))),
        error(api.get_paths_info, MODEL, "config.json", revision="no"),
    ],
    "EntryNotFoundError": [
        error(lambda: list(api.list_repo_tree(MODEL, "folder"))),
        error(hf_hub_download, MODEL, "no.json"),
        error(hf_hub_download, MODEL, "folder/config.json", revision="1"),
    ],
})
"""
    sha = endpoint.sha("1")
    found = endpoint.python(tmp_path, code, ("1" if sha[0] == "0" else "0") + sha[1:])
    for name, errors in found.items():
        # a RemoteEntryNotFoundError is an EntryNotFoundError
        assert {error.removeprefix("Remote") for error in errors} == {name}, errors


def test_a_download_that_breaks_goes_on_where_it_stopped(
    endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = endpoint.running.service.catalog.store
    read_range = store.read_range
    broken: list[int] = []

    def breaks_once(key: str, start: int, length: int) -> bytes:
        if key.endswith(WEIGHTS) and start >= 200_000 and not broken:
            broken.append(start)
            raise Unavailable("the disk is away")
        return read_range(key, start, length)

    monkeypatch.setattr(store, "read_range", breaks_once)
    monkeypatch.setattr(http_hub, "_READ_BYTES", 50_000)
    code = f"""
from huggingface_hub import constants, hf_hub_download
constants.DOWNLOAD_CHUNK_SIZE = 10_000
errors = []
for _ in range(3):
    try:
        found = hf_hub_download(MODEL, {WEIGHTS!r}, revision="1")
        break
    except Exception as error:
        errors.append(repr(error))
say(found)
"""
    found = endpoint.python(tmp_path, code)
    assert filecmp.cmp(found, endpoint.folder(1) / WEIGHTS, shallow=False)
    first, *others = endpoint.recorder.files()
    assert (first.status, first.range) == (200, "")
    [resumed] = others
    assert resumed.status == 206
    match = re.fullmatch(r"bytes=(\d+)-", resumed.range)
    assert match is not None
    assert 100_000 <= int(match[1]) <= broken[0]


def test_long_lists_come_in_pages(
    endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_hub, "_TREE_PAGE", 2)
    code = (
        "from huggingface_hub import HfApi\n"
        "found = HfApi().list_repo_tree(MODEL, revision='1', recursive=True)\n"
        "say([[file.path, file.size] for file in found])"
    )
    files = files_of(endpoint.folder(1))
    assert endpoint.python(tmp_path, code) == [[path.name, path.stat().st_size] for path in files]
    assert len(endpoint.recorder.seen) == (len(files) + 1) // 2 > 1


def test_refs_infos_and_who_i_am(endpoint: Endpoint, tmp_path: Path) -> None:
    code = """
from huggingface_hub import HfApi
api = HfApi(token="any")
refs = api.list_repo_refs(MODEL)
info = api.model_info(MODEL, files_metadata=True)
say({
    "branches": {ref.name: ref.target_commit for ref in refs.branches},
    "tags": {ref.name: ref.target_commit for ref in refs.tags},
    "id": info.id,
    "sha": info.sha,
    "sizes": {file.rfilename: file.size for file in info.siblings},
    "paths": [file.path for file in api.get_paths_info(MODEL, ["config.json", "no.json"], expand=True)],
    "exists": [api.file_exists(MODEL, "config.json"), api.file_exists(MODEL, "no"), api.repo_exists("tests/no")],
    "revisions": [api.revision_exists(MODEL, "2"), api.revision_exists(MODEL, "3")],
    "me": api.whoami()["name"],
})
"""
    found = endpoint.python(tmp_path, code)
    one, two = endpoint.sha("1"), endpoint.sha("2")
    assert found["branches"] == {"main": two, "latest": two}
    assert found["tags"] == {"prod": one}
    assert (found["id"], found["sha"]) == (MODEL, two)
    assert found["sizes"] == {path.name: path.stat().st_size for path in files_of(endpoint.folder(2))}
    assert found["paths"] == ["config.json"]
    assert found["exists"] == [True, False, False]
    assert found["revisions"] == [True, False]
    assert found["me"] == "anonymous"


# -- what is offered -------------------------------------------------------------------------------------------------


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
            with pytest.raises(DeadlineExceeded, match="the store is away"):
                trainer.wait_for(name, number, VersionState.DURABLE, timeout=3)
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


def test_versions_on_s3_are_offered_too(
    seaweed: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_hub, "_READ_BYTES", 100_000)
    folder = tmp_path / "hf"
    tiny_model(tiny_config("llama", tied=False), 4).save_pretrained(folder)
    with running_service(seaweed.location(), scratch=tmp_path / "scratch") as running:
        with TrainerClient(running.address) as trainer:
            trainer.register_model(MODEL, folder)
            trainer.push_folder(MODEL, folder, step=1).wait(timeout=60)
        exports = Exports(running.service)
        http = TestClient(create_app(running.service, exports, running.metrics, running.health))
        url = f"/{MODEL}/resolve/main/{WEIGHTS}"
        (tmp_path / WEIGHTS).write_bytes(whole := http.get(url).content)
        assert http.get(url, headers={"range": "bytes=99999-250001"}).content == whole[99_999:250_002]
        assert http.get(f"/{MODEL}/resolve/1/config.json").content == (folder / "config.json").read_bytes()
        exports.close()
    expected = load_file(folder / WEIGHTS)
    found = load_file(tmp_path / WEIGHTS)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


# -- from the store itself -------------------------------------------------------------------------------------------


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
    monkeypatch.setattr(http_hub, "_REDIRECT_BYTES", 100_000)
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
            exports = Exports(running.service)
            recorder = Recorder(create_app(running.service, exports, running.metrics, running.health))
            server = HttpServer("127.0.0.1:0", 1024)
            server.start(recorder)
            endpoint = Endpoint(running, f"http://{server.address}", recorder)
            assert asked == []
            yield Elsewhere(endpoint, stored, proxy.endpoint, asked)
            assert running.service.store_readers.count == 0
            endpoint.http.close()
            server.stop()
            exports.close()


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
    resumed = "bytes=123456-" if sys.executable == CLIENT_PYTHON else elsewhere.asked[0].get("range")
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
    assert {seen.status for seen in elsewhere.endpoint.recorder.files()} == {302}
    assert all(request["range"].startswith("bytes=") for request in elsewhere.asked)


def test_a_redirect_says_what_lies_behind_it_and_gives_no_secret_away(elsewhere: Elsewhere) -> None:
    http, url = elsewhere.endpoint.http, f"/{MODEL}/resolve/main/{WEIGHTS}"
    head = http.head(url)
    assert head.status_code == 200
    answer = http.get(url)
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


def test_what_cannot_be_had_elsewhere_comes_from_the_service(
    elsewhere: Elsewhere, endpoint: Endpoint
) -> None:
    url, http = f"/{MODEL}/resolve/main/{WEIGHTS}", elsewhere.endpoint.http
    weights = (elsewhere.folder / WEIGHTS).read_bytes()
    # one origin for both, as behind a proxy
    same = http.get(url, headers={"host": elsewhere.store_url.removeprefix("http://")})
    assert (same.status_code, same.content) == (200, weights)
    # the condition names our ETag, which the store does not know
    etag = http.head(url).headers["etag"]
    part = http.get(url, headers={"range": "bytes=5-9", "if-range": etag})
    assert (part.status_code, part.content) == (206, weights[5:10])
    behind = http.get(url, headers={"range": f"bytes={len(weights)}-"})
    assert behind.status_code == 416
    assert elsewhere.asked == []


def test_a_folder_has_no_urls_to_redirect_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_hub, "_REDIRECT_BYTES", 1)
    folder = tmp_path / "hf"
    tiny_model(tiny_config("llama", tied=False), 4).save_pretrained(folder)
    with running_service(tmp_path / "store", redirect_downloads=True) as running:
        with TrainerClient(running.address) as trainer:
            trainer.register_model(MODEL, folder)
            trainer.push_folder(MODEL, folder, step=1).wait(timeout=60)
        exports = Exports(running.service)
        http = TestClient(
            create_app(running.service, exports, running.metrics, running.health), follow_redirects=False
        )
        assert http.get(f"/{MODEL}/resolve/main/{WEIGHTS}").status_code == 200
        exports.close()


def test_a_download_is_a_reading_until_it_ends_or_its_client_goes_away(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_hub, "_READ_BYTES", 50_000)
    service = endpoint.running.service
    read_range, counts = service.catalog.store.read_range, []

    def counted(key: str, start: int, length: int) -> bytes:
        counts.append(service.store_readers.count)
        return read_range(key, start, length)

    monkeypatch.setattr(service.catalog.store, "read_range", counted)
    url = f"/{MODEL}/resolve/1/{WEIGHTS}"
    assert endpoint.http.get(url).status_code == 200
    assert len(counts) > 3
    assert set(counts) == {1}
    with endpoint.http.stream("GET", url) as answer:
        next(answer.iter_raw(10))
    deadline = time.monotonic() + 20
    while service.store_readers.count and time.monotonic() < deadline:
        time.sleep(0.01)
    assert service.store_readers.count == 0


# -- HTTP ------------------------------------------------------------------------------------------------------------


def test_head_and_get_agree(endpoint: Endpoint) -> None:
    for path in files_of(endpoint.folder(1)):
        url = f"/{MODEL}/resolve/1/{path.name}"
        head, get = endpoint.http.head(url), endpoint.http.get(url)
        assert (head.status_code, head.content) == (200, b"")
        assert (get.status_code, get.content) == (200, path.read_bytes())
        for name in ("etag", "content-length", "x-repo-commit", "accept-ranges"):
            assert head.headers[name] == get.headers[name]
        assert re.fullmatch(r'"[0-9a-f]{64}"', head.headers["etag"])
        assert head.headers["x-repo-commit"] == endpoint.sha("1")
    etags = [
        endpoint.http.head(f"/{MODEL}/resolve/{number}/{name}").headers["etag"]
        for name in ("config.json", WEIGHTS)
        for number in (1, 2)
    ]
    assert etags[0] == etags[1]
    assert etags[2] != etags[3]


@pytest.mark.parametrize(
    ("asked", "start", "end"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=10-19", 10, 20),
        ("bytes=100000-", 100_000, None),
        ("bytes=-7", -7, None),
        ("bytes=5-999999999999999999999999999999", 5, None),
        ("bytes=-" + "9" * 5000, 0, None),
        ("Bytes = 1 - 2", 1, 3),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_range_is_what_slicing_gives(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, asked: str, start: int, end: int | None
) -> None:
    monkeypatch.setattr(http_hub, "_READ_BYTES", 70_000)
    monkeypatch.setattr(http_hub, "_SEND_BYTES", 9_999)
    weights = (endpoint.folder(2) / WEIGHTS).read_bytes()
    expected = weights[start:end]
    answer = endpoint.http.get(f"/{MODEL}/resolve/2/{WEIGHTS}", headers={"range": asked})
    assert answer.status_code == 206
    assert answer.content == expected
    first = start % len(weights)
    last = first + len(expected) - 1
    assert answer.headers["content-range"] == f"bytes {first}-{last}/{len(weights)}"
    assert answer.headers["content-length"] == str(len(expected))


@pytest.mark.parametrize(
    "asked", ["bytes=5-4", "bytes=-", "bytes=", "x", "lines=1-2", "bytes=0-1,3-4", "bytes=1-2-3", "bytes=é-"]
)
def test_a_range_that_makes_no_sense_gives_the_whole_file(endpoint: Endpoint, asked: str) -> None:
    answer = endpoint.http.get(f"/{MODEL}/resolve/2/config.json", headers={"range": asked.encode("latin-1")})
    assert answer.status_code == 200
    assert answer.content == (endpoint.folder(2) / "config.json").read_bytes()


@pytest.mark.parametrize("asked", ["bytes=10000000-", "bytes=-0", "bytes=" + "9" * 5000 + "-"], ids=len)
def test_a_range_behind_the_end_is_refused(endpoint: Endpoint, asked: str) -> None:
    answer = endpoint.http.get(f"/{MODEL}/resolve/2/config.json", headers={"range": asked})
    assert answer.status_code == 416
    size = (endpoint.folder(2) / "config.json").stat().st_size
    assert answer.headers["content-range"] == f"bytes */{size}"
    assert answer.headers["content-type"] == "application/problem+json"


def test_a_range_of_another_content_gives_the_whole_file(endpoint: Endpoint) -> None:
    url = f"/{MODEL}/resolve/2/{WEIGHTS}"
    etag = endpoint.http.head(url).headers["etag"]
    other = endpoint.http.head(f"/{MODEL}/resolve/1/{WEIGHTS}").headers["etag"]
    for condition, status in ((etag, 206), (other, 200)):
        answer = endpoint.http.get(url, headers={"range": "bytes=5-", "if-range": condition})
        assert answer.status_code == status


def test_files_are_read_in_pieces(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    store = endpoint.running.service.catalog.store
    read_range, lengths = store.read_range, []

    def counted(key: str, start: int, length: int) -> bytes:
        lengths.append(length)
        return read_range(key, start, length)

    def never(*_: Any) -> None:
        raise AssertionError("the whole file was fetched")

    monkeypatch.setattr(store, "read_range", counted)
    monkeypatch.setattr(store, "map", never)
    monkeypatch.setattr(http_hub, "_READ_BYTES", 60_000)
    weights = (endpoint.folder(1) / WEIGHTS).read_bytes()
    assert endpoint.http.get(f"/{MODEL}/resolve/1/{WEIGHTS}").content == weights
    assert max(lengths) == 60_000
    assert sum(lengths) == len(weights)
    lengths.clear()
    part = endpoint.http.get(f"/{MODEL}/resolve/1/{WEIGHTS}", headers={"range": "bytes=7-9"})
    assert part.content == weights[7:10]
    assert lengths == [3]


@pytest.mark.parametrize(
    "revision", ["refs%2Fpr%2F1", "refs%2fheads%2fmain", "main%2F..", "prod%2Fconfig.json"]
)
def test_a_quoted_slash_belongs_to_the_revision(endpoint: Endpoint, revision: str) -> None:
    for path in (
        f"/{MODEL}/resolve/{revision}/config.json",
        f"/api/models/{MODEL}/revision/{revision}",
        f"/api/models/{MODEL}/tree/{revision}",
    ):
        answer = endpoint.http.get(path)
        assert (answer.status_code, answer.headers["x-error-code"]) == (404, "RevisionNotFound"), path
    assert endpoint.http.get(f"/{MODEL}/resolve/%70rod/%63onfig.json").status_code == 200


HOSTILE = ["..", "%2e%2e", "..%2f..%2fhead.json", "%00", "%ff%fe", "%ed%a0%80", "a%0d%0aX:1", "%5c", "a" * 5000, "é", "%25", "-"]  # fmt: skip


@pytest.mark.parametrize("segment", HOSTILE, ids=lambda segment: segment[:20])
def test_hostile_names_are_not_found(endpoint: Endpoint, segment: str) -> None:
    for path in (
        f"/{segment}/hub/resolve/main/config.json",
        f"/tests/{segment}/resolve/main/config.json",
        f"/{MODEL}/resolve/{segment}/config.json",
        f"/{MODEL}/resolve/main/{segment}",
        f"/{MODEL}/resolve/main/../{segment}",
        f"/{MODEL}/resolve/main//{segment}",
        f"/{MODEL}/resolve//{segment}",
        f"/api/models/{segment}/hub",
        f"/api/models/tests/{segment}/refs",
        f"/api/models/{MODEL}/revision/{segment}",
        f"/api/models/{MODEL}/tree/main/{segment}",
    ):
        for method in ("GET", "HEAD"):
            answer = endpoint.raw(method, path)
            assert answer.status_code in (404, 405, 400), (path, answer.text)
            if answer.headers.get("x-error-code") == "EntryNotFound":
                assert answer.headers["x-repo-commit"] == endpoint.sha("main")
    found = endpoint.http.post(f"/api/models/{MODEL}/paths-info/main", content=f"paths={segment}".encode())
    assert (found.status_code, found.json()) == (200, [])


def test_hostile_forms_and_parameters_are_client_errors(endpoint: Endpoint) -> None:
    url = f"/api/models/{MODEL}/paths-info/main"
    for body in (b"\xff\xfe", b"paths=x&" * 20_000):
        assert endpoint.http.post(url, content=body).status_code == 400
    assert endpoint.http.post(url, content=b" " * (MAX_BODY_BYTES + 1)).status_code == 413
    for body in (b"", b"nothing", b'{"paths": ["config.json"]}'):
        answer = endpoint.http.post(url, content=body)
        assert (answer.status_code, answer.json()) == (200, [])
    tree = f"/api/models/{MODEL}/tree/main"
    for query in ("limit=0", "limit=x", "limit=" + "9" * 5000, "expand=perhaps"):
        assert endpoint.http.get(f"{tree}?{query}").status_code == 400
    assert endpoint.http.get(f"{tree}?cursor=%ff").status_code == 200
    assert endpoint.http.get(f"{tree}?cursor=~").json() == []


def test_a_file_that_is_gone_from_the_store_is_a_problem_and_no_stream(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = endpoint.folder(1) / "README.hidden"
    (endpoint.folder(1) / "README.md").rename(hidden)
    try:
        answer = endpoint.http.get(f"/{MODEL}/resolve/1/README.md")
        assert answer.status_code == 500
        assert answer.json()["type"] == "urn:weighbridge:error:data_loss"
    finally:
        hidden.rename(endpoint.folder(1) / "README.md")
