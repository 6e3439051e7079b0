"""Signatures of durable versions: handed out as they are, and taken if they are about the version. The service knows no keys."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from weighbridge._core.manifest_text import ManifestText
from weighbridge._core.resources import Signature, VersionState
from weighbridge.errors import FailedPrecondition, InvalidArgument, NotFound
from weighbridge_service.catalog.catalog import Catalog
from weighbridge_storage.documents.names import MANIFEST_FILE, ModelName, version_key
from weighbridge_storage.versions.reading import read_manifest_text
from weighbridge_storage.versions.signatures import read_signatures, write_signature

log = logging.getLogger(__name__)

SignatureCheck = Callable[[ManifestText, bytes], str]
"""The signer of a signature, as text. Raises InvalidArgument if it is none, or not about the version of the manifest."""


class Signatures:
    """The signatures of all models' versions. Thread-safe; any number of replicas may add some at a time.

    Args:
        catalog: which versions there are.
        check: checks signatures that are added.
    """

    def __init__(self, catalog: Catalog, check: SignatureCheck) -> None:
        self._catalog = catalog
        self._check = check
        self._adding = threading.Lock()

    def manifest_part(self, name: str, number: int, offset: int, most: int) -> tuple[bytes, int]:
        """A part of a version's manifest as it is stored, and the length of the whole.

        Args:
            name: the model.
            number: which version.
            offset: where the part begins.
            most: bytes of it.

        Raises:
            NotFound: no such model or version.
            FailedPrecondition: it is not durable yet.
            InvalidArgument: the manifest is shorter.
        """
        with self._catalog.reading_stored(name, str(number)) as found:
            key = version_key(ModelName.parse(name), found.number, MANIFEST_FILE)
            total = self._catalog.store.size(key)
            if offset >= total:
                raise InvalidArgument(f"the manifest of {name}@{number} has {total} bytes, not {offset}")
            return self._catalog.store.read_range(key, offset, min(most, total - offset)), total

    def of_version(self, name: str, version: str) -> tuple[int, tuple[Signature, ...]]:
        """The number of a version, and its signatures.

        Raises:
            NotFound: no such model, version or ref.
            FailedPrecondition: it is not durable yet.
        """
        with self._catalog.reading_stored(name, version) as found:
            return found.number, read_signatures(self._catalog.store, ModelName.parse(name), found.number)

    def get(self, name: str, version: str, signature: str) -> Signature:
        """One signature of a version. Raises as `of_version`, and NotFound if the version has no such one."""
        number, there = self.of_version(name, version)
        for each in there:
            if each.id == signature:
                return each
        raise NotFound(f"{name}@{number} has no signature {signature[:64]!r}")

    def add(self, name: str, number: int, content: bytes, by: str = "") -> str:
        """Put a signature to a version; its id.

        Args:
            name: the model.
            number: which version.
            content: the signature, as a bundle's JSON text.
            by: the identity that puts it there; empty if there is none to be told from others.

        Raises:
            NotFound: no such model or version.
            FailedPrecondition: it is not durable yet, or was taken out of history.
            InvalidArgument: the content is too large, no signature, or not about this version.
            ResourceExhausted: the version has as many as one may have, or as many by this identity.
        """
        model = ModelName.parse(name)
        with self._catalog.reading_stored(name, str(number)) as found:
            if found.state is VersionState.RETIRED:
                raise FailedPrecondition(f"{found} was taken out of history", fix="push its weights again")
            manifest = ManifestText.read(read_manifest_text(self._catalog.store, model, number))
            signer = self._check(manifest, content)
            with self._adding:  # each counts those before it
                added = write_signature(self._catalog.store, model, number, content, by)
        log.info("%s was signed by %s: %s", found, signer, added[:12])
        return added
