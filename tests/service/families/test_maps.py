"""Are the maps of all families those that stores know, whatever transformers makes them?

`data/family_maps.json` has configs as transformers 4.57 and 5.23 (of qwen3_next 5.19) write them, and of each the
identity that heads keep and a digest of the slices that engines pull, as they were made with transformers 4.57.
`make test-transformers` compares the newest with them.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.family_maps import digests
from weighbridge.errors import InvalidArgument
from weighbridge_service.models.bridge_process import BridgeProcess
from weighbridge_service.models.bridges import made_by

FILE = Path(__file__).parents[2] / "data/family_maps.json"
KNOWN: dict[str, dict[str, Any]] = json.loads(FILE.read_text("utf-8"))
BY_5 = ", saved by transformers 5"
PYTHON = os.environ.get("WEIGHBRIDGE_TRANSFORMERS_PYTHON")


@pytest.mark.parametrize("name", KNOWN)
def test_the_map_of_a_family_stays_what_stores_know(name: str) -> None:
    known = dict(KNOWN[name])
    assert digests(known.pop("config")) == known


def test_a_config_that_transformers_5_has_written_is_the_same_model() -> None:
    compared = 0
    for name, known in KNOWN.items():
        before = KNOWN.get(name.removesuffix(BY_5))
        # transformers 5 writes that there is a layer of multi-token prediction also where there is none
        if name.endswith(BY_5) and before and "num_nextn_predict_layers" not in known["config"]:
            compared += 1
            assert known["identity"] == before["identity"], name
    assert compared > 10


def test_a_process_of_its_own_makes_the_same_maps() -> None:
    process = BridgeProcess()
    try:
        with made_by(process.bridge):
            for name in (
                "llama",
                "gemma3",
                "qwen2_5_vl-tied",
                "llama4-interleaved",
                "deepseek_v3_mtp",
                "mimo",
            ):
                known = dict(KNOWN[name])
                config = known.pop("config") | {"as": "nobody has asked for before"}
                assert digests(config) == known
            with pytest.raises(InvalidArgument, match="hidden_size = -1, which is negative"):
                digests(KNOWN["llama"]["config"] | {"hidden_size": -1})
    finally:
        process.close()


@pytest.mark.skipif(PYTHON is None, reason="make test-transformers names an environment with other transformers")
@pytest.mark.timeout(600)
def test_other_transformers_make_the_same_maps() -> None:
    done = subprocess.run(
        [str(PYTHON), "-W", "ignore", "-m", "tests.support.family_maps", str(FILE)],
        cwd=FILE.parents[2], stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found == {name: {"identity": known["identity"], "slices": known["slices"]} for name, known in KNOWN.items()}
