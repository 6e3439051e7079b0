"""Versions that lack something: is each named and kept, and dropped only when that is asked for?"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.service.fsck.damaged_stores import WEIGHTS, findings, flip_digit, fsck, history_of, repaired
from tests.support.heads import edit_document
from tests.support.small_stores import MODEL, RETIRED, contents, spoil, version_folder
from weighbridge_storage.stores.local import LocalStore

DAMAGES: dict[str, Any] = {
    f"{WEIGHTS} is missing": lambda f: (f / WEIGHTS).unlink(),
    f"{WEIGHTS} has 1500 bytes instead of 1504": lambda f: (f / WEIGHTS).write_bytes(bytes(1500)),
    "config.json is missing; model.safetensors.index.json is missing": lambda f: [
        p.unlink() for p in f.glob("*.json") if p.name != "weighbridge.json"
    ],
    "its manifest is missing": lambda f: (f / "weighbridge.json").unlink(),
    "weighbridge.json does not end with its digest": lambda f: (f / "weighbridge.json").write_bytes(b"{"),
    "its manifest is that of acme/smol@5": lambda f: shutil.copy(f.parent / f"{5:012d}/weighbridge.json", f),
    "weighbridge.json does not agree with its digest": lambda f: flip_digit(f / "weighbridge.json", '"step"'),
    "requires": lambda f: edit_document(f / "weighbridge.json", requires=["base"]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_version_that_lacks_something_is_named_and_kept(folder: Path, damage: str) -> None:
    place = version_folder(folder, 2)
    shutil.copytree(place, folder.parent / "good")
    DAMAGES[damage](place)
    before = contents(folder)
    for options in ((), ("--repair",)):
        ((number, what),) = findings(folder, *options)
        assert number == 2
        assert damage in what
        assert contents(folder) == before
    shutil.rmtree(place)
    shutil.copytree(folder.parent / "good", place)
    assert findings(folder) == []


@pytest.mark.parametrize("damage", [name for name in DAMAGES if name != "requires"])
def test_a_version_that_lacks_something_can_be_dropped(folder: Path, opened: LocalStore, damage: str) -> None:
    for number in (2, 6):
        DAMAGES[damage](version_folder(folder, number))
    assert repaired(folder, "--drop-damaged") == [2, 6]
    after = history_of(opened)
    assert list(after.versions()) == [3, 5]
    assert list(after.retired()) == [RETIRED, 2, 6]
    assert after.head.ref_numbers == {"latest": 5}
    assert version_folder(folder, 2).exists()


def test_a_version_of_a_later_release_is_not_dropped(folder: Path, opened: LocalStore) -> None:
    DAMAGES["requires"](version_folder(folder, 2))
    ((number, what),) = findings(folder, "--repair", "--drop-damaged")
    assert (number, what.startswith("cannot be checked: ")) == (2, True)
    assert 2 in history_of(opened).versions()


def test_a_version_that_is_being_deleted_may_lack_anything(folder: Path) -> None:
    (version_folder(folder, RETIRED) / "weighbridge.json").unlink()
    (version_folder(folder, RETIRED) / WEIGHTS).unlink()
    assert fsck(folder)[0] == 0


@pytest.mark.parametrize("how", ["missing", "cut"])
def test_block_digests_are_made_anew_of_what_agrees_with_the_manifest(folder: Path, how: str) -> None:
    blocks = version_folder(folder, 3) / f"{WEIGHTS}.blake3"
    good = blocks.read_bytes()

    def damage() -> None:
        if how == "missing":
            blocks.unlink()
        else:
            blocks.write_bytes(good[:-1])

    damage()
    assert findings(folder) == [(3, f"{WEIGHTS}.blake3 is missing or has another size")]
    assert repaired(folder) == [3]
    assert blocks.read_bytes() == good
    damage()
    spoil(version_folder(folder, 3) / WEIGHTS)
    code, found = fsck(folder, "--repair")
    assert code == 1
    failure = found[MODEL][0]["failure"]
    assert failure.startswith(f"{WEIGHTS} of acme/smol@3 does not agree with its digest\n  - tensor ")
    assert "What to do: restore the file from a backup" in failure


@pytest.mark.parametrize("name", ["head.json", f"versions/{2:012d}/weighbridge.json"])
def test_a_document_of_a_terabyte_is_found_and_not_read(folder: Path, name: str) -> None:
    path = folder / "models" / MODEL / name
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    for options in ((), ("--repair",)):
        said = "; ".join(what for _, what in findings(folder, *options))
        assert f"reading models/{MODEL}/{name} failed: it has {1 << 40} bytes" in said


def test_a_registered_file_of_a_terabyte_is_restored_from_no_version(folder: Path) -> None:
    for path in (folder / "models" / MODEL / "files").rglob("config.json"):
        path.unlink()
    place = version_folder(folder, 6)
    with (place / "config.json").open("r+b") as file:
        file.truncate(1 << 40)
    manifest = json.loads((place / "weighbridge.json").read_bytes())
    manifest["parts"]["weights"]["files"]["config.json"]["size"] = 1 << 40
    edit_document(place / "weighbridge.json", parts=manifest["parts"])
    assert findings(folder), "it lacks a registered file"
    repaired(folder)
    assert findings(folder) == []


def test_of_a_version_that_lacks_very_many_files_the_first_are_named(folder: Path) -> None:
    place = version_folder(folder, 2)
    manifest = json.loads((place / "weighbridge.json").read_bytes())
    files = manifest["parts"]["weights"]["files"]
    files |= {f"file-{i}.json": files["config.json"] for i in range(1000)}
    edit_document(place / "weighbridge.json", parts=manifest["parts"])
    ((number, what),) = findings(folder)
    assert number == 2
    assert what.count("is missing") == 5
    assert what.endswith("; and 995 more")
