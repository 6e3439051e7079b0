"""Documents about a version for Hugging Face's clients: commit, ETags of files, listings.

All functions are pure. The documents have the members that huggingface_hub and transformers read, with the names that
the Hugging Face Hub uses.

A **commit** permanently identifies one version of one model. It has 40 hexadecimal digits: the first 30 are from a
SHA-256 of the model's name, the number and the SHA-256 of the manifest; the last 10 are the number itself, so that the
version of a commit is found without a list of commits.

An **ETag** identifies the content of a file, independently of the file's name and version: clients use it as the file's
name in their cache, and compare it with other ETags. It is the SHA-256 of the content if the manifest has one
(`serve --sha256`). Only then do the documents have the member `lfs`, because clients treat 64 hexadecimal digits as a
SHA-256 and verify their downloads against it. Otherwise the ETag is ``xxh3-{XXH3-128}-{size}``, from the manifest's
digest. Clients cannot mistake it for a SHA-256 or for git's SHA-1.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, ClassVar
from urllib.parse import unquote

from weighbridge._core.file_names import folders_above, folders_of
from weighbridge._core.resources import REF_LATEST
from weighbridge._core.text.shortening import shown
from weighbridge.errors import NotFound
from weighbridge_storage.documents.names import MANIFEST_FILE, ModelName
from weighbridge_storage.head.head import Head
from weighbridge_storage.head.history import History
from weighbridge_storage.versions.digests import digest_bytes
from weighbridge_storage.versions.manifest import FileEntry, Manifest

MAIN = "main"
"""Default revision of clients: the tag of this name, or `latest` if the tag does not exist."""
HEAD = "HEAD"
"""Default revision of the Hub's JavaScript client: the same as `MAIN`, unless a tag has this name."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_NUMBER = re.compile(r"[0-9]{1,12}")
_DIGITS = 10
"""Hexadecimal digits of a version's number in a commit, enough for twelve decimal digits."""


class HubNotFound(NotFound):
    """A model, revision or file does not exist, with the error code that Hugging Face's clients expect.

    Attributes:
        code: value of ``X-Error-Code``, by which clients distinguish the cases.
        commit: commit of the version that lacks the file; empty if unknown.
    """

    code: ClassVar[str]

    def __init__(self, message: str, *, fix: str = "", commit: str = "") -> None:
        super().__init__(message, fix=fix)
        self.commit = commit


class RepoNotFound(HubNotFound):
    """The model does not exist."""

    code = "RepoNotFound"


class RevisionNotFound(HubNotFound):
    """The model does not have this durable version."""

    code = "RevisionNotFound"


class EntryNotFound(HubNotFound):
    """The version does not have this file."""

    code = "EntryNotFound"


@dataclass(frozen=True, slots=True)
class RequestedFile:
    """Model, revision and file in a client's URL.

    Attributes:
        model: ``namespace/name``, not validated.
        revision: the part after the verb; `MAIN` if the path has none.
        path: path of a file within the version; may be empty.
    """

    model: str
    revision: str
    path: str

    @staticmethod
    def of(raw_path: str, prefix: str = "/") -> RequestedFile:
        """Parse ``{prefix}{namespace}/{name}/{verb}/{revision}/{path}``.

        Args:
            raw_path: the path as the client sent it. In it, an escaped slash in a revision differs from a separator.
            prefix: the beginning of the path, which is not parsed.
        """
        parts = [unquote(part) for part in raw_path[len(prefix) :].split("/")]
        return RequestedFile("/".join(parts[:2]), parts[3] if len(parts) > 3 else MAIN, "/".join(parts[4:]))


@dataclass(frozen=True)
class HubVersion:
    """A durable version, for Hugging Face's clients.

    Attributes:
        model: the model.
        number: number of the version.
        commit: permanent identifier of the version.
        created_ms: time at which the version was opened, in milliseconds since 1970 UTC.
        files: all files of its folder, including the manifest, by name.
    """

    model: ModelName
    number: int
    commit: str
    created_ms: int
    files: Mapping[str, FileEntry]

    @staticmethod
    def of(manifest: Manifest, text: bytes) -> HubVersion:
        """The version that a manifest describes; ``text`` is the manifest as stored."""
        sha256 = hashlib.sha256(text).hexdigest()
        files = {**manifest.files, MANIFEST_FILE: replace(digest_bytes(text), sha256=sha256)}
        return HubVersion(
            manifest.model,
            manifest.version,
            commit_of(manifest.model, manifest.version, sha256),
            manifest.created_ms,
            dict(sorted(files.items())),
        )

    @cached_property
    def folders(self) -> frozenset[str]:
        """All folders that contain files, at every level."""
        return folders_of(self.files)

    @cached_property
    def folder_oids(self) -> Mapping[str, str]:
        """Identity of each folder's content, including subfolders: 40 hexadecimal digits."""
        digests = {folder: hashlib.sha256() for folder in self.folders}
        for name, file in self.files.items():
            inside = f"{name}\0{etag_of(file)}\n".encode()
            for folder in folders_above(name):
                digests[folder].update(inside)
        return {folder: digest.hexdigest()[:40] for folder, digest in digests.items()}

    def file(self, path: str) -> FileEntry:
        """One file. Raises EntryNotFound."""
        found = self.files.get(path)
        if found is None:
            raise EntryNotFound(
                f"{self.model}@{self.number} has no file {shown(path)}",
                fix="its manifest, weighbridge.json, lists all files",
                commit=self.commit,
            )
        return found


def commit_of(model: ModelName, number: int, manifest_sha256: str) -> str:
    """The commit of a version."""
    identity = f"weighbridge commit\0{model}\0{number}\0{manifest_sha256}".encode()
    return f"{hashlib.sha256(identity).hexdigest()[: 40 - _DIGITS]}{number:0{_DIGITS}x}"


def is_commit(revision: str) -> bool:
    """Whether a revision has the form of a commit. If so, it is treated as a commit, even if a tag has the same name.

    Clients do the same.
    """
    return _COMMIT.fullmatch(revision) is not None


def etag_of(file: FileEntry) -> str:
    """The ETag of a file's content, without quotes: its SHA-256 if known, and otherwise a string that cannot be
    mistaken for one.
    """
    return file.sha256 or f"xxh3-{file.xxh3_128}-{file.size}"


def number_of(model: ModelName, history: History, revision: str) -> int:
    """The number of the durable version that a revision names.

    The caller must check that a commit belongs to that version.

    Numbers and commits also find versions that were removed from the history but still exist, because clients request
    the files one by one.

    Args:
        model: name of the model, for the error.
        history: history of the model.
        revision: a number, a ref (not `live`, which may name a version that is not durable), a commit, `MAIN`, or
            `HEAD`.

    Raises:
        RevisionNotFound: the revision does not name a durable version.
    """
    number: int | None
    if is_commit(revision):
        number = int(revision[-_DIGITS:], 16)
    elif _NUMBER.fullmatch(revision):
        number = int(revision)
    else:
        refs = history.head.ref_numbers
        unasked = refs.get(MAIN, refs.get(REF_LATEST)) if revision in (MAIN, HEAD) else None
        number = refs.get(revision, unasked)
    if number is None or history.find(number) is None:
        raise no_revision(model, history.head, revision)
    return number


def no_revision(model: ModelName, head: Head, revision: str) -> RevisionNotFound:
    """The error for a revision that does not name a durable version."""
    return RevisionNotFound(
        f"{model} has no durable version {shown(revision)}",
        fix=f"refs it has: {', '.join(sorted(head.refs)) or 'none yet'}; or name a version by number or commit",
    )


def model_info(version: HubVersion, *, sizes: bool) -> dict[str, Any]:
    """Document for `HfApi.model_info`; ``sizes`` adds size and identity of each file."""
    return {
        "_id": version.commit[:24],
        "id": str(version.model),
        "modelId": str(version.model),
        "author": version.model.namespace,
        "sha": version.commit,
        "lastModified": _date(version.created_ms),
        "createdAt": _date(version.created_ms),
        "private": False,
        "gated": False,
        "disabled": False,
        "downloads": 0,
        "likes": 0,
        "tags": [],
        "siblings": [{"rfilename": name, **(_sibling(file) if sizes else {})} for name, file in version.files.items()],
    }


def _sibling(file: FileEntry) -> dict[str, Any]:
    sibling: dict[str, Any] = {"size": file.size, "blobId": etag_of(file)}
    if file.sha256:
        sibling["lfs"] = {"size": file.size, "sha256": file.sha256, "pointerSize": _pointer_size(file)}
    return sibling


def _pointer_size(file: FileEntry) -> int:
    """Size in bytes of the pointer file that Git LFS would store instead of the file."""
    return len(f"version https://git-lfs.github.com/spec/v1\noid sha256:{file.sha256}\nsize {file.size}\n")


def tree_page(
    version: HubVersion, path: str, after: str, limit: int, *, expand: bool, recursive: bool = False
) -> tuple[list[dict[str, Any]], str | None]:
    """A page of the document for `HfApi.list_repo_tree`.

    Args:
        version: the version.
        path: a folder in it; empty for the root.
        after: name of the file or folder after which the page begins.
        limit: maximum number of entries of the page.
        expand: whether to add the last commit of each entry.
        recursive: whether to include subfolders.

    Returns:
        Files and folders, and the name after which the next page begins; None if this page is the last.

    Raises:
        EntryNotFound: the folder does not exist.
    """
    if path and path not in version.folders:
        raise EntryNotFound(f"{version.model}@{version.number} has no folder {shown(path)}", commit=version.commit)
    inside = f"{path}/" if path else ""
    names = [
        name
        for name in sorted({*version.files, *version.folders})
        if name > after and name.startswith(inside) and (recursive or "/" not in name[len(inside) :])
    ]
    page = names[:limit]
    return [_tree_entry(version, name, expand) for name in page], page[-1] if len(names) > limit else None


def paths_info(version: HubVersion, paths: Sequence[str], *, expand: bool) -> list[dict[str, Any]]:
    """Document for `HfApi.get_paths_info`; paths that do not exist are left out."""
    there = version.files.keys() | version.folders
    return [_tree_entry(version, path, expand) for path in dict.fromkeys(paths) if path in there]


def _tree_entry(version: HubVersion, name: str, expand: bool) -> dict[str, Any]:
    file = version.files.get(name)
    entry: dict[str, Any]
    if file is None:
        entry = {"type": "directory", "path": name, "size": 0, "oid": version.folder_oids[name]}
    else:
        entry = {"type": "file", "path": name, "size": file.size, "oid": etag_of(file)}
        if file.sha256:
            entry["lfs"] = {"oid": file.sha256, "size": file.size, "pointerSize": _pointer_size(file)}
    if expand:
        entry["lastCommit"] = {
            "id": version.commit,
            "title": f"version {version.number}",
            "date": _date(version.created_ms),
        }
    return entry


def refs_document(head: Head, commits: Mapping[int, str]) -> dict[str, Any]:
    """Document for `HfApi.list_repo_refs`: `main` and `latest` are branches, because they move; all other refs are
    tags.

    Args:
        head: head of the model.
        commits: commits of the versions that its refs name, by number.
    """
    refs = head.ref_numbers
    named = {MAIN: refs.get(MAIN, refs.get(REF_LATEST)), REF_LATEST: refs.get(REF_LATEST)}
    branches = {name: number for name, number in named.items() if number is not None}
    tags = {name: number for name, number in sorted(refs.items()) if name not in branches}
    return {
        "branches": _refs("heads", branches, commits),
        "tags": _refs("tags", tags, commits),
        "converts": [],
    }


def _refs(kind: str, refs: Mapping[str, int], commits: Mapping[int, str]) -> list[dict[str, str]]:
    return [
        {"name": name, "ref": f"refs/{kind}/{name}", "targetCommit": commits[number]}
        for name, number in refs.items()
        if number in commits
    ]


def whoami(name: str) -> dict[str, Any]:
    """Document for `HfApi.whoami`.

    Args:
        name: name of the caller; ``anonymous`` if the service has no access control.
    """
    return {
        "type": "user",
        "name": name,
        "fullname": name,
        "orgs": [],
        "auth": {"type": "access_token", "accessToken": {"displayName": name, "role": "read"}},
    }


def _date(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
