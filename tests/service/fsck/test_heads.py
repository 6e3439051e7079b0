"""Heads that are lost, damaged or behind their store: are they rebuilt from what is there, with nothing whole given
up?
"""

from __future__ import annotations

import json
import shutil
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.service.fsck.damaged_stores import (
    LONG,
    NAME,
    WEIGHTS,
    findings,
    flip_digit,
    fsck,
    history_of,
    repaired,
    without_writer,
    without_writers,
)
from tests.support.heads import edit_document
from tests.support.services import running_service
from tests.support.small_stores import DURABLE, MODEL, OPEN, RETIRED, contents, spoil, upload, version_folder
from weighbridge import EngineClient, TrainerClient
from weighbridge._formats.safetensors_files import lay_out_files
from weighbridge.errors import DataLoss
from weighbridge_service.fsck import repair as repairing
from weighbridge_service.models import registered_model
from weighbridge_storage.documents.entries import OpenEntry
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head.collecting import collect
from weighbridge_storage.head.head_store import HeadStore
from weighbridge_storage.head.leases import Grace
from weighbridge_storage.stores.local import LocalStore
from weighbridge_storage.stores.objects import ObjectStore


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
        # some of the template's weights are not finite
        handle = trainer.push_folder(MODEL, version_folder(template, version), step=100, allow_nonfinite=True)
        return handle.wait(timeout=60).number


def test_a_lost_head_is_rebuilt_from_the_manifests(
    location: str, store: ObjectStore, template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as where the template was written: a registration has the digest of the layout in files
    monkeypatch.setattr(registered_model, "lay_out_files", partial(lay_out_files, max_shard_bytes=1000))
    upload(template, store)
    before = history_of(store)
    retired = before.retired()[RETIRED]
    store.delete(NAME.head_key)
    store.delete(f"{NAME.prefix}files/{before.head.files_id}/config.json")
    assert fsck(location)[0] == 1
    assert repaired(location) == [None, RETIRED, *DURABLE]
    after = history_of(store)
    # what was deleted a short time ago, and is still whole, is there again
    assert without_writers(after) == without_writers(before) | {RETIRED: without_writer(replace(retired, retired_ms=0))}
    assert after.head.ref_numbers == {"latest": 6}
    assert (after.head.files_id, after.head.registration) == (
        before.head.files_id,
        before.head.registration,
    )
    check_pulls(location, template, {number: number for number in DURABLE})
    assert push(location, template, 3) > OPEN + 900


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
    assert contents(folder) == spoilt
    assert findings(folder)[0] == (None, f"{NAME.head_key} does not agree with its digest")
    repaired(folder)
    assert {n: e for n, e in without_writers(history_of(opened)).items() if n != RETIRED} == before


@pytest.mark.usefixtures("long")
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


@pytest.mark.usefixtures("long")
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


@pytest.mark.usefixtures("long")
def test_nodes_of_a_rebuilt_head_are_newer_than_all_that_are_there(folder: Path, opened: LocalStore) -> None:
    node = next((folder / LONG.prefix / "history").iterdir())
    shutil.copy(node, node.with_name(f"{500:016d}-{'a' * 64}.json"))
    (folder / LONG.head_key).unlink()
    repaired(folder, model=LONG)
    assert history_of(opened, LONG).head.generation == 501


@pytest.mark.parametrize("name", ["9999999999999999999", f"{2**63 - 2}"])
def test_what_only_looks_like_a_node_does_not_use_generations_up(folder: Path, opened: LocalStore, name: str) -> None:
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
    assert failure.startswith("no version of acme/smol can register it")
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


@pytest.mark.usefixtures("long")
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
    assert (number, "it did not write them" in what) == (10**12 - 1, True)
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
    assert {f["failure"].partition(",")[0] for f in found[MODEL]} == {"acme/smol was changed in the meantime"}
    assert head.read_bytes() == b"changed"


@pytest.mark.parametrize("lost", ["list", "damaged list", "head", "head of a type with a map"])
def test_a_model_without_a_weight_map_is_registered_again_by_its_newest_version(tmp_path: Path, lost: str) -> None:
    model_type = "llama" if "type" in lost else "gpt2"
    location, name = tmp_path / "store", ModelName.parse("acme/unmapped")
    (tmp_path / "hf").mkdir()
    tensors = {f"layers.{n}.weight": torch.full((2, 2), float(n)) for n in range(12)}
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "config.json").write_text(json.dumps({"model_type": model_type}))
    with running_service(location) as running, TrainerClient(running.address) as trainer:
        trainer.import_folder(str(name), tmp_path / "hf", weight_map=False).wait(timeout=60)
    with closing(LocalStore(location)) as store:
        before = history_of(store, name).head
        [key] = store.list(f"{name.prefix}tensors/")
        content, _ = store.get(key)
        if lost == "damaged list":
            store.put(key, content[:-9], mode="overwrite")
        else:
            store.delete(key)
        if lost.startswith("head"):
            store.delete(name.head_key)
        assert findings(location, model=name)
        repaired(location, model=name)
        after = history_of(store, name).head
        assert (after.registration, after.files_id) == (before.registration, before.files_id)
        assert store.get(key)[0] == content
    with running_service(location) as running, TrainerClient(running.address) as trainer:
        version = trainer.push_folder(str(name), tmp_path / "hf").wait(timeout=60)
        with EngineClient(running.address) as engine:
            found = dict(engine.pull(str(name), version.number))
    assert all(torch.equal(found[key], tensor) for key, tensor in tensors.items())
