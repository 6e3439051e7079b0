"""Commands that hold, show and release versions: do they say what to do, and do it?"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import load_file, save_file

from tests.support.raw_clients import tiny_folder
from tests.support.services import RunningService, running_service
from weighbridge._cli import commands
from weighbridge._clients.client import Client
from weighbridge._core.resources import Protection

MODEL = "acme/held"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[RunningService]:
    with running_service(tmp_path / "store") as running:
        yield running


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return tiny_folder(tmp_path / "good").folder


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    folder = tiny_folder(tmp_path / "bad").folder
    arrays = {name: array.copy() for name, array in load_file(folder / "model.safetensors").items()}
    arrays["model.norm.weight"][:2] = (np.inf, -np.inf)
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def run(service: RunningService, command: str, *args: object) -> Result:
    found = CliRunner().invoke(commands, [command, *map(str, args), "--server", service.address])
    assert found.exit_code == 0, found.output
    return found


def as_json(service: RunningService, command: str, *args: object) -> Any:
    return json.loads(run(service, command, *args, "--json").stdout)


def test_an_import_of_weights_that_are_not_finite_says_how_to_let_them_through(
    service: RunningService, bad: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", "weighbridge._clients.push_handle"):
        told = run(service, "import", bad, MODEL).stderr
    said = [each for each in caplog.records if each.name == "weighbridge._clients.push_handle"]
    assert said == [], "said once, by the command"
    assert "acme/held@1 is held: 2 of its elements are NaN or infinite" in told
    assert "weighbridge approve acme/held@1" in told
    assert "--allow-nonfinite" in told
    shown = run(service, "show", MODEL).stdout
    assert re.search(r"held: +acme/held@1 is held", shown)
    assert "2 elements are NaN or infinite" in run(service, "verify", f"{MODEL}@1").stdout
    assert "approved (nonfinite); named by latest, live" in run(service, "approve", f"{MODEL}@1").stdout
    assert re.search(r"approved: +nonfinite by .+@.+, ", run(service, "show", MODEL).stdout)
    assert "nothing to approve" in run(service, "approve", f"{MODEL}@1").stdout


def test_with_the_switch_an_import_is_not_held(service: RunningService, bad: Path) -> None:
    version = as_json(service, "import", bad, MODEL, "--allow-nonfinite")
    assert (version["held"], version["nonfinite_elements"]) == ([], 2)
    assert as_json(service, "show", MODEL)["model"]["refs"] == {"latest": 1, "live": 1}


def test_candidates_are_approved_with_a_note(service: RunningService, good: Path) -> None:
    run(service, "import", good, MODEL)
    assert as_json(service, "push", good, MODEL, "--step", 1, "--candidate")["held"] == ["candidate"]
    listed = run(service, "versions", MODEL).stdout
    assert re.search(r"^2 .* candidate ", listed, re.MULTILINE)
    refused = CliRunner().invoke(commands, ["approve", f"{MODEL}@latest", "--server", service.address])
    assert refused.exit_code == 1
    assert "names version 1, which is not held" in refused.stderr
    assert f"approve one that is: {MODEL}@2" in refused.stderr
    approved = as_json(service, "approve", f"{MODEL}@2", "--note", "looked at it", "--by", "ann")
    assert approved["approved_reasons"] == ["candidate"]
    assert (approved["approved_by"], approved["approved_note"]) == ("ann", "looked at it")
    assert as_json(service, "show", MODEL)["model"]["refs"] == {"latest": 2, "live": 2}


def test_what_is_shown_of_a_protected_ref_is_in_one_column_with_the_rest(
    service: RunningService, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(service, "import", good, MODEL)
    monkeypatch.setattr(Client, "protections", lambda _client, _model: [Protection("prod")])
    shown = run(service, "show", MODEL).stdout.splitlines()
    assert "protected: prod, whose changes need a scope that names it" in shown
    starts = {len(line) - len(line.split(":", 1)[1].lstrip()) for line in shown}
    assert starts == {len("protected: ")}


def test_the_gate_of_a_model_is_shown_and_what_is_not_said_of_it_stays(service: RunningService, good: Path) -> None:
    run(service, "import", good, MODEL)
    assert "holds versions with NaN" in run(service, "gate", MODEL).stdout
    as_json(service, "gate", MODEL, "--approval", "required")
    gate = as_json(service, "gate", MODEL, "--nonfinite", "allow")
    both = {"approval_required": True, "allow_nonfinite": True}
    assert gate == {"model": MODEL, **both, "protections": []}
    assert gate == as_json(service, "gate", MODEL)
    assert as_json(service, "push", good, MODEL, "--step", 1)["held"] == ["candidate"]
    as_json(service, "gate", MODEL, "--approval", "none")
    assert as_json(service, "push", good, MODEL, "--step", 2)["held"] == []


def test_versions_are_listed_by_their_metadata(service: RunningService, good: Path) -> None:
    run(service, "import", good, MODEL, "--metadata", "reward=0.2")
    for step, reward in ((1, 0.7), (2, 0.9)):
        run(
            service,
            "push",
            good,
            MODEL,
            "--step",
            step,
            "--metadata",
            f"reward={reward}",
            "--metadata",
            "by=x",
        )
    found = as_json(service, "versions", MODEL, "--where", "reward>=0.7")
    assert [(v["number"], v["metadata"]) for v in found] == [
        (3, {"reward": 0.9, "by": "x"}),
        (2, {"reward": 0.7, "by": "x"}),
    ]
    both = as_json(service, "versions", MODEL, "--where", "reward>=0.7", "--where", "reward<0.8")
    assert [v["number"] for v in both] == [2]
    assert as_json(service, "versions", MODEL, "--where", "reward>1") == []
    unknown = CliRunner().invoke(commands, ["versions", MODEL, "--where", "rewrd>0", "--server", service.address])
    assert unknown.exit_code == 1
    assert "metadata called 'rewrd'; did you mean reward?" in unknown.stderr
    assert "compare by, reward" in unknown.stderr
    text = CliRunner().invoke(commands, ["versions", MODEL, "--where", "reward>=abc", "--server", service.address])
    assert (text.exit_code, "'abc' is a string" in text.stderr) == (1, True)
    assert 'by="x", reward=0.9' in run(service, "versions", MODEL).stdout
    assert 'by="x", reward=0.9' in run(service, "show", MODEL).stdout


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (["versions", MODEL, "--where", "reward"], "compares nothing"),
        (["push", "x", MODEL, "--step", "1", "--metadata", "reward"], "has no value"),
        (["push", "x", MODEL, "--step", "1", "--metadata", "a=1", "--metadata", "a=2"], "a second one"),
        (["push", "x", MODEL, "--step", "1", "--metadata", "reward=NaN"], "not a finite number"),
        (["approve", MODEL], f"write its number, like {MODEL}@17"),
        (["abort", MODEL], f"write its number, like {MODEL}@17"),
        (["abort", f"{MODEL}@latest"], "--all` lists what is being received"),
        (["gate", MODEL, "--approval", "perhaps"], "is not one of"),
    ],
)
def test_what_is_misspelt_is_refused_before_anything_is_asked(line: list[str], says: str) -> None:
    found = CliRunner().invoke(commands, line)
    assert found.exit_code == 2
    assert says in found.output
