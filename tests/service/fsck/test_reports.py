"""Reports of a check: does each finding say what became of it and what to do, and is a store that is well left as it
is?
"""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.service.fsck.damaged_stores import NAME, WEIGHTS, fsck, said
from tests.support.heads import edit_document
from tests.support.small_stores import MODEL, contents, version_folder
from weighbridge._cli import commands
from weighbridge_service.fsck.repair import check_store
from weighbridge_storage.stores.local import LocalStore


@pytest.mark.usefixtures("long")
def test_a_store_that_is_well_is_left_as_it_is(folder: Path, template: Path) -> None:
    edit_document(folder / NAME.head_key, open=json.loads((template / NAME.head_key).read_bytes())["open"])
    before = contents(folder)
    assert fsck(folder) == (0, {"acme/long": [], "acme/other": [], MODEL: []})
    assert fsck(folder, "--repair") == fsck(folder, "--repair", "--drop-damaged") == fsck(folder)
    assert contents(folder) == before
    result = CliRunner().invoke(commands, ["fsck", str(folder)])
    assert result.output.splitlines()[-1] == (
        "acme/smol: names, sizes and manifests are correct (5 versions); contents were not read: --digests reads them"
    )


def test_each_finding_says_what_became_of_it_and_what_to_do(folder: Path) -> None:
    shutil.rmtree(folder / "models/acme/other")
    shutil.copytree(version_folder(folder, 3), version_folder(folder, 4))
    (version_folder(folder, 2) / WEIGHTS).unlink()
    (version_folder(folder, 3) / f"{WEIGHTS}.blake3").unlink()
    assert said("fsck", str(folder)) == (
        1,
        [
            f"acme/smol@2: {WEIGHTS} is missing",
            f"acme/smol@3: {WEIGHTS}.blake3 is missing or has another size",
            "acme/smol@4: 7 objects of a version that is in no history",
            "acme/smol: 3 problems (6 versions)",
            (
                "  What to do: stop all services of the store, then run again with --repair; "
                "restore missing files from a "
                "backup, or give the versions up with --repair --drop-damaged"
            ),
        ],
    )
    assert said("fsck", str(folder), "--repair") == (
        1,
        [
            f"acme/smol@2: {WEIGHTS} is missing",
            f"acme/smol@3: {WEIGHTS}.blake3 is missing or has another size (repaired)",
            "acme/smol@4: 7 objects of a version that is in no history (deleted)",
            "acme/smol: 1 problem (6 versions)",
            "  What to do: restore missing files from a backup, or give the versions up with --repair --drop-damaged",
        ],
    )
    assert said("fsck", str(folder), "--repair", "--drop-damaged") == (
        0,
        [
            f"acme/smol@2: {WEIGHTS} is missing (removed from the history)",
            (
                "acme/smol: names, sizes and manifests are correct (5 versions); contents were "
                "not read: --digests reads them"
            ),
        ],
    )


def test_a_folder_that_is_no_store_is_said_so_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"{}")
    code, lines = said("fsck", str(tmp_path))
    assert (code, len(lines)) == (0, 1)
    assert lines[0].startswith(f"there is no model in {tmp_path}")
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.usefixtures("long")
def test_a_check_writes_nothing_and_says_how_far_it_is(folder: Path) -> None:
    for hidden in (".tmp", ".locks"):
        shutil.rmtree(folder / hidden)
    steps: list[tuple[int, int]] = []
    with closing(LocalStore(folder)) as store:
        checked = list(check_store(store, on_progress=lambda *step: steps.append(step)))
    assert all(model.ok for model in checked)
    assert [done for done, total in steps if total == 150] == list(range(1, 151))
    assert [path.name for path in folder.iterdir()] == ["models"]
