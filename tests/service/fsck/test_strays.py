"""Are stray objects deleted where no version can need them, and kept where they may have been a version?"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.service.fsck.damaged_stores import NAME, WEIGHTS, findings, fsck, history_of, repaired
from tests.support.heads import edit_document
from tests.support.small_stores import DURABLE, MODEL, RETIRED, contents, spoil, version_folder
from weighbridge_storage.documents.names import version_prefix
from weighbridge_storage.opening import open_store
from weighbridge_storage.stores.local import LocalStore


def test_what_a_collection_deletes_meanwhile_is_not_found(
    folder: Path, opened: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head is read after a retired version was forgotten, and the objects were listed before its objects were
    deleted.
    """
    listed = list(opened.list(NAME.prefix))
    shutil.rmtree(version_folder(folder, RETIRED))
    head = history_of(opened).head
    recent = {number: entry for number, entry in head.recent.items() if number != RETIRED}
    (folder / NAME.head_key).write_bytes(replace(head, recent=recent).to_json())
    real = LocalStore.list
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "list", lambda self, prefix: listed if prefix == NAME.prefix else real(self, prefix))
        assert fsck(folder)[0] == 0


@pytest.mark.parametrize("whole", [True, False])
def test_folders_of_versions_that_were_given_up_are_deleted(folder: Path, whole: bool) -> None:
    given_up = version_folder(folder, 4)
    shutil.copytree(version_folder(folder, 3), given_up)
    edit_document(given_up / "weighbridge.json", version=4)
    if not whole:
        (given_up / WEIGHTS).unlink()
    before = contents(folder)
    ((number, what),) = findings(folder)
    assert (number, "objects of a version that is in no history" in what) == (4, True)
    assert contents(folder) == before
    assert repaired(folder) == [4]
    assert contents(folder) == {k: v for k, v in before.items() if not k.startswith(version_prefix(NAME, 4))}


def test_what_may_have_been_a_version_is_not_deleted_with_a_lost_head(folder: Path) -> None:
    (folder / NAME.head_key).unlink()
    (version_folder(folder, 3) / WEIGHTS).unlink()
    (version_folder(folder, 5) / "weighbridge.json").unlink()
    code, found = fsck(folder, "--repair")
    left = [f for f in found[MODEL] if not f["repaired"]]
    assert (code, [f["number"] for f in left]) == (1, [3, 5])
    assert f"{WEIGHTS} is missing" in left[0]["what"]
    assert "its manifest is missing" in left[1]["what"]
    assert (version_folder(folder, 3) / "weighbridge.json").exists()
    assert (version_folder(folder, 5) / WEIGHTS).exists()


def test_a_registered_file_comes_back_from_a_version(folder: Path, opened: LocalStore) -> None:
    (path,) = (folder / NAME.prefix / "files").glob("*/config.json")
    content = path.read_bytes()
    path.unlink()
    assert findings(folder) == [(None, "config.json, which is registered, is missing")]
    repaired(folder)
    assert path.read_bytes() == content


def test_a_registered_file_is_not_made_of_one_that_is_damaged(folder: Path) -> None:
    (path,) = (folder / NAME.prefix / "files").glob("*/config.json")
    content = path.read_bytes()
    path.unlink()
    for number in (RETIRED, *DURABLE[:-1]):
        spoil(version_folder(folder, number) / "config.json", 5)
    repaired(folder)
    assert path.read_bytes() == content
    path.unlink()
    spoil(version_folder(folder, DURABLE[-1]) / "config.json", 5)
    code, found = fsck(folder, "--repair")
    assert (code, path.exists()) == (1, False)
    assert "no version has config.json as it is registered" in found[MODEL][0]["failure"]


def test_files_of_a_registration_that_never_came_to_its_end_are_nobodys(folder: Path) -> None:
    shutil.copytree(folder / NAME.prefix / "files", folder / "models/acme/begun/files")
    assert fsck(folder)[1]["acme/begun"] == []
    assert open_store(folder)
