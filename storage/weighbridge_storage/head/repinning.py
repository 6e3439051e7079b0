"""Rewrite of the pins of the bases of an adapter's versions, for bases whose heads have lost them."""

from __future__ import annotations

from functools import partial

from weighbridge._core.metadata import BaseVersion
from weighbridge.errors import NotFound
from weighbridge_storage.documents.entries import PinEntry
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head.head import Head
from weighbridge_storage.head.head_store import HeadStore
from weighbridge_storage.head.history import History
from weighbridge_storage.head.pins import pin


def repin(heads: HeadStore, adapter: ModelName, history: History) -> None:
    """Pin the bases of an adapter's versions that are not pinned. Deleted bases are skipped.

    Args:
        heads: the heads of all models.
        adapter: the adapter's name.
        history: history of the adapter.

    Raises:
        WeighbridgeError: as `HeadStore.edit`.
    """
    bases = (BaseVersion.of(entry.metadata) for entry in history.versions().values())
    for model, number in sorted({(base.model, base.number) for base in bases if base is not None}):
        try:
            heads.edit(ModelName.parse(model), partial(_pinned, PinEntry(number, str(adapter))))
        except NotFound:
            continue


def _pinned(asked: PinEntry, history: History) -> tuple[Head, None]:
    return pin(history, asked, len(history.head.pins) + 1), None
