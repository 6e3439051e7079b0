"""Is a breaking change of the contract refused, and an addition accepted?"""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

PROTOS = Path(__file__).parents[2] / "protos"
BUF = Path(sysconfig.get_path("scripts")) / "buf"
WEIGHTS = "weighbridge/v1/weight_service.proto"
FIELD = "  string dtype = 4;"


def against_baseline(folder: Path, old: str, new: str) -> subprocess.CompletedProcess[str]:
    """The result of ``buf breaking`` for a contract in which ``old`` is replaced by ``new``."""
    shutil.copytree(PROTOS, folder / "protos")
    contract = folder / "protos" / WEIGHTS
    text = contract.read_text()
    assert old in text
    contract.write_text(text.replace(old, new, 1))
    return subprocess.run(
        [BUF, "breaking", "--against", "baseline.binpb"],
        cwd=folder / "protos",
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (FIELD, "", 'field "4" with name "dtype"'),
        (FIELD, "  bytes dtype = 4;", "string"),
        (FIELD, "  string dtype = 400;", 'field "4" with name "dtype"'),
        (FIELD, "  string type = 4;", 'from "dtype" to "type"'),
        ("  rpc PlanPull(stream PlanPullRequest) returns (PlanPullResponse);", "", "PlanPull"),
        ("returns (stream PullResponse)", "returns (PullResponse)", "stream"),
    ],
    ids=["field gone", "another type", "another number", "another name", "method gone", "no stream"],
)
def test_what_would_break_a_user_is_refused_by_name(tmp_path: Path, old: str, new: str, said: str) -> None:
    done = against_baseline(tmp_path, old, new)
    assert done.returncode != 0
    assert WEIGHTS in done.stdout
    assert said in done.stdout


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (FIELD, f"{FIELD}\n  string added = 400;"),
        ("message PlanPullRequest {", "message Added {}\n\nmessage PlanPullRequest {"),
        (
            "service WeightService {",
            "service WeightService {\n  rpc Added(PullRequest) returns (PullResponse);",
        ),
    ],
    ids=["field", "message", "method"],
)
def test_what_only_adds_is_accepted(tmp_path: Path, old: str, new: str) -> None:
    done = against_baseline(tmp_path, old, new)
    assert done.returncode == 0, done.stdout
