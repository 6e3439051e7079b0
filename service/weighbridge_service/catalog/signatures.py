"""Signatures of durable versions.

The service returns them as stored, and accepts one if it signs the version's manifest. It has no keys.
"""

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
"""Returns the signer of a signature, as text.

Raises InvalidArgument if it is not a signature, or not of the manifest's version.
"""


class StoredSignatures:
    """Signatures of all models' versions. Thread-safe; any number of replicas may add some at the same time.

    Args:
        catalog: the versions.
        check: checks signatures that are added.
    """

    def __init__(self, catalog: Catalog, check: SignatureCheck) -> None:
        self._catalog = catalog
        self._check = check
        self._adding = threading.Lock()

    def manifest_part(self, name: str, number: int, offset: int, most: int) -> tuple[bytes, int]:
        """A part of a version's manifest as it is stored, and the length of the whole manifest in bytes.

        Args:
            name: the model.
            number: number of the version.
            offset: offset of the part in bytes.
            most: most bytes of the part.

        Raises:
            NotFound: the model or version does not exist.
            FailedPrecondition: the version is not durable yet.
            InvalidArgument: the manifest is shorter.
        """
        with self._catalog.reading_stored(name, str(number)) as found:
            key = version_key(ModelName.parse(name), found.number, MANIFEST_FILE)
            total = self._catalog.store.size(key)
            if offset >= total:
                raise InvalidArgument(f"the manifest of {name}@{number} has {total} bytes, not {offset}")
            return self._catalog.store.read_range(key, offset, min(most, total - offset)), total

    def of_version(self, name: str, version: str) -> tuple[int, tuple[Signature, ...]]:
        """Number of a version, and its signatures.

        Raises:
            NotFound: the model, version or ref does not exist.
            FailedPrecondition: the version is not durable yet.
        """
        with self._catalog.reading_stored(name, version) as found:
            return found.number, read_signatures(self._catalog.store, ModelName.parse(name), found.number)

    def get(self, name: str, version: str, signature: str) -> Signature:
        """One signature of a version, by its id.

        Raises the same errors as `of_version`, and NotFound if the version does not have it.
        """
        number, there = self.of_version(name, version)
        for each in there:
            if each.id == signature:
                return each
        raise NotFound(f"{name}@{number} has no signature {signature[:64]!r}")

    def add(self, name: str, number: int, content: bytes, by: str = "") -> str:
        """Add a signature to a version. Returns its id.

        Args:
            name: the model.
            number: number of the version.
            content: the signature, as a bundle's JSON text.
            by: name of the identity that adds it; empty if it has none.

        Raises:
            NotFound: the model or version does not exist.
            FailedPrecondition: the version is not durable yet, or was taken out of history.
            InvalidArgument: the content is too large, not a signature, or not of this version.
            ResourceExhausted: the version has the most signatures that one may have, or the most by one identity.
        """
        model = ModelName.parse(name)
        with self._catalog.reading_stored(name, str(number)) as found:
            if found.state is VersionState.RETIRED:
                raise FailedPrecondition(f"{found} was taken out of history", fix="push its weights again")
            manifest = ManifestText.read(read_manifest_text(self._catalog.store, model, number))
            signer = self._check(manifest, content)
            with self._adding:  # `write_signature` counts the signatures that exist
                added = write_signature(self._catalog.store, model, number, content, by)
        log.info("%s was signed by %s: %s", found, signer, added[:12])
        return added
