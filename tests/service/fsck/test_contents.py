"""Does `fsck --digests` find a bit that flipped, without a service, and go on where it was interrupted?"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.service.fsck.damaged_stores import WEIGHTS, said
from tests.support.small_stores import MODEL, spoil, version_folder
from weighbridge._cli import commands
from weighbridge._cli.resuming import DoneLines
from weighbridge.errors import Unavailable
from weighbridge_service.fsck import contents
from weighbridge_storage.stores.local import LocalStore


def compared(folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(commands, ["fsck", str(folder), "--digests", *options, "--json"])
    (model,) = (each for each in json.loads(result.stdout)["models"] if each["name"] == MODEL)
    return result.exit_code, model


def test_a_bit_that_flipped_is_found_by_digests_and_no_command_says_that_what_it_has_not_read_is_well(
    folder: Path,
) -> None:
    code, model = compared(folder)
    assert (code, model["ok"], model["contents_read"], model["differing"]) == (0, True, True, [])
    assert model["bytes_read"] > sum(
        path.stat().st_size for path in (folder / f"models/{MODEL}/versions").rglob("*.safetensors")
    )
    spoil(version_folder(folder, 3) / WEIGHTS)
    code, lines = said("fsck", str(folder))
    assert (code, lines[-1].split("; ")[-1]) == (0, "contents were not read: --digests reads them")
    code, model = compared(folder)
    assert (code, model["ok"]) == (1, False)
    assert {each["number"] for each in model["differing"]} == {3}
    assert any(WEIGHTS in each["what"] for each in model["differing"])
    code, lines = said("fsck", str(folder), "--digests")
    assert code == 1
    assert f"{MODEL}@3: {WEIGHTS} does not agree with its digest" in lines


def test_what_was_compared_before_an_interruption_is_not_read_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify, read = contents.verify_version, []

    def interrupted(store: Any, model: Any, number: int, **more: Any) -> Any:
        if len(read) == 2:
            raise KeyboardInterrupt
        read.append(number)
        return verify(store, model, number, **more)

    resume = tmp_path / "resume"
    options = ["fsck", str(folder), "--digests", "--resume", str(resume)]
    monkeypatch.setattr(contents, "verify_version", interrupted)
    assert CliRunner().invoke(commands, options).exit_code != 0
    first, read = read, []
    with resume.open("a") as file:
        file.write('["acme/sm')  # the process was killed while it wrote
    monkeypatch.setattr(
        contents, "verify_version", lambda *args, **more: (read.append(args[2]), verify(*args, **more))[1]
    )
    assert CliRunner().invoke(commands, options).exit_code == 0
    assert first
    assert not set(first) & set(read[-2:])
    assert not resume.exists()


def test_a_file_that_is_no_list_of_what_was_compared_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other").write_text("hello\n")
    code, lines = said("fsck", str(folder), "--digests", "--resume", str(tmp_path / "other"))
    assert code != 0
    assert "is not a file of --resume" in lines[0]


def test_what_was_compared_in_one_store_is_read_in_another_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resume, other = tmp_path / "resume", tmp_path / "other"
    shutil.copytree(folder, other)
    spoil(version_folder(other, 3) / WEIGHTS)

    def interrupted(_: DoneLines) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(DoneLines, "end", interrupted)
        CliRunner().invoke(commands, ["fsck", str(folder), "--digests", "--resume", str(resume)])
    assert MODEL in resume.read_text()
    code, model = compared(other, "--resume", str(resume))
    assert (code, {each["number"] for each in model["differing"]}) == (1, {3})


def test_a_store_that_is_away_is_an_error_and_no_damage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: Any, **__: Any) -> Any:
        raise Unavailable("the store does not answer")

    monkeypatch.setattr(LocalStore, "stream", away)
    code, lines = said("fsck", str(folder), "--digests")
    assert code != 0
    assert "does not answer" in "\n".join(lines)
    assert not any("delete the versions" in line for line in lines)
