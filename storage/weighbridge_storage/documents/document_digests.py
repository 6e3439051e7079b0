"""Digests of stored documents, by which damage is told from what was written.

A node of a history has the digest of its text in its name, and is named by what leads to it. Heads and manifests have names that say
nothing of what is in them, so their texts end with the digest of what comes before. Either digest is over bytes and not over
values: whoever writes a document is free in how it writes JSON, and whoever reads one checks it before it parses it.
"""

from __future__ import annotations

import re
from typing import Any

from blake3 import blake3

from weighbridge.errors import DataLoss
from weighbridge_storage.documents import strict_json

REPAIR = "stop all services of the store, then run `weighbridge fsck STORE --repair`, which goes by manifests"
"""What to do about a damaged or missing head or node."""
_FIELD = "digest"
_END = re.compile(rb',"digest":"([0-9a-f]{64})"}\Z')
_END_LENGTH = 77


def digest_of(text: bytes) -> str:
    """BLAKE3-256 of a text, as 64 lower-case hexadecimal digits."""
    return blake3(text).hexdigest()


def encode(document: dict[str, Any]) -> bytes:
    """A JSON document as text that ends with its digest. Raises as `strict_json.encode`."""
    start = strict_json.encode(document)[:-1]
    return start + f',"{_FIELD}":"{digest_of(start)}"}}'.encode()


def decode(data: bytes, where: str, current: int) -> strict_json.Fields:
    """The fields of a document that ends with its digest; `format` and the digest are taken.

    Args:
        data: its text.
        where: what to call it in errors.
        current: the format that it should have.

    Raises:
        DataLoss: it does not agree with its digest, or is malformed.
        FailedPrecondition: it has another format.
    """
    ends = _END.match(data, max(len(data) - _END_LENGTH, 0))
    if ends is None:
        raise DataLoss(f"{where} does not end with its digest")
    if ends[1].decode() != digest_of(data[:-_END_LENGTH]):
        raise DataLoss(f"{where} does not agree with its digest")
    document = strict_json.decode(data, where)
    document.check_format(current)
    document.text(_FIELD)
    return document
