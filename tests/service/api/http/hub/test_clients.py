"""Do Hugging Face's own clients find, load and resume versions, with nothing but HF_ENDPOINT set?"""

from __future__ import annotations

import filecmp
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.service.api.http.hub.endpoint import CLIENT_PYTHON, MODEL, WEIGHTS, Endpoint, files_of, is_copy
from tests.support.raw_clients import tiny_folder
from weighbridge import TrainerClient
from weighbridge.errors import Unavailable


@pytest.mark.smoke
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
    # files that both versions share were downloaded once
    came = [seen.path.rpartition("/")[2] for seen in endpoint.recorder.files()]
    assert came.count("config.json") == came.count("README.md") == 1
    assert came.count(WEIGHTS) == came.count("weighbridge.json") == 2


def test_files_in_folders_are_listed_and_downloaded_as_they_lay_beside_the_weights(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    folder = tiny_folder(tmp_path / "hf").folder
    there = {
        "1_Pooling/config.json": "{}",
        "additional_chat_templates/tool_use.jinja": "T",
        "LICENSE": "free",
    }
    for name, text in there.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    with TrainerClient(endpoint.running.address) as trainer:
        trainer.import_folder("tests/folders", folder).wait(timeout=60)
    found = endpoint.python(
        tmp_path,
        """
from huggingface_hub import HfApi, HfFileSystem, hf_hub_download, snapshot_download
api = HfApi()
def named(entries): return {each.path: type(each).__name__ for each in entries}
say({
    "snapshot": snapshot_download("tests/folders"),
    "one": hf_hub_download("tests/folders", "config.json", subfolder="1_Pooling"),
    "top": named(api.list_repo_tree("tests/folders")),
    "inside": named(api.list_repo_tree("tests/folders", "1_Pooling")),
    "all": named(api.list_repo_tree("tests/folders", recursive=True)),
    "paths": named(api.get_paths_info("tests/folders", ["1_Pooling", "LICENSE", "none"])),
    "glob": HfFileSystem().glob("tests/folders/**/*.jinja"),
})
""",
    )
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} | {"weighbridge.json"}
    names = [*there, "config.json"]
    assert filecmp.cmpfiles(found["snapshot"], folder, names, shallow=False) == (names, [], [])
    assert Path(found["one"]).read_text() == "{}"
    folders = dict.fromkeys(("1_Pooling", "additional_chat_templates"), "RepoFolder")
    assert found["all"] == dict.fromkeys(files, "RepoFile") | folders
    assert found["top"] == dict.fromkeys((name for name in files if "/" not in name), "RepoFile") | folders
    assert found["inside"] == {"1_Pooling/config.json": "RepoFile"}
    assert found["paths"] == {"1_Pooling": "RepoFolder", "LICENSE": "RepoFile"}
    assert found["glob"] == ["tests/folders/additional_chat_templates/tool_use.jinja"]


def test_what_is_in_the_cache_is_not_sent_again(endpoint: Endpoint, tmp_path: Path) -> None:
    code = (
        f"from huggingface_hub import hf_hub_download\nsay(hf_hub_download(MODEL, {WEIGHTS!r}, revision=sys.argv[1]))"
    )
    first = endpoint.python(tmp_path, code, "prod")
    assert filecmp.cmp(first, endpoint.folder(1) / WEIGHTS, shallow=False)
    assert [seen.status for seen in endpoint.recorder.files()] == [200]
    assert endpoint.python(tmp_path, code, "prod") == first
    assert {seen.method for seen in endpoint.recorder.seen} == {"HEAD"}
    assert endpoint.python(tmp_path, code, endpoint.sha("1")) == first
    assert endpoint.recorder.seen == []  # a commit never changes, so the client sends no request


def test_the_command_line_tool_downloads(endpoint: Endpoint, tmp_path: Path) -> None:
    tool = str(Path(CLIENT_PYTHON).parent / "hf")
    endpoint.run(tmp_path, [tool, "download", MODEL, "--revision", "1", "--local-dir", str(tmp_path / "here")])
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
    assert {seen.status for seen in endpoint.recorder.files()} <= {200, 206, 307}
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
    small_pieces: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = small_pieces.running.service.catalog.store
    read_range = store.read_range
    broken: list[int] = []

    def breaks_once(key: str, start: int, length: int) -> bytes:
        if key.endswith(WEIGHTS) and start >= 200_000 and not broken:
            broken.append(start)
            raise Unavailable("the disk is away")
        return read_range(key, start, length)

    monkeypatch.setattr(store, "read_range", breaks_once)
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
    found = small_pieces.python(tmp_path, code)
    assert filecmp.cmp(found, small_pieces.folder(1) / WEIGHTS, shallow=False)
    first, *others = small_pieces.recorder.files()
    assert (first.status, first.range) == (200, "")
    [resumed] = others
    assert resumed.status == 206
    match = re.fullmatch(r"bytes=(\d+)-", resumed.range)
    assert match is not None
    assert 100_000 <= int(match[1]) <= broken[0]


def test_long_lists_come_in_pages(small_pieces: Endpoint, tmp_path: Path) -> None:
    code = (
        "from huggingface_hub import HfApi\n"
        "found = HfApi().list_repo_tree(MODEL, revision='1', recursive=True)\n"
        "say([[file.path, file.size] for file in found])"
    )
    files = files_of(small_pieces.folder(1))
    assert small_pieces.python(tmp_path, code) == [[path.name, path.stat().st_size] for path in files]
    assert len(small_pieces.recorder.seen) == (len(files) + 1) // 2 > 1


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
