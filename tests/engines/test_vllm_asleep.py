"""Does a real vLLM that sleeps wake up with the version that came meanwhile, or with the one that it had?"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.services import running_service
from tests.support.vllm_environment import HAS_KERNELS, PYTHON, environment, needs_vllm
from tests.support.word_models import PROMPT, TOKENS, make_folder, said_by_transformers
from weighbridge import TrainerClient

pytestmark = [
    needs_vllm,
    pytest.mark.skipif(not HAS_KERNELS, reason="nothing is computed without kernels"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

MODEL = "tests/sleeping"


def test_an_engine_that_has_slept_answers_by_the_version_that_it_says_it_has(tmp_path: Path) -> None:
    texts: dict[int, str] = {}
    with running_service(tmp_path / "store") as service, TrainerClient(service.address) as trainer:
        for number in (1, 2, 3):
            model = make_folder(tmp_path / str(number), number)
            if number == 1:
                trainer.register_model(MODEL, tmp_path / "1")
            if number < 3:
                trainer.push_folder(MODEL, tmp_path / str(number), step=number).wait(timeout=60)
            texts[number] = said_by_transformers(model).text
        done = subprocess.run(
            [
                PYTHON,
                "-m",
                "tests.support.vllm_sleeping_job",
                service.address,
                MODEL,
                PROMPT,
                str(TOKENS),
                str(tmp_path / "3"),
            ],
            env={
                **environment(),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "WEIGHBRIDGE_CACHE": str(tmp_path / "cache"),
            },
            capture_output=True,
            text=True,
            timeout=500,
        )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    answer = next(line for line in done.stdout.splitlines() if line.startswith("="))
    found: dict[str, Any] = json.loads(answer.removeprefix("="))
    one, two = f"{MODEL}@1", f"{MODEL}@2"
    assert len(set(texts.values())) == 3
    assert found["first"] == texts[1]
    assert "the engine sleeps" in found["refused"]
    assert found["kept"] == [texts[1], one]
    for level, version, name in ((1, 2, two), (2, 1, one)):
        assert found[f"waits {level}"] == ["", name]
        assert found[f"paused {level}"] == [True, True], "nothing is computed before all is awake"
        assert found[f"woken {level}"] == ["", name]
        assert found[f"says {level}"] == [False, texts[version], name]
    assert found["back"] == ["", texts[1], one]
    said, paused, broken = found["none"]
    assert "the engine is awake, serves no version, and is paused" in said
    assert "127.0.0.1:9" in said
    assert paused
    assert f"{one} was discarded while the engine slept" in broken
    assert found["update"] == ["", False, texts[2]]
    assert found["colocated"] == [3, False, texts[3], f"{MODEL}@3"]
