"""Digests of stored documents. They reveal damage.

The name of a history node contains the digest of its text, and its parent refers to it by this name. The names of heads
and manifests do not depend on their content, so their texts end with the digest of the preceding bytes. Both digests
cover bytes instead of values: a writer may format JSON in any way, and a reader checks a document before it parses it.
"""

from __future__ import annotations

import re
from typing import Any

from blake3 import blake3

from weighbridge.errors import DataLoss
from weighbridge_storage.documents import strict_json

REPAIR = "stop all services of the store, then run `weighbridge fsck STORE --repair`, which reads the manifests"
"""Remedy for a damaged or missing head or node, for messages."""
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
    """The fields of a document that ends with its digest; `format` and the digest are checked and removed.

    Args:
        data: its text.
        where: its name in errors.
        current: the format that it should have.

    Raises:
        DataLoss: the document does not match its digest, or is malformed.
        FailedPrecondition: the document has another format.
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
