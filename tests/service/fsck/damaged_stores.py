"""Stores that tests damage, and checks of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from tests.support.small_stores import MODEL, spoil
from weighbridge._cli import commands
from weighbridge_storage.documents.entries import VersionEntry
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head.head_store import HeadStore
from weighbridge_storage.head.history import History
from weighbridge_storage.stores.objects import ObjectStore

NAME = ModelName.parse(MODEL)
LONG = ModelName.parse("acme/long")
WEIGHTS = "model-00001-of-00002.safetensors"


def fsck(location: Path | str, *options: str) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """The command's exit code, and its findings by model."""
    result = CliRunner().invoke(commands, ["fsck", str(location), *options, "--json"])
    assert result.stdout, result.output
    said = json.loads(result.stdout)
    assert said["ok"] == (result.exit_code == 0) == all(model["ok"] for model in said["models"])
    return result.exit_code, {model["name"]: model["findings"] for model in said["models"]}


def findings(location: Path | str, *options: str, model: ModelName = NAME) -> list[tuple[int | None, str]]:
    """The findings of one model that were not repaired; no other model may have any."""
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


def without_writer(entry: VersionEntry) -> VersionEntry:
    """An entry without the fields that a repair cannot recover: the writer, and the times of state changes."""
    return replace(entry, write_id="x", ranks=0, ready_ms=0, verified_ms=0, durable_ms=0)


def without_writers(history: History) -> dict[int, VersionEntry]:
    return {number: without_writer(entry) for number, entry in history.versions().items()}


def flip_digit(path: Path, name: str) -> None:
    """Flip the last bit of the first digit behind a name: still JSON, and a number that is as good as the other one."""
    text = path.read_bytes()
    spoil(path, next(i for i in range(text.index(name.encode()), len(text)) if text[i : i + 1].isdigit()))


def said(*args: str) -> tuple[int, list[str]]:
    result = CliRunner().invoke(commands, args)
    return result.exit_code, result.output.splitlines()
