"""Lookup of durable versions for Hugging Face's clients, and reads of their files."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from weighbridge._core.lru import Cache
from weighbridge.errors import DataLoss, InvalidArgument, NotFound
from weighbridge_service.api.http.hub_documents import (
    HubVersion,
    RepoNotFound,
    RevisionNotFound,
    is_commit,
    no_revision,
    number_of,
    refs_document,
)
from weighbridge_service.catalog.catalog import Catalog
from weighbridge_service.catalog.store_readers import StoreReaders, reading_since
from weighbridge_storage.documents.names import MANIFEST_FILE, ModelName, version_key
from weighbridge_storage.head.history import History
from weighbridge_storage.memory.images import ImageHold
from weighbridge_storage.memory.read_checks import DigestedRange, ReadChecks
from weighbridge_storage.versions.manifest import Manifest
from weighbridge_storage.versions.reading import read_manifest_text

URL_SECONDS = 3600
"""A presigned URL of a file in the store is valid for this many seconds.

A download must begin in this time, and may continue afterwards.
"""
_KEPT_FILES = 100_000
"""Maximum number of files of cached versions, over all models. Each takes about 300 bytes."""

_KEPT_CHECKS = 10_000
_REFUSED_SECONDS = 60.0
"""If the bytes of a file do not match its digest, the file is refused for this many seconds.

Then it is read and verified again.
"""


class Hub:
    """The durable versions in a catalog, by the revisions that Hugging Face's clients use. Thread-safe.

    Args:
        catalog: the catalog of models.
        readers: registry of readers of the store.
    """

    def __init__(self, catalog: Catalog, readers: StoreReaders) -> None:
        self._catalog = catalog
        self._readers = readers
        self._versions: Cache[HubVersion] = Cache(_KEPT_FILES, lambda version: 1 + len(version.files))
        self._checks: Cache[ReadChecks] = Cache(_KEPT_CHECKS)

    def version(self, name: str, revision: str) -> HubVersion:
        """The version of a revision.

        Raises:
            RepoNotFound: the model does not exist.
            RevisionNotFound: the model does not have this durable version.
        """
        asked_ms = self._readers.clock()
        model, history = self._model(name)
        number = number_of(model, history, revision)
        self._readers.visit(model, number, reading_since(history.find(number), asked_ms))
        found = self._version(model, history, number)
        if is_commit(revision) and revision != found.commit:
            raise no_revision(model, history.head, revision)
        return found

    def refs(self, name: str) -> dict[str, object]:
        """The document about a model's refs. Raises RepoNotFound."""
        model, history = self._model(name)
        numbers = {n for n in history.head.ref_numbers.values() if history.find(n) is not None}
        commits = {number: self._version(model, history, number).commit for number in numbers}
        return refs_document(history.head, commits)

    def read(self, version: HubVersion, path: str, start: int, length: int) -> bytes:
        """A part of a file.

        Raises:
            RevisionNotFound: the version has been deleted.
            DataLoss: the file is missing from the store or shorter than in the manifest, or, once all of it was read,
                its bytes do not match the digest.
        """
        with self._unless_deleted(version.model, version.number):
            data = self._read(version, path, start, length)
            self._checks_of(version, path).took(start, data)
            return data

    def _read(self, version: HubVersion, path: str, start: int, length: int) -> bytes:
        try:
            return self._catalog.store.read_range(version_key(version.model, version.number, path), start, length)
        except (NotFound, InvalidArgument) as error:
            raise DataLoss(
                f"{path} of {version.model}@{version.number} in the store does not agree with its manifest"
            ) from error

    def _checks_of(self, version: HubVersion, path: str) -> ReadChecks:
        """The verification of a file against its digest. A damaged file is refused for a while, even to requests for a
        part of it, because clients resume interrupted downloads.
        """
        key, begin = (version.commit, path), partial(self._begin_checks, version, path)
        # concurrent readers of parts of a file share one verification, because no single reader reads all bytes
        found = self._checks.get_or_make(key, begin)
        if found.damaged and time.monotonic() - found.damaged_at > _REFUSED_SECONDS:
            found = self._checks.put_instead(key, found, begin())
        return found

    def _begin_checks(self, version: HubVersion, path: str) -> ReadChecks:
        file, title = version.file(path), f"{version.model}@{version.number}"
        parts = [DigestedRange(path, 0, file.size, file.xxh3_128)] if file.size else []
        # a remote store is not read twice: there, only a file that is read from its beginning to its end is verified
        near = self._catalog.store.is_near
        return ReadChecks(path, title, parts, partial(self._read, version, path) if near else None)

    def begin(self, version: HubVersion) -> ImageHold:
        """Register a reader of a file, until the hold is released."""
        # the lookup of the version called `visit`, which recorded when reading began
        return self._readers.begin(version.model, version.number, self._readers.clock())

    def url(self, version: HubVersion, path: str) -> str | None:
        """Presigned URL of a file in the store, valid for `URL_SECONDS`; None if the store cannot presign URLs."""
        url = self._catalog.store.presigned_url(version_key(version.model, version.number, path), URL_SECONDS)
        if url is not None:
            self._readers.extend(version.model, version.number, URL_SECONDS * 1000)
        return url

    def _model(self, name: str) -> tuple[ModelName, History]:
        try:
            model = ModelName.parse(name)
            return model, self._catalog.history(model)
        except (InvalidArgument, NotFound) as error:
            raise RepoNotFound(error.message, fix=error.fix) from error

    def _version(self, model: ModelName, history: History, number: int) -> HubVersion:
        def read() -> HubVersion:
            text = read_manifest_text(self._catalog.store, model, number)
            return HubVersion.of(Manifest.from_json(text, version_key(model, number, MANIFEST_FILE)), text)

        entry = history.find(number)
        if entry is None:
            raise no_revision(model, history.head, str(number))
        with self._unless_deleted(model, number):
            # a model that was deleted and registered again may reuse the number, so the key contains the write id
            return self._versions.get_or_make((model, number, entry.write_id), read)

    @contextmanager
    def _unless_deleted(self, model: ModelName, number: int) -> Iterator[None]:
        try:
            with self._catalog.unless_deleted(model, number):
                yield
        except NotFound as error:
            raise RevisionNotFound(error.message, fix=error.fix) from error
