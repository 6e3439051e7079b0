"""Names of adapters: the name in a request, the number under which vLLM knows a version, and the version's folder.

Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath

from weighbridge._core.metadata import BaseVersion
from weighbridge._core.references import Reference, parse_reference
from weighbridge._core.resources import REF_LATEST, Version
from weighbridge.errors import InvalidArgument

FOLDER = "vllm-adapters"
"""Folder of adapters in the cache of clients. An adapter is recognised by its path in this folder."""
_MOST_DIGITS = 20
_LEAST, _NUMBERS = 1 << 30, 1 << 30
"""Numbers of adapters have 31 bits: vLLM keeps them in arrays of int32. Numbers that vLLM assigns itself start at 1."""


@dataclass(frozen=True)
class AdapterVersion:
    """One version of an adapter.

    Attributes:
        name: such as ``acme/alice@18``; never with a ref.
        base: its base version, such as ``acme/smol@17``.
        key: name of its folder; identical for the same push of that version.
        created_ms: when it was opened, as Unix time in milliseconds; 0 if no longer known.
        base_digest: digest of the base's manifest, as recorded in the adapter; empty if the adapter records none.
    """

    name: str
    base: str
    key: str
    created_ms: int = 0
    base_digest: str = ""

    @staticmethod
    def of(version: Version) -> AdapterVersion | None:
        """An adapter's version; None if the version is not an adapter."""
        base = BaseVersion.of(version.metadata)
        if base is None:
            return None
        name = f"{version.model}@{version.number}"
        said = "\0".join((name, str(base), base.digest, str(version.create_time_ms)))
        return AdapterVersion(
            name,
            str(base),
            hashlib.sha256(said.encode()).hexdigest()[:32],
            version.create_time_ms,
            base.digest,
        )

    @property
    def reference(self) -> Reference:
        """Model and version, separately."""
        return parse_reference(self.name)


@dataclass(frozen=True)
class Order:
    """An order to all workers of an engine to load an adapter's version.

    Attributes:
        name: such as ``acme/alice@18``.
        number: number under which vLLM knows it.
        path: path of its folder on the host of the API server.
        base: its base version.
        server, lane: server and lane of the service that stores it.
    """

    name: str
    number: int
    path: str
    base: str
    server: str | None = None
    lane: str | None = None


def asked(name: str) -> Reference | None:
    """Model and version that a request names; ``latest`` if it names no version; None if this is not the name of a
    version.

    Names of the service are ASCII. A JSON string may contain characters that a request to the service cannot carry,
    such as half of a surrogate pair.
    """
    if not name.isascii():
        return None
    try:
        found = parse_reference(name, need_version=False)
    except InvalidArgument:
        return None
    if found.model.count("/") != 1:
        return None
    if is_number(found.version):
        return Reference(found.model, str(int(found.version[:_MOST_DIGITS])))
    return Reference(found.model, found.version or REF_LATEST)


def is_number(version: str) -> bool:
    """Whether a version is named by its number."""
    return version.isascii() and version.isdecimal()


def numbers(name: str) -> Iterator[int]:
    """Candidate numbers of a version for vLLM, in order of preference.

    The first that no other name uses is chosen. All processes compute the same candidates without communication.
    """
    salt = 0
    while True:
        digest = hashlib.sha256(f"{salt}\0{name}".encode()).digest()
        yield _LEAST + int.from_bytes(digest[:4], "little") % _NUMBERS
        salt += 1


def key_in(path: str) -> str:
    """The `AdapterVersion.key` in the path of an adapter; empty if the path is not in the adapters' folder."""
    parts = PurePath(path).parts
    return parts[-1] if len(parts) > 1 and parts[-2] == FOLDER else ""
