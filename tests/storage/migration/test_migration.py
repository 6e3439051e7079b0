"""Does a store of before become one of now without losing a bit, also if the migration is killed?"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from click.testing import CliRunner
from safetensors.torch import load_file

from tests.support.forked import ForkedPython
from tests.support.old_stores import (
    DURABLE,
    MODEL,
    OPEN,
    RETIRED,
    add_model,
    contents,
    edit,
    spoil,
    unpack,
    upload,
    version_folder,
)
from tests.support.rounds import rounds
from tests.support.services import running_service
from weighbridge import EngineClient, TrainerClient
from weighbridge._cli import commands
from weighbridge._core.resources import VersionState
from weighbridge.errors import Conflict, DataLoss, DeadlineExceeded, FailedPrecondition
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head.head import Head
from weighbridge_storage.head.head_store import HeadStore
from weighbridge_storage.migration import manifest_format1
from weighbridge_storage.migration.migrate import migrate_model
from weighbridge_storage.stores.local import LocalStore
from weighbridge_storage.stores.objects import ObjectStore
from weighbridge_storage.versions.manifest import Manifest
from weighbridge_storage.versions.reading import open_version, read_manifest

KILLS = rounds("MIGRATE_KILLS")
NAME = ModelName.parse(MODEL)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return unpack(tmp_path / "before")


@pytest.fixture
def opened(old: Path) -> Iterator[LocalStore]:
    with closing(LocalStore(old)) as store:
        yield store


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a version's folder, as safetensors' own loader reads them."""
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def migrate(location: Path | str, *options: str) -> tuple[int, Any]:
    """The command's exit code and what it says."""
    result = CliRunner().invoke(commands, ["migrate", str(location), *options, "--json"])
    return result.exit_code, json.loads(result.stdout)


# -- the whole way ---------------------------------------------------------------------------------------------------


def test_every_version_of_a_store_of_before_is_pulled_bit_for_bit(
    location: str, store: ObjectStore, old: Path
) -> None:
    upload(old, store)
    code, said = migrate(location)
    assert (code, said["ok"]) == (0, True)
    assert {model["name"]: model["versions"] for model in said["models"]} == {
        "acme/other": [1],
        MODEL: [RETIRED, *DURABLE],
    }
    with (
        running_service(location) as running,
        EngineClient(running.address) as engine,
        TrainerClient(running.address) as trainer,
    ):
        for model, number in (*((MODEL, n) for n in (RETIRED, *DURABLE)), ("acme/other", 1)):
            expected = tensors_of(version_folder(old, number, model))
            found = dict(engine.pull(model, number))
            assert found.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(found[name].view(torch.int16), tensor.view(torch.int16)), (number, name)
            assert trainer.verify(model, number).problems == ()
        assert trainer.refs(MODEL) == {"latest": 6, "prod": 2, "live": 6}
        states = {v.number: (v.state, v.step) for v in engine.versions(MODEL, include_invisible=True)}
        assert states[OPEN][1] == 70
        assert {n: states[n] for n in DURABLE} == {n: (VersionState.DURABLE, 10 * n) for n in DURABLE}
        # and it goes on
        source = old.parent / "next"
        source.mkdir()
        shutil.copy(version_folder(old, 6) / "config.json", source)
        for path in version_folder(old, 5).glob("model*"):
            shutil.copy(path, source)
        assert trainer.push_folder(MODEL, source, step=80).wait(timeout=60).number == OPEN + 1
    assert migrate(location) == (0, {"ok": True, "models": []})


def test_manifests_get_roots_and_counts_that_are_those_of_the_bytes(old: Path, opened: LocalStore) -> None:
    before = {n: json.loads((version_folder(old, n) / "weighbridge.json").read_bytes()) for n in DURABLE}
    assert migrate(old)[0] == 0
    for number in DURABLE:
        folder = version_folder(old, number)
        manifest = read_manifest(opened, NAME, number)
        assert {n: (f.size, f.xxh3_128) for n, f in manifest.files.items()} == {
            n: (f["size"], f["xxh3_128"]) for n, f in before[number]["files"].items()
        }
        for name in ("step", "run", "created_ms", "version", "lineage"):
            assert getattr(manifest, name) == before[number][name]
        for name, file in manifest.files.items():
            digest = blake3((folder / name).read_bytes()).digest()  # all are smaller than a block
            assert file.blake3 == blake3(digest).hexdigest()
            blocks = folder / f"{name}.blake3"
            if name.endswith(".safetensors"):
                assert blocks.read_bytes() == digest
            else:
                assert not blocks.exists()
        found = {name: tensor.nonfinite for name, tensor in manifest.tensors.items() if tensor.nonfinite}
        assert found == ({"model.embed_tokens.weight": 1} if number == 3 else {})
    history = HeadStore(opened).history(NAME)
    assert history is not None
    assert {n: entry.nonfinite_elements for n, entry in history.versions().items()} == {
        number: int(number == 3) for number in DURABLE
    }


def test_a_history_of_before_is_as_long_now(old: Path, opened: LocalStore) -> None:
    add_model(old, "acme/long", 150)
    assert migrate(old)[0] == 0
    history = HeadStore(opened).history(ModelName.parse("acme/long"))
    assert history is not None
    assert list(history.versions()) == list(range(1, 151))
    assert len(history.head.recent) < 40
    assert history.head.latest == 150


def test_a_service_that_meets_a_store_of_before_says_what_to_do(old: Path) -> None:
    with running_service(old) as running, EngineClient(running.address) as engine:
        with pytest.raises(FailedPrecondition, match="format 2") as caught:
            engine.version(MODEL, "latest")
        assert caught.value.fix == "run `weighbridge migrate STORE`"


def test_a_manifest_of_before_under_a_head_of_now_says_what_to_do(old: Path, opened: LocalStore) -> None:
    with pytest.raises(FailedPrecondition, match="format 1") as caught:
        open_version(opened, None, NAME, 2)  # type: ignore[arg-type]  # a folder needs no cache
    assert caught.value.fix == "run `weighbridge migrate STORE`"


# -- killed ----------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(120 + 30 * KILLS)
def test_a_migration_that_is_killed_at_any_moment_is_finished_by_the_next(tmp_path: Path) -> None:
    old = unpack(tmp_path)
    add_model(old, "acme/long", 60)
    add_model(old, "beta/short", 5)
    whole = shutil.copytree(old, tmp_path / "whole")
    begin = time.monotonic()
    run(whole).communicate()
    seconds = time.monotonic() - begin
    dice = random.Random(KILLS)
    moments: list[int] = []
    for attempt in range(KILLS):
        folder = shutil.copytree(old, tmp_path / "killed")
        for _ in range(2):  # and a second time, in what is left
            process = run(folder)
            process.stdout.readline()  # it has begun
            time.sleep(dice.uniform(0, seconds / 2))
            process.kill()
            process.communicate()
            moments.append(check_consistent(folder))
        process = run(folder)
        process.communicate()
        assert process.returncode == 0, f"attempt {attempt}"
        assert comparable(folder) == comparable(whole)
        shutil.rmtree(folder)
    assert sum(0 < done < 70 for done in moments) > 0 or KILLS < 10


def run(folder: Path) -> ForkedPython:
    script = (
        "import sys; from weighbridge._cli import main; import weighbridge_storage.migration.migrate; "
        "print('begun', flush=True); sys.exit(main(['migrate', sys.argv[1]]))"
    )
    return ForkedPython("-c", script, str(folder))


def check_consistent(folder: Path) -> int:
    """Nothing is half done: each document is one of before or of now, and heads of now lead to manifests of now; how many these are."""
    done = 0
    with closing(LocalStore(folder)) as store:
        for path in folder.glob("models/*/*/head.json"):
            model = ModelName(*path.parts[-3:-1])
            manifests = {p: p.read_bytes() for p in path.parent.glob("versions/*/weighbridge.json")}
            now = [text for text in manifests.values() if json.loads(text)["format"] == 2]
            done += len(now)
            for text in now:
                Manifest.from_json(text)
            if json.loads(path.read_bytes())["format"] != 2:
                history = HeadStore(store).history(model)
                assert history is not None
                assert len(now) == len(manifests)
                assert len(history.versions()) + len(history.retired()) == len(manifests)
            for text in set(manifests.values()) - set(now):
                manifest_format1.read_manifest(text)
    return done


def comparable(folder: Path) -> dict[str, Any]:
    """All objects, without what is random: names of nodes, and ids of writes."""
    found: dict[str, Any] = {}
    with closing(LocalStore(folder)) as store:
        for key, content in contents(folder).items():
            if key.endswith("/head.json"):
                model = ModelName(*Path(key).parts[-3:-1])
                history = HeadStore(store).history(model)
                assert history is not None
                head = history.head
                found[key] = (
                    history.versions(), history.retired(), head.refs, head.open, head.failed, head.next_version,
                    head.registration, head.files_id, head.retention, head.generation, head.writes[:-1],
                )  # fmt: skip
            elif "/history/" not in key:
                found[key] = content
    return found


# -- what is in its way ----------------------------------------------------------------------------------------------


def test_a_damaged_version_keeps_its_model_from_being_migrated_and_is_named(old: Path) -> None:
    damaged = version_folder(old, 3) / "model-00002-of-00002.safetensors"
    spoil(damaged)
    head = (old / "models" / MODEL / "head.json").read_bytes()
    code, said = migrate(old)
    assert (code, said["ok"]) == (1, False)
    problem = said["models"][1]["problems"]["3"]
    assert "acme/smol@3 is damaged" in problem
    assert "model-00002-of-00002.safetensors does not agree with its digest" in problem
    assert "tensor " in problem
    assert (old / "models" / MODEL / "head.json").read_bytes() == head
    assert json.loads((old / "models/acme/other/head.json").read_bytes())["format"] == 3
    spoil(damaged)  # restored
    code, said = migrate(old)
    assert (code, said["models"][0]["versions"]) == (0, [3])


@pytest.mark.parametrize("how", ["spoilt", "file is missing", "manifest is missing", "cut"])
def test_damaged_versions_can_be_dropped_with_the_refs_that_name_them(
    old: Path, opened: LocalStore, how: str
) -> None:
    for number in (2, 6):
        path = version_folder(old, number) / "model-00001-of-00002.safetensors"
        match how:
            case "spoilt":
                spoil(path)
            case "file is missing":
                path.unlink()
            case "manifest is missing":
                (path.parent / "weighbridge.json").unlink()
            case "cut":
                path.write_bytes(path.read_bytes()[:-1])
    code, said = migrate(old, "--drop-damaged")
    assert code == 0
    assert said["models"][1]["dropped"] == [2, 6]
    history = HeadStore(opened).history(NAME)
    assert history is not None
    assert list(history.versions()) == [3, 5]
    assert history.head.ref_numbers == {"latest": 5}
    assert history.head.next_version == OPEN + 1


@pytest.mark.parametrize("text", [b"{", b'{"format":2}', b'{"format":9}'])
def test_a_model_whose_head_cannot_be_read_is_named_and_the_others_are_migrated(
    old: Path, opened: LocalStore, text: bytes
) -> None:
    (old / "models/acme/other/head.json").write_bytes(text)
    code, said = migrate(old, "--drop-damaged")
    assert (code, said["ok"]) == (1, False)
    failures = {model["name"]: model["failure"] for model in said["models"]}
    assert "models/acme/other/head.json" in failures["acme/other"]
    assert failures[MODEL] == ""
    assert HeadStore(opened).history(NAME) is not None
    assert (old / "models/acme/other/head.json").read_bytes() == text
    result = CliRunner().invoke(commands, ["migrate", str(old)])
    assert (result.exit_code, "acme/other: not migrated: " in result.output) == (1, True)


def test_a_version_of_a_later_release_is_not_dropped(old: Path) -> None:
    edit(version_folder(old, 3) / "weighbridge.json", format=9)
    before = contents(old / "models" / MODEL)["head.json"]
    code, said = migrate(old, "--drop-damaged")
    (problems,) = (model for model in said["models"] if model["name"] == MODEL)
    assert (code, problems["dropped"]) == (1, [])
    assert "format 9" in problems["problems"]["3"]
    assert "newer Weighbridge" in problems["fix"]
    assert contents(old / "models" / MODEL)["head.json"] == before


@pytest.mark.parametrize("migrated", [True, False])
def test_a_manifest_of_another_version_is_not_taken_for_this_ones(old: Path, migrated: bool) -> None:
    other = version_folder(old, 3) / "weighbridge.json"
    if migrated:
        spoil(version_folder(old, 6) / "config.json", 5)  # so that the head stays for another attempt
        assert migrate(old)[0] == 1
    shutil.copy(other, version_folder(old, 2))
    code, said = migrate(old)
    (problems,) = (model["problems"] for model in said["models"] if model["name"] == MODEL)
    assert (code, problems["2"]) == (1, "the manifest of acme/smol@2 is that of acme/smol@3")


def test_a_retired_version_that_is_half_deleted_is_in_nobodys_way(old: Path, opened: LocalStore) -> None:
    (version_folder(old, RETIRED) / "weighbridge.json").unlink()
    assert migrate(old)[0] == 0
    history = HeadStore(opened).history(NAME)
    assert history is not None
    assert list(history.retired()) == [RETIRED]


class Meddled(LocalStore):
    """A store in which the head's first writes end otherwise than by being done."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.meddlers: list[Any] = []

    def put(self, key: str, data: Any, *, mode: Any) -> str:
        if key.endswith("head.json") and self.meddlers:
            self.meddlers.pop(0)(lambda: super(Meddled, self).put(key, data, mode=mode))
        return super().put(key, data, mode=mode)


def test_a_head_that_changes_meanwhile_is_migrated_as_it_is_then(old: Path) -> None:
    path = old / "models" / MODEL / "head.json"

    def retag(_: Any) -> None:
        edit(path, refs={"latest": 6, "prod": 3})

    def lost(write: Any) -> None:
        write()
        raise DeadlineExceeded("the answer was lost")

    with closing(Meddled(old)) as store:
        store.meddlers = [retag, lost]
        found = migrate_model(store, HeadStore(store), NAME)
        assert found is not None
        assert (found.versions, found.problems) == ((RETIRED, *DURABLE), {})
        head = Head.from_json(path.read_bytes())
        assert head.ref_numbers == {"latest": 6, "prod": 3}
        assert migrate_model(store, HeadStore(store), NAME) is None


def test_a_head_that_others_change_all_the_time_is_left_to_them(old: Path) -> None:
    generation = iter(range(100, 200))
    path = old / "models" / MODEL / "head.json"
    with closing(Meddled(old)) as store:
        store.meddlers = [lambda _: edit(path, generation=next(generation))] * 100
        with pytest.raises(Conflict, match="is changed by others"):
            migrate_model(store, HeadStore(store), NAME)
    assert json.loads(path.read_bytes())["format"] == 2


def test_a_store_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    result = CliRunner().invoke(commands, ["migrate", str(tmp_path / "nowhere")])
    assert result.exit_code == 2
    assert not (tmp_path / "nowhere").exists()


# -- manifests of format 1 -------------------------------------------------------------------------------------------

BREAKS: list[Any] = [
    lambda d: d.update(format=2),
    lambda d: d.update(extra=1),
    lambda d: d.pop("lineage"),
    lambda d: d["files"]["config.json"].update(blake3="0" * 64),
    lambda d: d["files"].update({"config.json": 7}),
    lambda d: (
        d["files"].pop("config.json") and d["files"].update({"../x": {"size": 1, "xxh3_128": "0" * 32}})
    ),
    lambda d: d["tensors"]["model.norm.weight"].update(nonfinite=0),
    lambda d: d["tensors"]["model.norm.weight"].update(offset=10**9),
    lambda d: d["tensors"]["model.norm.weight"].pop("dtype"),
]


@pytest.mark.parametrize("number", range(len(BREAKS)))
def test_a_manifest_of_format_1_that_is_none_is_data_loss(old: Path, number: int) -> None:
    document = json.loads((version_folder(old, 2) / "weighbridge.json").read_bytes())
    manifest_format1.read_manifest(json.dumps(document).encode())
    BREAKS[number](document)
    with pytest.raises(DataLoss, match=r"^it"):
        manifest_format1.read_manifest(json.dumps(document).encode(), "it")
