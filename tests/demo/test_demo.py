"""Does the whole round hold: a real model, real Megatron ranks, real engines, one service?

The demo is the acceptance test; here it runs once as a user runs it, and what it reports is looked at.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

STEPS = 2
TENSOR_BYTES = 538_060_032
"""134,515,008 parameters in float32; the output is the embedding."""
EMBEDDING_BYTES = 49152 * 576 * 4
NORM_BYTES = (2 * 30 + 1) * 576 * 4


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_model_goes_round_from_folder_to_trainer_to_engines_and_stays_exact(tmp_path: Path) -> None:
    work = tmp_path / "work"
    command = [
        sys.executable,
        "-m",
        "weighbridge",
        "demo",
        "--dir",
        str(work),
        "--steps",
        str(STEPS),
        "--json",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            out, err = process.communicate(timeout=360)
        except subprocess.TimeoutExpired:
            process.terminate()  # it ends its own processes, then itself
            out, err = process.communicate(timeout=30)
    report = json.loads(out)
    assert report["failures"] == [], err
    assert report["passed"]
    assert process.returncode == 0
    assert len(report["checks"]) >= 14

    # each parameter was pushed once, by six ranks
    assert report["model_bytes"] == TENSOR_BYTES
    assert len(report["pushed"]) == 6
    assert sum(rank["stream_bytes"] for rank in report["pushed"]) == TENSOR_BYTES
    # service, trainer and engines share a machine, and so its memory
    engines = [rank for ranks in report["engines"].values() for rank in ranks]
    lanes = [each["lane"] for each in (*report["pushed"], *engines, report["import"], report["full_pull"])]
    assert {*lanes} == {"local"}
    # an engine rank got what tensor parallelism leaves it, and no more
    third = (TENSOR_BYTES - EMBEDDING_BYTES - NORM_BYTES) // 3 + EMBEDDING_BYTES + NORM_BYTES
    pulled = [sorted(rank["nbytes"] for rank in ranks) for ranks in report["engines"].values()]
    assert pulled == [[third] * 3, [third] * 3, [TENSOR_BYTES]]
    # being held up includes the copy
    assert all(rank["copy_seconds"] <= rank["held_seconds"] for rank in report["pushed"])

    assert len(report["losses"]) == STEPS
    assert report["losses"][-1] < report["losses"][0]
    assert report["texts"]["transformers, before"].startswith(" Paris.")
    assert len({text for who, text in report["texts"].items() if not who.endswith("before")}) == 1

    # what it leaves is a folder that any reader of Hugging Face folders reads
    from safetensors import safe_open

    folder = work / "store" / "models" / "acme" / "smol" / "versions" / "000000000002"
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    names: list[str] = []
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names += file.keys()
    assert len(names) == len(set(names)) == 272
