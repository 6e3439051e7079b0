"""Reader of heads of formats 1 and 2, as heads of now.

The text of format 2 is one JSON object, with all versions of the model::

    {"format": 2, "generation": 9, "next_version": 6, "files_id": "...", "registration": {...},
     "versions": [{"number": 2, "step": 100, "run": "r1", "created_ms": 1767225600000, "nbytes": 269060381,
                   "tensor_count": 272, "files_id": "...", "write_id": "..."}, ...],
     "open": [{"number": 5, "request_id": "...", "step": 130, "run": "r1", "ranks": 64, "created_ms": 1767225900000,
               "until_ms": 1767226500000, "files_id": "...", "parent": 3, "claim": "..."}],
     "failed": [{"number": 4, "reason": "...", "failed_ms": 1767225800000}],
     "refs": {"latest": 3, "prod": 2},
     "retention": {"keep_last": 10, "keep_every": 100, "keep_younger_s": 86400},
     "tombstones": [{"deleted_ms": 1767229200000, "version": {"number": 1, ...}}], "writes": ["...", ...]}

Format 1 has neither open and failed versions nor a retention, and its tombstones are of another form. What those say is not needed:
the numbers are never given again, and their objects are swept away.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weighbridge._core.resources import Retention
from weighbridge.errors import DataLoss
from weighbridge_storage.documents import entry_json, strict_json
from weighbridge_storage.documents.entries import FailedEntry, OpenEntry, Ref, VersionEntry
from weighbridge_storage.documents.names import HEAD_FILE
from weighbridge_storage.head.head import Head

FORMATS = (1, 2)
_RULES = ("keep_last", "keep_every", "keep_younger_s")


def read_head(data: bytes, where: str = HEAD_FILE) -> Head:
    """The head of now that says what a head of format 1 or 2 says. It holds all entries itself, so it is to be settled.

    Args:
        data: the text of the `head.json`.
        where: what to call it in errors.

    Raises:
        DataLoss: it is malformed, contradicts itself, or has another format.
    """
    document = strict_json.decode(data, where)
    found = document.integer("format")
    if found not in FORMATS:
        raise DataLoss(f"{where} has format {found}, and formats 1 and 2 are to be migrated")
    refs = strict_json.Fields(document.table("refs"), f"{where}, refs")
    with strict_json.malformed_as_data_loss(where):
        head = Head(
            generation=document.integer("generation", 1),
            next_version=document.integer("next_version", 1),
            files_id=document.text("files_id"),
            registration=document.table("registration"),
            recent=entry_json.list_from_json(VersionEntry, document.array("versions"), f"{where}, versions"),
            refs={name: Ref(refs.integer(name, 1)) for name in refs.names},
            writes=tuple(document.array("writes")),
        )
        if found == 1:
            document.table("tombstones")
        else:
            head = _with_format_2(head, document)
    document.end()
    return head


def _with_format_2(head: Head, document: strict_json.Fields) -> Head:
    """The head with what format 1 does not have."""
    where = document.where
    recent = dict(head.recent)
    for i, item in enumerate(document.array("tombstones")):
        found = strict_json.Fields(item, f"{where}, tombstones[{i}]")
        entry = entry_json.from_json(VersionEntry, found.table("version"), f"{found.where}, version")
        if entry.number in recent:
            raise DataLoss(f"{where} lists version {entry.number} twice")
        recent[entry.number] = replace(entry, retired_ms=max(found.integer("deleted_ms"), 1))
        found.end()
    retention = strict_json.Fields(document.table("retention"), f"{where}, retention")
    rules: dict[str, Any] = {name: retention.integer(name) for name in _RULES}
    retention.end()
    return replace(
        head,
        recent=recent,
        open=entry_json.list_from_json(OpenEntry, document.array("open"), f"{where}, open"),
        failed=entry_json.list_from_json(FailedEntry, document.array("failed"), f"{where}, failed"),
        retention=Retention(**rules),
    )
