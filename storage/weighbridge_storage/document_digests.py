"""Digests of a model's documents, by which damage is told from what was written.

A node of a history has the digest of its text in its name, and is named by what leads to it. A head has nothing above it, so its text
ends with the digest of what comes before. Either digest is over bytes and not over values, so whoever writes a document is free in how it
writes JSON, and whoever reads one checks it before it parses it.
"""

from __future__ import annotations

import re

from blake3 import blake3

from weighbridge.errors import DataLoss

FIELD = "digest"
"""The last field of a document that ends with its digest."""
REPAIR = "stop all services of the store, then run `weighbridge fsck STORE --repair`, which goes by manifests"
"""What to do about a document that is damaged or missing."""
_END = re.compile(rb',"digest":"([0-9a-f]{64})"}\Z')
_END_LENGTH = 77


def digest_of(text: bytes) -> str:
    """BLAKE3-256 of a text, as 64 lower-case hexadecimal digits."""
    return blake3(text).hexdigest()


def with_digest(text: bytes) -> bytes:
    """The text of a JSON object that has other fields, with its digest as the last one."""
    start = text[:-1]
    return start + f',"{FIELD}":"{digest_of(start)}"}}'.encode()


def ends_with_digest(data: bytes, where: str) -> bool:
    """Whether a document ends with the digest of what comes before. Older formats have none.

    Args:
        data: its text.
        where: what to call it in errors.

    Raises:
        DataLoss: it ends with another digest; says how the document is rebuilt.
    """
    found = _END.match(data, max(len(data) - _END_LENGTH, 0))
    if found is not None and found[1].decode() != digest_of(data[:-_END_LENGTH]):
        raise DataLoss(f"{where} does not agree with its digest", fix=REPAIR)
    return found is not None
