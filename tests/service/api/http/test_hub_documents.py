"""Do commits and ETags stand for one version and one content, and do pages make up the whole list?"""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from tests.support.executed_lines import executed_lines
from weighbridge_service.api.http.hub_documents import (
    HubVersion,
    RequestedFile,
    commit_of,
    etag_of,
    is_commit,
    paths_info,
    tree_page,
)
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.versions.manifest import FileEntry

SMOL = ModelName("acme", "smol")
model = st.builds(ModelName, st.sampled_from(["a", "acme"]), st.sampled_from(["b", "smol"]))
number = st.integers(1, 999_999_999_999)
digest = st.sampled_from(["0" * 64, "1" * 64])
identity = st.tuples(model, number, digest)


@given(identity, identity)
def test_a_commit_names_one_manifest_of_one_version(
    one: tuple[ModelName, int, str], other: tuple[ModelName, int, str]
) -> None:
    commit = commit_of(*one)
    assert is_commit(commit)
    assert int(commit[-10:], 16) == one[1], "it leads back to its version"
    assert (commit == commit_of(*other)) == (one == other)


def test_what_is_no_commit_is_not_taken_for_one() -> None:
    commit = commit_of(SMOL, 1, "0" * 64)
    for text in ("", "1", "main", commit[:-1], commit + "0", commit.upper().replace("0", "A"), commit + "\n"):
        assert not is_commit(text)


def test_an_etag_names_content_whatever_the_file_is_called() -> None:
    content = FileEntry(3, "a" * 32, "b" * 64)
    assert etag_of(content) == etag_of(FileEntry(3, "a" * 32, "c" * 64))
    assert etag_of(content) != etag_of(FileEntry(4, "a" * 32, "b" * 64))
    assert etag_of(content) != etag_of(FileEntry(3, "d" * 32, "b" * 64))


def test_an_etag_reads_like_a_sha256_or_a_git_hash_only_if_it_is_one() -> None:
    assert re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", etag_of(FileEntry(3, "a" * 32, "b" * 64))) is None
    assert etag_of(FileEntry(3, "a" * 32, "b" * 64, "c" * 64)) == "c" * 64


@given(st.sets(st.sampled_from([f"model-{n}.safetensors" for n in range(12)])), st.integers(1, 5))
def test_pages_one_after_the_other_are_all_files(names: set[str], limit: int) -> None:
    files = {name: FileEntry(len(name), "a" * 32, "b" * 64) for name in sorted(names)}
    version = HubVersion(SMOL, 7, commit_of(SMOL, 7, "0" * 64), 1_000, files)
    found: list[str] = []
    after: str | None = ""
    while after is not None:
        page, after = tree_page(version, "", after, limit, expand=False)
        assert len(page) <= limit
        found += [entry["path"] for entry in page]
    assert found == sorted(names)
    assert [entry["path"] for entry in paths_info(version, [*found, "none", *found], expand=True)] == found


def test_a_folder_has_another_identity_once_a_file_below_it_has_another_content() -> None:
    def oids(content: str) -> dict[str, str]:
        files = {
            "a/b/x.json": FileEntry(3, content * 32, "b" * 64),
            "c/y.json": FileEntry(3, "a" * 32, "b" * 64),
        }
        page, _ = tree_page(HubVersion(SMOL, 7, "0" * 40, 1, files), "", "", 9, expand=False, recursive=True)
        return {entry["path"]: entry["oid"] for entry in page if entry["type"] == "directory"}

    one, other = oids("a"), oids("d")
    assert one.keys() == {"a", "a/b", "c"}
    assert all(re.fullmatch(r"[0-9a-f]{40}", oid) for oid in one.values())
    assert {folder for folder in one if one[folder] != other[folder]} == {"a", "a/b"}


def test_the_work_of_a_page_of_folders_grows_with_the_number_of_files_alone() -> None:
    def lines(count: int) -> int:
        files = {f"{number:05}/a/b/x.json": FileEntry(3, "a" * 32, "b" * 64) for number in range(count)}
        version = HubVersion(SMOL, 7, "0" * 40, 1, files)
        paths = [f"{number:05}" for number in range(count)]
        return executed_lines(lambda: paths_info(version, paths, expand=False))

    assert lines(800) < 4.5 * lines(200)


def test_a_quoted_slash_is_part_of_a_revision() -> None:
    assert RequestedFile.of("/acme/smol/resolve/refs%2Fpr%2F1/a/b.json") == RequestedFile(
        "acme/smol", "refs/pr/1", "a/b.json"
    )
    assert RequestedFile.of("/api/models/acme/smol", "/api/models/") == RequestedFile("acme/smol", "main", "")
