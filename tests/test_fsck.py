"""Does the check of a store find each kind of damage, and does the repair lose nothing that is there?"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from tests.heads import edit_document
from tests.old_stores import (
    DURABLE,
    MODEL,
    OPEN,
    RETIRED,
    add_model,
    contents,
    spoil,
    unpack,
    upload,
    version_folder,
)
from tests.services import running_service
from weighbridge import EngineClient, TrainerClient
from weighbridge.cli import commands
from weighbridge.errors import DataLoss
from weighbridge.resources import Retention
from weighbridge.safetensors_files import lay_out_files
from weighbridge_service import models
from weighbridge_service.fsck import repair as repairing
from weighbridge_service.fsck.diagnosis import Mend
from weighbridge_service.fsck.repair import check_store
from weighbridge_storage.collecting import collect
from weighbridge_storage.entries import OpenEntry
from weighbridge_storage.head_store import HeadStore
from weighbridge_storage.history import History
from weighbridge_storage.leases import Grace
from weighbridge_storage.local import LocalStore
from weighbridge_storage.migration.migrate import migrate_store
from weighbridge_storage.names import ModelName, version_prefix
from weighbridge_storage.objects import ObjectStore
from weighbridge_storage.opening import open_store

NAME = ModelName.parse(MODEL)
LONG = ModelName.parse("acme/long")
WEIGHTS = "model-00001-of-00002.safetensors"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of now: `MODEL`, and `LONG` with 150 versions, most of them in the tree of its history."""
    folder = unpack(tmp_path_factory.mktemp("template"))
    add_model(folder, str(LONG), 150)
    with closing(LocalStore(folder)) as store:
        list(migrate_store(store))
    return folder


@pytest.fixture
def folder(template: Path, tmp_path: Path) -> Path:
    """A copy of it, in which no version is being received."""
    copy = shutil.copytree(template, tmp_path / "store")
    edit_document(copy / NAME.head_key, open=[])
    return copy


@pytest.fixture
def opened(folder: Path) -> Iterator[LocalStore]:
    with closing(LocalStore(folder)) as store:
        yield store


def fsck(location: Path | str, *options: str) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """The command's exit code, and its findings by model."""
    result = CliRunner().invoke(commands, ["fsck", str(location), *options, "--json"])
    assert result.stdout, result.output
    said = json.loads(result.stdout)
    assert said["ok"] == (result.exit_code == 0) == all(model["ok"] for model in said["models"])
    return result.exit_code, {model["name"]: model["findings"] for model in said["models"]}


def findings(location: Path | str, *options: str, model: ModelName = NAME) -> list[tuple[int | None, str]]:
    """What is wrong with one model and not repaired; with all others nothing is."""
    _, found = fsck(location, *options)
    assert not any(found[name] for name in found if name != str(model))
    return [(f["number"], f["what"]) for f in found[str(model)] if not f["repaired"]]


def repaired(location: Path | str, *options: str, model: ModelName = NAME) -> list[int | None]:
    """Repair everything; the versions that findings were about. A second check finds nothing."""
    code, found = fsck(location, "--repair", *options)
    assert code == 0, found
    assert fsck(location) == (0, {name: [] for name in found})
    return [f["number"] for f in found[str(model)]]


def history_of(store: ObjectStore, model: ModelName = NAME) -> History:
    found = HeadStore(store).history(model)
    assert found is not None
    return found


def without_writers(history: History) -> dict[int, Any]:
    return {number: replace(entry, write_id="x") for number, entry in history.versions().items()}


def check_pulls(location: Path | str, template: Path, numbers: dict[int, int]) -> None:
    """A service over the store serves versions with the bytes of those of the template, and publishes more."""
    with running_service(location) as running, EngineClient(running.address) as engine:
        for number, same in numbers.items():
            files = version_folder(template, same).glob("*.safetensors")
            expected = {name: value for path in files for name, value in load_file(path).items()}
            found = dict(engine.pull(MODEL, number))
            assert found.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(found[name].view(torch.int16), tensor.view(torch.int16))


def push(location: Path | str, template: Path, version: int) -> int:
    """Push what the template has as one of its versions; the number."""
    with running_service(location) as running, TrainerClient(running.address) as trainer:
        handle = trainer.push_folder(MODEL, version_folder(template, version), step=100)
        return handle.wait(timeout=60).number


# -- nothing is wrong ------------------------------------------------------------------------------------------------


def test_a_store_that_is_well_is_left_as_it_is(folder: Path, template: Path) -> None:
    edit_document(folder / NAME.head_key, open=json.loads((template / NAME.head_key).read_bytes())["open"])
    before = contents(folder)
    assert fsck(folder) == (0, {"acme/long": [], "acme/other": [], MODEL: []})
    assert fsck(folder, "--repair") == fsck(folder, "--repair", "--drop-damaged") == fsck(folder)
    assert contents(folder) == before
    result = CliRunner().invoke(commands, ["fsck", str(folder)])
    assert result.output.splitlines()[-1] == "acme/smol: all is well (5 versions)"


# -- heads -----------------------------------------------------------------------------------------------------------


def test_a_lost_head_is_rebuilt_from_the_manifests(
    location: str, store: ObjectStore, template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as where the template was written: a registration has the digest of the layout in files
    monkeypatch.setattr(models, "lay_out_files", partial(lay_out_files, max_shard_bytes=1000))
    upload(template, store)
    before = history_of(store)
    retired = before.retired()[RETIRED]
    store.delete(NAME.head_key)
    store.delete(f"{NAME.prefix}files/{before.head.files_id}/config.json")
    assert fsck(location)[0] == 1
    assert repaired(location) == [None, RETIRED, *DURABLE]
    after = history_of(store)
    # what was deleted a short time ago, and is still whole, is there again
    assert without_writers(after) == without_writers(before) | {
        RETIRED: replace(retired, retired_ms=0, write_id="x")
    }
    assert after.head.ref_numbers == {"latest": 6}
    assert (after.head.files_id, after.head.registration) == (
        before.head.files_id,
        before.head.registration,
    )
    check_pulls(location, template, {number: number for number in DURABLE})
    assert push(location, template, 3) > OPEN + 900


def flip_digit(path: Path, name: str) -> None:
    """Flip the last bit of the first digit behind a name: still JSON, and a number that is as good as the other one."""
    text = path.read_bytes()
    spoil(path, next(i for i in range(text.index(name.encode()), len(text)) if text[i : i + 1].isdigit()))


@pytest.mark.parametrize("name", ["format", "next_version", "retired_ms", "keep_last", "latest"])
def test_a_flipped_bit_of_a_head_is_found_collects_nothing_and_is_repaired(
    folder: Path, opened: LocalStore, name: str
) -> None:
    before = without_writers(history_of(opened))
    flip_digit(folder / NAME.head_key, f'"{name}"')
    spoilt = contents(folder)
    for use in (
        lambda: collect(opened, HeadStore(opened), NAME, grace=Grace(4), clock=lambda: 2**62),
        lambda: HeadStore(opened).read(NAME),
    ):
        with pytest.raises(DataLoss, match=f"{NAME.head_key} does not agree with its digest") as caught:
            use()
        assert "weighbridge fsck STORE --repair" in caught.value.fix
    (failed,) = migrate_store(opened)
    assert (failed.name, failed.ok) == (MODEL, False)
    assert NAME.head_key in failed.failure
    assert "weighbridge fsck STORE --repair" in failed.failure
    assert contents(folder) == spoilt
    assert findings(folder)[0] == (None, f"{NAME.head_key} does not agree with its digest")
    repaired(folder)
    assert {n: e for n, e in without_writers(history_of(opened)).items() if n != RETIRED} == before


@pytest.mark.parametrize("name", ["number", "last", "retired"])
def test_a_flipped_bit_of_a_node_is_found_collects_nothing_and_is_repaired(
    folder: Path, opened: LocalStore, name: str
) -> None:
    before = without_writers(history_of(opened, LONG))
    nodes = sorted((folder / LONG.prefix / "history").iterdir())
    node = next(path for path in nodes if f'"{name}"'.encode() in path.read_bytes())
    flip_digit(node, f'"{name}"')
    spoilt = contents(folder)
    with pytest.raises(DataLoss, match=f"{node.name} does not agree with the digest in its name") as caught:
        collect(opened, HeadStore(opened), LONG, grace=Grace(4), clock=lambda: 2**62)
    assert "weighbridge fsck STORE --repair" in caught.value.fix
    assert contents(folder) == spoilt
    assert any(node.name in what for _, what in findings(folder, model=LONG))
    repaired(folder, model=LONG)
    assert without_writers(history_of(opened, LONG)) == before


@pytest.mark.parametrize("text", [b"", b"{", b'{"format":3}', b"\0" * 3000])
def test_a_damaged_head_is_rebuilt_and_kept_aside(folder: Path, opened: LocalStore, text: bytes) -> None:
    before = without_writers(history_of(opened))
    (folder / NAME.head_key).write_bytes(text)
    assert repaired(folder) == [None, RETIRED, *DURABLE]
    assert {n: e for n, e in without_writers(history_of(opened)).items() if n != RETIRED} == before
    (kept,) = (folder / NAME.prefix).glob("head.damaged-*.json")
    assert kept.read_bytes() == text


def test_a_head_that_is_lost_with_its_history_is_rebuilt_with_one(folder: Path, opened: LocalStore) -> None:
    before = without_writers(history_of(opened, LONG))
    nodes = {path.name for path in (folder / LONG.prefix / "history").iterdir()}
    (folder / LONG.head_key).unlink()
    shutil.rmtree(folder / LONG.prefix / "history")
    assert nodes
    repaired(folder, model=LONG)
    after = history_of(opened, LONG)
    assert without_writers(after) == before
    assert len(after.head.recent) < 40
    assert after.head.latest == 150


def test_nodes_of_a_rebuilt_head_are_newer_than_all_that_are_there(folder: Path, opened: LocalStore) -> None:
    node = next((folder / LONG.prefix / "history").iterdir())
    shutil.copy(node, node.with_name(f"{500:016d}-{'a' * 64}.json"))
    (folder / LONG.head_key).unlink()
    repaired(folder, model=LONG)
    assert history_of(opened, LONG).head.generation == 501


@pytest.mark.parametrize("name", ["9999999999999999999", f"{2**63 - 2}"])
def test_what_only_looks_like_a_node_does_not_use_generations_up(
    folder: Path, opened: LocalStore, name: str
) -> None:
    stray = folder / NAME.prefix / f"history/{name}-{'a' * 64}.json"
    stray.parent.mkdir(exist_ok=True)
    stray.write_bytes(b"{}")
    (folder / NAME.head_key).unlink()
    repaired(folder)
    assert history_of(opened).head.generation < 1000


def test_a_side_file_that_is_damaged_keeps_no_version_from_being_found(
    folder: Path, opened: LocalStore, template: Path
) -> None:
    for number in (3, 6):
        spoil(version_folder(folder, number) / "config.json", 5)
    before = without_writers(history_of(opened))
    (folder / NAME.head_key).unlink()
    shutil.rmtree(folder / NAME.prefix / "files")
    repaired(folder)
    after = without_writers(history_of(opened))
    assert {n: entry for n, entry in after.items() if n != RETIRED} == before
    # registered by the newest version of which the config is as it was pushed
    check_pulls(folder, template, {n: n for n in DURABLE})


def test_versions_are_found_although_the_model_cannot_be_registered_by_any(folder: Path) -> None:
    for number in (RETIRED, *DURABLE):
        spoil(version_folder(folder, number) / "config.json", 5)
    (folder / NAME.head_key).unlink()
    code, found = fsck(folder, "--repair")
    assert code == 1
    failure = found[MODEL][0]["failure"]
    assert failure.startswith("acme/smol can be registered by no version")
    assert "acme/smol@6: config.json of acme/smol@6 does not agree with its digest" in failure


DAMAGED_REGISTRATIONS: dict[str, Any] = {
    "files are no array": {"files": 5},
    "a file has no name": {"files": ["config.json", None]},
    "a file lies elsewhere": {"files": ["config.json", "../../x"]},
    "there is no config": {"files": []},
    "the dtype is none": {"dtype": "BF61"},
    "the dtype is a list": {"dtype": []},
    "there is a negative number": {"tensor_count": -1},
    "the type is a number": {"model_type": 4},
}


@pytest.mark.parametrize("how", DAMAGED_REGISTRATIONS)
def test_a_damaged_registration_is_made_anew_from_a_version(
    folder: Path, opened: LocalStore, template: Path, how: str
) -> None:
    before = history_of(opened)
    edit_document(
        folder / NAME.head_key,
        registration={**before.head.registration, **DAMAGED_REGISTRATIONS[how]},
    )
    ((number, what),) = findings(folder)
    assert (number, "in the head of acme/smol is" in what) == (None, True)
    repaired(folder)
    after = history_of(opened)
    assert after.head.registration.keys() == before.head.registration.keys() | {"identity"}
    assert after.head.refs == before.head.refs
    assert after.versions() == before.versions()
    assert push(folder, template, 3) == OPEN + 1


def test_a_lost_head_is_missed_although_no_version_is_left(folder: Path) -> None:
    (folder / LONG.head_key).unlink()
    shutil.rmtree(folder / LONG.prefix / "versions")
    assert findings(folder, model=LONG) == [(None, "its head is missing")]


def test_a_model_without_any_whole_version_cannot_be_rebuilt(folder: Path) -> None:
    shutil.rmtree(folder / "models/acme/other/versions")
    (folder / "models/acme/other/head.json").write_bytes(b"damaged")
    code, found = fsck(folder, "--repair")
    assert code == 1
    assert "no version of acme/other is whole" in found["acme/other"][0]["failure"]
    assert (folder / "models/acme/other/head.json").read_bytes() == b"damaged"


def test_a_head_that_names_files_of_others_is_rebuilt_and_hides_no_other_model(folder: Path) -> None:
    edit_document(folder / NAME.head_key, files_id="../../other/files")
    number, what = findings(folder)[0]
    assert number is None
    assert f"{NAME.head_key} is malformed: files_id is '../../other/files'" in what
    repaired(folder)


@pytest.mark.parametrize("fields", [{"format": 4}, {"format": 2}, {"requires": ["signatures"]}])
def test_what_another_release_has_written_is_left_alone(folder: Path, fields: dict[str, Any]) -> None:
    edit_document(folder / NAME.head_key, **fields)
    before = contents(folder)
    ((number, what),) = findings(folder, "--repair", "--drop-damaged")
    assert number is None
    assert "Weighbridge" in what
    assert contents(folder) == before


@pytest.mark.parametrize("older", [True, False])
def test_a_version_of_a_later_release_is_not_given_up_with_a_head_that_does_not_know_it(
    folder: Path, older: bool
) -> None:
    newer = version_folder(folder, OPEN + 1)
    shutil.copytree(version_folder(folder, 3), newer)
    edit_document(newer / "weighbridge.json", version=OPEN + 1, requires=["base"])
    if not older:
        (folder / NAME.head_key).unlink()
    before = contents(folder)
    found = findings(folder, "--repair", "--drop-damaged")
    assert any(number == OPEN + 1 and "requires 'base'" in what for number, what in found)
    assert contents(folder) == before


def test_objects_under_a_number_that_was_never_given_use_no_numbers_up(
    folder: Path, opened: LocalStore, template: Path
) -> None:
    stray = version_folder(folder, 10**12 - 1)
    stray.mkdir()
    (stray / "config.json").write_bytes(b"{}")
    ((number, what),) = findings(folder, "--repair")
    assert (number, "they are not its own" in what) == (10**12 - 1, True)
    (folder / NAME.head_key).unlink()
    assert fsck(folder, "--repair")[0] == 1
    assert stray.exists()
    assert history_of(opened).head.next_version < 10_000
    assert push(folder, template, 3) < 10_000


def test_a_head_that_is_older_than_the_store_gets_what_was_published_since(
    folder: Path, opened: LocalStore, template: Path
) -> None:
    old_head = (folder / NAME.head_key).read_bytes()
    new = [push(folder, template, number) for number in (2, 3)]
    half = version_folder(folder, new[-1] + 1)
    half.mkdir()
    (half / WEIGHTS).write_bytes(b"a part of what a writer that died had to write")
    (folder / NAME.head_key).write_bytes(old_head)
    assert repaired(folder) == [None, *new, new[-1] + 1]
    assert not list(half.glob("*"))
    after = history_of(opened)
    assert list(after.versions()) == [*DURABLE, *new]
    assert after.head.ref_numbers == {"latest": new[-1], "prod": 2}
    check_pulls(folder, template, {new[0]: 2, new[1]: 3})
    # what was given up since the head was written has left nothing that says so
    assert push(folder, template, 5) > int(half.name) + 900


@pytest.mark.parametrize("dead", [True, False])
def test_a_version_whose_writer_died_before_it_was_published_is_published(
    folder: Path, opened: LocalStore, dead: bool
) -> None:
    old_head = history_of(opened).head
    shutil.copytree(version_folder(folder, 6), version_folder(folder, OPEN))
    edit_document(version_folder(folder, OPEN) / "weighbridge.json", version=OPEN)
    now_ms = int(time.time() * 1000)
    until_ms = now_ms - 1000 if dead else now_ms + 600_000
    entry = OpenEntry(OPEN, "r", 60, "default", 1, 0, until_ms, old_head.files_id, 6, "the claim")
    (folder / NAME.head_key).write_bytes(replace(old_head, open={OPEN: entry}).to_json())
    if not dead:
        assert fsck(folder, "--repair")[0] == 0
        assert OPEN not in history_of(opened).versions()
        return
    assert repaired(folder) == [OPEN]
    after = history_of(opened)
    assert after.head.latest == OPEN
    assert after.versions()[OPEN].write_id == "the claim"
    assert not after.head.open


def test_a_head_that_changes_while_it_is_repaired_is_not_overwritten(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = folder / NAME.head_key
    head.write_bytes(b"damaged")
    real = repairing.diagnose

    def slow(survey: Any, now_ms: int) -> Any:
        if survey.model == NAME:
            head.write_bytes(b"changed")
        return real(survey, now_ms)

    with monkeypatch.context() as patch:
        patch.setattr(repairing, "diagnose", slow)
        code, found = fsck(folder, "--repair")
    assert code == 1
    assert {f["failure"].partition(",")[0] for f in found[MODEL]} == {"acme/smol was changed meanwhile"}
    assert head.read_bytes() == b"changed"


# -- histories -------------------------------------------------------------------------------------------------------


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


def test_a_damaged_reference_to_a_node_costs_no_version_that_was_below_it(
    folder: Path, opened: LocalStore
) -> None:
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
    assert whats[3] == "is whole, and in no history"
    assert (
        whats[5]
        == "its entry in the history says another step, created_ms, nonfinite_elements than its manifest"
    )
    repaired(folder)
    assert without_writers(history_of(opened)) == without_writers(before)


def test_a_ref_to_a_version_that_is_lost_with_its_node_goes(folder: Path, opened: LocalStore) -> None:
    edit_document(
        folder / LONG.head_key,
        refs={"latest": {"version": 150}, "old": {"version": 3}, "new": {"version": 149}},
    )
    node = next(p for p in (folder / LONG.prefix / "history").iterdir() if b'"number":3,' in p.read_bytes())
    node.unlink()
    shutil.rmtree(version_folder(folder, 3, str(LONG)))
    whats = [what for _, what in findings(folder, model=LONG)]
    assert "the ref old names version 3, which is not there" in whats
    repaired(folder, model=LONG)
    after = history_of(opened, LONG)
    assert after.head.ref_numbers == {"latest": 150, "new": 149}
    assert list(after.versions()) == [n for n in range(1, 151) if n != 3]


# -- versions --------------------------------------------------------------------------------------------------------

DAMAGES: dict[str, Any] = {
    f"{WEIGHTS} is missing": lambda f: (f / WEIGHTS).unlink(),
    f"{WEIGHTS} has 1500 bytes instead of 1504": lambda f: (f / WEIGHTS).write_bytes(bytes(1500)),
    "config.json is missing; model.safetensors.index.json is missing": lambda f: [
        p.unlink() for p in f.glob("*.json") if p.name != "weighbridge.json"
    ],
    "its manifest is missing": lambda f: (f / "weighbridge.json").unlink(),
    "is not valid JSON": lambda f: (f / "weighbridge.json").write_bytes(b"{"),
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


# -- what belongs to nothing -----------------------------------------------------------------------------------------


def test_what_a_collection_deletes_meanwhile_is_not_found(
    folder: Path, opened: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head is read after a retired version was forgotten, and the objects were listed before its objects were deleted."""
    listed = list(opened.list(NAME.prefix))
    shutil.rmtree(version_folder(folder, RETIRED))
    head = history_of(opened).head
    recent = {number: entry for number, entry in head.recent.items() if number != RETIRED}
    (folder / NAME.head_key).write_bytes(replace(head, recent=recent).to_json())
    real = LocalStore.list
    with monkeypatch.context() as patch:
        patch.setattr(
            LocalStore, "list", lambda self, prefix: listed if prefix == NAME.prefix else real(self, prefix)
        )
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


# -- others at the same time -----------------------------------------------------------------------------------------


def test_repairs_beside_a_service_that_receives_harm_no_version(folder: Path, template: Path) -> None:
    """Not what the documentation asks for, but what somebody will do."""
    shutil.rmtree(folder / LONG.prefix)
    stop = threading.Event()
    failures: list[BaseException] = []

    def repair() -> None:
        try:
            while not stop.is_set():
                with closing(LocalStore(folder)) as store:
                    for model in check_store(store, repair=True, drop_damaged=True):
                        assert {c.finding.mend for c in model.findings} <= {Mend.STRAY}, model
        except BaseException as error:
            failures.append(error)

    repairs = [threading.Thread(target=repair) for _ in range(2)]
    pushed: list[int] = []
    with running_service(folder, collect_every=0.2) as running, TrainerClient(running.address) as trainer:
        trainer.set_retention(MODEL, Retention(keep_last=4))
        for thread in repairs:
            thread.start()
        try:
            for step in range(12):
                source = version_folder(template, DURABLE[step % len(DURABLE)])
                handle = trainer.push_folder(MODEL, source, step=step)
                pushed.append(handle.wait(timeout=60).number)
        finally:
            stop.set()
            for thread in repairs:
                thread.join()
        there = [version.number for version in trainer.versions(MODEL)]
        assert not failures
        assert set(pushed[-4:]) <= set(there)
        assert not [problem for number in there for problem in trainer.verify(MODEL, number).problems]
    assert fsck(folder)[0] == 0


def test_two_repairs_at_once_do_what_one_does(folder: Path, opened: LocalStore) -> None:
    before = without_writers(history_of(opened, LONG))
    (folder / LONG.head_key).unlink()
    for number in range(1, 151, 7):
        (version_folder(folder, number, str(LONG)) / f"{WEIGHTS}.blake3").unlink()
    with ThreadPoolExecutor(2) as pool:
        codes = [code for code, _ in pool.map(lambda _: run_fsck(folder), range(2))]
    assert 0 in codes
    assert fsck(folder)[0] == 0
    assert without_writers(history_of(opened, LONG)) == before


def run_fsck(folder: Path) -> tuple[int, str]:
    """A repair by a process of its own."""
    found = subprocess.run(
        [sys.executable, "-m", "weighbridge", "fsck", str(folder), "--repair"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "Traceback" not in found.stderr
    return found.returncode, found.stdout


# -- what people see -------------------------------------------------------------------------------------------------


def said(*args: str) -> tuple[int, list[str]]:
    result = CliRunner().invoke(commands, args)
    return result.exit_code, result.output.splitlines()


def test_each_finding_says_what_became_of_it_and_what_to_do(folder: Path) -> None:
    shutil.rmtree(folder / LONG.prefix)
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
                "  What to do: stop all services of the store, then run again with --repair; restore missing files from a "
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
        [f"acme/smol@2: {WEIGHTS} is missing (taken out of history)", "acme/smol: all is well (5 versions)"],
    )


@pytest.mark.parametrize("command", ["fsck", "migrate"])
def test_a_folder_that_is_no_store_is_said_so_and_left_as_it_is(tmp_path: Path, command: str) -> None:
    (tmp_path / "config.json").write_bytes(b"{}")
    code, lines = said(command, str(tmp_path))
    assert (code, len(lines)) == (0, 1)
    assert lines[0].startswith(f"there is no model in {tmp_path}")
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_check_writes_nothing_and_says_how_far_it_is(folder: Path) -> None:
    for hidden in (".tmp", ".locks"):
        shutil.rmtree(folder / hidden)
    steps: list[tuple[int, int]] = []
    with closing(LocalStore(folder)) as store:
        checked = list(check_store(store, on_progress=lambda *step: steps.append(step)))
    assert all(model.ok for model in checked)
    assert [done for done, total in steps if total == 150] == list(range(1, 151))
    assert [path.name for path in folder.iterdir()] == ["models"]
