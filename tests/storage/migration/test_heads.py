"""Heads of formats 1 and 2, read as heads of now."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.heads import Nodes, history, stored
from weighbridge._core.resources import Retention
from weighbridge.errors import DataLoss
from weighbridge_storage.documents.entries import FailedEntry, OpenEntry, VersionEntry
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head.head import Head
from weighbridge_storage.head.head_store import HeadStore
from weighbridge_storage.migration.head_format2 import read_head
from weighbridge_storage.stores.local import LocalStore

SMOL = ModelName("acme", "smol")


def version(number: int) -> dict[str, Any]:
    return {
        "number": number,
        "step": number * 10,
        "run": "r",
        "created_ms": 1767225600000 + number,
        "nbytes": 269060381,
        "tensor_count": 272,
        "files_id": "f1",
        "write_id": f"w{number}",
    }


def format_2(count: int = 3) -> dict[str, Any]:
    """As a service of before has written it."""
    return {
        "format": 2,
        "generation": 9,
        "next_version": count + 5,
        "files_id": "f2",
        "registration": {"dtype": "BF16", "files": ["config.json"]},
        "versions": [version(number) for number in range(2, count + 2)],
        "open": [
            {
                "number": count + 3, "request_id": "q", "step": 7, "run": "r", "ranks": 64, "created_ms": 5,
                "until_ms": 6, "files_id": "f2", "parent": 3, "claim": "c",
            }
        ],
        "failed": [{"number": count + 4, "reason": "gone", "failed_ms": 8}],
        "refs": {"latest": count + 1, "prod": 2},
        "retention": {"keep_last": 10, "keep_every": 0, "keep_younger_s": 5},
        "tombstones": [{"deleted_ms": 99, "version": version(1)}],
        "writes": ["id1", "id2"],
    }  # fmt: skip


def entry(number: int) -> VersionEntry:
    return VersionEntry(number, number * 10, "r", 1767225600000 + number, 269060381, 272, "f1", f"w{number}")


def read(document: dict[str, Any]) -> Head:
    return read_head(json.dumps(document).encode(), SMOL.head_key)


def test_a_head_of_format_2_says_the_same_as_a_head_of_now() -> None:
    head = read(format_2())
    found = history(head)
    assert found.versions() == {number: entry(number) for number in (2, 3, 4)}
    assert found.retired() == {1: replace(entry(1), retired_ms=99)}
    assert head.open == {6: OpenEntry(6, "q", 7, "r", 64, 5, 6, "f2", 3, "c")}
    assert head.failed == {7: FailedEntry(7, "gone", 8)}
    assert head.ref_numbers == {"latest": 4, "prod": 2}
    assert head.retention == Retention(10, 0, 5)
    assert (head.generation, head.next_version, head.files_id) == (9, 8, "f2")
    assert (head.registration, head.writes) == (
        {"dtype": "BF16", "files": ["config.json"]},
        ("id1", "id2"),
    )
    assert Head.from_json(head.to_json()) == head


def test_a_head_of_format_1_has_no_open_versions_and_no_rules() -> None:
    document = format_2()
    for name in ("open", "failed", "retention"):
        del document[name]
    head = read(document | {"format": 1, "tombstones": {"1": 99}})
    assert history(head).versions() == {number: entry(number) for number in (2, 3, 4)}
    assert (history(head).retired(), head.open, head.retention) == ({}, {}, Retention())
    assert head.next_version == 8


def test_a_long_history_of_before_is_settled_into_a_short_head_and_a_tree(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    head = read(format_2(2000))
    settled = HeadStore(store).settle(SMOL, head)
    store.put(SMOL.head_key, settled.to_json(), mode="create")
    assert len(settled.to_json()) < 20_000
    found = stored(store, SMOL)
    assert found.versions() == {number: entry(number) for number in range(2, 2002)}
    assert found.retired() == {1: replace(entry(1), retired_ms=99)}
    assert Nodes().history(head).versions() == found.versions()


BREAKS: list[Callable[[dict[str, Any]], object]] = [
    lambda d: d.update(format=3),
    lambda d: d.update(surprise=1),
    lambda d: d["versions"].append(d["versions"][0]),
    lambda d: d["versions"][0].pop("nbytes"),
    lambda d: d["versions"][0].update(number=99),
    lambda d: d["refs"].update(latest=2),
    lambda d: d["refs"].update(prod=1),
    lambda d: d["tombstones"].append(d["tombstones"][0]),
    lambda d: d["tombstones"][0].update(version=d["versions"][0]),
    lambda d: d["retention"].update(more=1),
    lambda d: d["open"][0].update(number=2),
    *[lambda d, name=name: d.pop(name) for name in format_2()],
]


@pytest.mark.parametrize("number", range(len(BREAKS)))
def test_a_head_of_before_that_contradicts_itself_is_data_loss(number: int) -> None:
    document = format_2()
    read(document)
    BREAKS[number](document)
    with pytest.raises(DataLoss, match=SMOL.head_key):
        read(document)
