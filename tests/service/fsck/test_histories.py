"""Histories with damaged nodes: are they rebuilt, and does no whole version go with a node?"""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from tests.service.fsck.damaged_stores import LONG, NAME, findings, history_of, repaired, without_writers
from tests.support.heads import edit_document
from tests.support.small_stores import spoil, version_folder
from weighbridge_storage.stores.local import LocalStore


@pytest.mark.usefixtures("long")
@pytest.mark.parametrize("how", ["lost", "spoilt", "empty"])
def test_a_history_is_rebuilt_whichever_node_is_damaged(
    folder: Path, opened: LocalStore, tmp_path: Path, how: str
) -> None:
    before = history_of(opened, LONG)
    nodes = sorted((folder / LONG.prefix / "history").iterdir())
    assert len(nodes) > 2
    for index in range(len(nodes)):
        copy = shutil.copytree(folder, tmp_path / f"{index}")
        path = copy / nodes[index].relative_to(folder)
        if how == "lost":
            path.unlink()
        elif how == "spoilt":
            spoil(path, 0)
        else:
            path.write_bytes(b"")
        repaired(copy, model=LONG)
        with closing(LocalStore(copy)) as store:
            after = history_of(store, LONG)
            assert without_writers(after) == without_writers(before)
            assert after.head.refs == before.head.refs
            assert after.head.next_version == before.head.next_version


@pytest.mark.usefixtures("long")
def test_a_damaged_reference_to_a_node_costs_no_version_that_was_below_it(folder: Path, opened: LocalStore) -> None:
    before = history_of(opened, LONG)
    root = json.loads((folder / LONG.head_key).read_bytes())["root"]
    edit_document(folder / LONG.head_key, root={**root, "last": 3})
    repaired(folder, model=LONG)
    assert without_writers(history_of(opened, LONG)) == without_writers(before)


def test_entries_that_manifests_contradict_are_corrected_and_nothing_whole_is_deleted(
    folder: Path, opened: LocalStore
) -> None:
    before = history_of(opened)
    recent = [e for e in json.loads((folder / NAME.head_key).read_bytes())["recent"] if e["number"] != 5]
    for entry in recent:
        entry["number"] += 2 * (entry["number"] == 3)
    edit_document(folder / NAME.head_key, recent=recent)
    whats = dict(findings(folder))
    assert whats[3] == "is whole, but not in the history"
    assert whats[5] == "its entry in the history has a different step, created_ms, nonfinite_elements than its manifest"
    repaired(folder)
    assert without_writers(history_of(opened)) == without_writers(before)


@pytest.mark.usefixtures("long")
def test_a_ref_to_a_version_that_is_lost_with_its_node_goes(folder: Path, opened: LocalStore) -> None:
    edit_document(
        folder / LONG.head_key,
        refs={"latest": {"version": 150}, "old": {"version": 3}, "new": {"version": 149}},
    )
    node = next(p for p in (folder / LONG.prefix / "history").iterdir() if b'"number":3,' in p.read_bytes())
    node.unlink()
    shutil.rmtree(version_folder(folder, 3, str(LONG)))
    whats = [what for _, what in findings(folder, model=LONG)]
    assert "the ref old names version 3, which does not exist" in whats
    repaired(folder, model=LONG)
    after = history_of(opened, LONG)
    assert after.head.ref_numbers == {"latest": 150, "new": 149}
    assert list(after.versions()) == [n for n in range(1, 151) if n != 3]
