"""Does fsck end as it promises on any damaged store, and lose nothing that is whole?

``WEIGHBRIDGE_STORE_RUNS=2000`` spoils as many stores in each test; ``WEIGHBRIDGE_SEED`` chooses the first one's seed.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.support import store_damages
from tests.support.rounds import first_seed, rounds
from tests.support.small_stores import add_model, unpack, version_folder
from tests.support.store_damages import snapshot
from weighbridge._cli import commands
from weighbridge.errors import WeighbridgeError
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head.head_changes import delete_versions, forget_versions
from weighbridge_storage.head.head_store import HeadStore
from weighbridge_storage.stores.local import LocalStore

RUNS = rounds("STORE_RUNS")
SEED = first_seed()
pytestmark = pytest.mark.timeout(300 + RUNS)
TREE = ModelName.parse("acme/tree")
TREE_LAST = 65
"""The newest version of the model of which most are in the tree of its history."""
FORGOTTEN = 2


@dataclass(frozen=True)
class Outcome:
    """The outcome of a command.

    Attributes:
        code: its exit code.
        said: its report.
    """

    code: int
    said: dict[str, Any]

    def findings(self, *, repaired: bool | None = None) -> set[tuple[str, int | None, str]]:
        """Findings as model, version and sentence: all, or those that were (or were not) repaired."""
        return {
            (model["name"], found["number"], found["what"])
            for model in self.said.get("models", ())
            for found in model["findings"]
            if repaired is None or found["repaired"] == repaired
        }


@pytest.fixture(scope="module", autouse=True)
def _no_flush(module_monkeypatch: pytest.MonkeyPatch) -> None:
    module_monkeypatch.setattr(os, "fsync", lambda _file: None)  # no test simulates a power loss


@pytest.fixture(scope="module")
def module_monkeypatch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store in which one version was forgotten, and some objects of an aborted one are left."""
    folder = unpack(tmp_path_factory.mktemp("template"))
    # two leaves and an inner node
    add_model(folder, str(TREE), (1, 2, 3, TREE_LAST - 1, TREE_LAST))
    with closing(LocalStore(folder)) as store:
        heads = HeadStore(store, most_recent=2)
        heads.update(TREE, lambda head: (replace(head, next_version=head.next_version + 2), None))
        heads.edit(TREE, lambda history: (delete_versions(history, [FORGOTTEN], 1), None))
        heads.edit(TREE, lambda history: (forget_versions(history, [FORGOTTEN]), None))
    shutil.rmtree(version_folder(folder, FORGOTTEN, str(TREE)))
    given_up = version_folder(folder, TREE_LAST + 1, str(TREE))
    given_up.mkdir()
    (given_up / "config.json").write_bytes(b"{}")
    for hidden in (".tmp", ".locks"):
        shutil.rmtree(folder / hidden, ignore_errors=True)
    return folder


def copied(template: Path, place: Path) -> Path:
    """A copy of a store, whose files are only linked: nothing writes into a file."""
    shutil.rmtree(place, ignore_errors=True)
    return shutil.copytree(template, place, copy_function=os.link)


def run(command: str, folder: Path, *options: str) -> Outcome:
    """A command's outcome: never a traceback, always a report, and the exit code that goes with it."""
    result = CliRunner().invoke(commands, [command, str(folder), *options, "--json"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    assert result.exit_code in (0, 1)
    said = json.loads(result.stdout)
    assert ("error" in said or not said["ok"]) == (result.exit_code == 1)
    assert "Traceback" not in result.output
    return Outcome(result.exit_code, said)


# -- an independent reader -------------------------------------------------------------------------------------------


def listed(folder: Path, model: str) -> set[int] | None:
    """The versions in history by the definition in docs/formats.md; None if the history cannot be read."""
    place = folder / "models" / model
    try:
        head = json.loads((place / "head.json").read_bytes())
        entries: dict[int, Any] = {}
        nodes = [head["root"]] if head["root"] else []
        while nodes:
            node = json.loads((place / "history" / f"{nodes.pop()['name']}.json").read_bytes())
            nodes += node.get("children", [])
            entries |= {entry["number"]: entry for entry in node.get("entries", [])}
        for number in head["removed"]:
            entries.pop(number, None)
        entries |= {entry["number"]: entry for entry in head["recent"]}
        hidden = {entry["number"] for entry in head["open"] + head["failed"]} - {e["number"] for e in head["recent"]}
        return {n for n, entry in entries.items() if not entry.get("retired_ms", 0)} - hidden
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def believed(folder: Path, model: str) -> set[int] | None:
    """The versions in history as Weighbridge reads it; None if it refuses to."""
    try:
        with closing(LocalStore(folder)) as store:
            history = HeadStore(store).history(ModelName.parse(model))
            return None if history is None else set(history.versions())
    except WeighbridgeError:
        return None


@dataclass(frozen=True)
class Version:
    """A version that was durable before anything was spoilt: its files by path, without what can be made anew."""

    model: str
    number: int
    files: Mapping[str, object]


def durable_versions(template: Path) -> list[Version]:
    """All versions in history, with what makes each of them."""
    found = []
    everything = snapshot(template)
    for head in sorted(template.rglob("head.json")):
        model = str(head.parent.relative_to(template / "models"))
        for number in sorted(listed(template, model) or ()):
            prefix = str(version_folder(template, number, model).relative_to(template)) + "/"
            files = {k: v for k, v in everything.items() if k.startswith(prefix) and not k.endswith(".blake3")}
            assert f"{prefix}weighbridge.json" in files
            found.append(Version(model, number, files))
    return found


def intact(versions: list[Version], there: Mapping[str, object]) -> list[Version]:
    """The versions of which no file is damaged."""
    return [v for v in versions if all(there.get(key) == content for key, content in v.files.items())]


# -- fsck ------------------------------------------------------------------------------------------------------------


def spoilt(template: Path, place: Path, seed: int) -> tuple[Path, random.Random, list[str]]:
    """A copy of a store with one to three random damages."""
    randomness = random.Random(seed)
    folder = copied(template, place)
    damages = [store_damages.spoil(randomness, folder) for _ in range(randomness.choice((1, 1, 2, 3)))]
    return folder, randomness, damages


def check_fsck(template: Path, place: Path, seed: int) -> None:
    versions = durable_versions(template)
    folder, randomness, damages = spoilt(template, place, seed)
    there = snapshot(folder)
    print(seed, damages)
    seen = run("fsck", folder)
    assert snapshot(folder) == there
    held = {v.model: believed(folder, v.model) for v in versions}
    options = ["--drop-damaged"] if randomness.random() < 0.5 else []
    outcome = run("fsck", folder, "--repair", *options)
    after = snapshot(folder)
    again = run("fsck", folder)
    assert "error" not in seen.said
    assert "error" not in outcome.said
    assert outcome.findings() == seen.findings()
    assert not outcome.findings(repaired=True) & again.findings()
    assert outcome.code == again.code
    for version in intact(versions, there):
        trusted = held[version.model]
        if trusted is not None and version.number not in trusted:
            continue  # the head itself says that there is no such version
        assert all(after.get(key) == content for key, content in version.files.items()), version.number
        if not blocked(folder, version.model, outcome):
            assert version.number in (listed(folder, version.model) or ()), version


def blocked(folder: Path, model: str, outcome: Outcome) -> bool:
    """Whether a model cannot get a head: something else has its name, or another release has written a part of it."""
    head = folder / "models" / model / "head.json"
    if head.is_symlink() or (head.exists() and not head.is_file()):
        return True
    return any("this Weighbridge" in what for name, _, what in outcome.findings() if name == model)


def test_fsck_of_a_store_with_random_damage_loses_nothing_that_is_whole(template: Path, tmp_path: Path) -> None:
    for seed in range(SEED, SEED + RUNS):
        check_fsck(template, tmp_path / "store", seed)


# -- objects that vanish ---------------------------------------------------------------------------------------------


def check_vanishing(template: Path, place: Path, seed: int) -> None:
    """As `check_fsck`, of a store that is whole, and from which others remove things while the repair runs."""
    randomness = random.Random(seed)
    folder, versions = copied(template, place), durable_versions(template)
    reads, real = itertools.count(), LocalStore._reading
    taken: list[str] = []
    moments = {randomness.randrange(250) for _ in range(randomness.choice((1, 2, 5)))}

    def reading(self: LocalStore, key: str) -> Any:
        if next(reads) in moments:
            taken.append(store_damages.take_away(randomness, folder))
        return real(self, key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "_reading", reading)
        run("fsck", folder, "--repair", *(["--drop-damaged"] if randomness.random() < 0.5 else []))
    print(seed, taken)
    there = snapshot(folder)
    held = {v.model: believed(folder, v.model) for v in versions}
    run("fsck", folder, "--repair")
    after = snapshot(folder)
    for version in intact(versions, there):
        assert all(after.get(key) == content for key, content in version.files.items()), version.number
        assert held[version.model] is None or version.number in (held[version.model] or ()), version.number
        assert version.number in (listed(folder, version.model) or ()), version.number


def test_fsck_of_a_store_from_which_objects_vanish_loses_nothing_that_is_whole(template: Path, tmp_path: Path) -> None:
    for seed in range(SEED, SEED + RUNS):
        check_vanishing(template, tmp_path / "store", seed)
