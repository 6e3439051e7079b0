"""Random number generators: do all go on with the numbers that they would have given?"""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

import numpy as np
import torch

from tests.support.reference import tiny_config, tiny_model
from tests.support.services import running_service
from weighbridge import EngineClient, RandomStates, TrainerClient
from weighbridge._core.pauses import DICE
from weighbridge._trainers.states import blobs


def draw() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        float(torch.rand(1)),
        float(torch.randn(1)),
    ]


def test_all_generators_go_on_after_their_states_went_through_a_blob() -> None:
    draw()  # so that a second normal number is kept for later, which is part of the state
    states = RandomStates()
    blob = blobs.encode({"random": states.state_dict()})
    expected = [draw() for _ in range(3)]
    draw()
    states.load_state_dict(blobs.decode(blob, "blob")["random"])
    assert [draw() for _ in range(3)] == expected


def test_a_push_and_a_pull_leave_the_programs_random_numbers_alone(tmp_path: Path) -> None:
    config = tiny_config("llama", tied=True)
    tiny_model(config, seed=1).save_pretrained(tmp_path / "hf")
    with running_service(tmp_path / "store") as service:
        random.seed(7)
        with TrainerClient(service.address) as trainer, EngineClient(service.address) as engine:
            trainer.import_folder("acme/smol", tmp_path / "hf").wait(timeout=60)
            assert dict(engine.pull("acme/smol"))
        assert random.random() == random.Random(7).random()


def test_no_code_of_the_project_draws_from_the_programs_generator() -> None:
    draws = re.compile(r"(?<![\w.])random\.(?!Random\b)[a-z]\w*\(")
    root = Path(__file__).parents[4]
    found = [
        str(file.relative_to(root))
        for folder in ("clients", "service", "storage")
        for file in (root / folder).rglob("*.py")
        if draws.search(file.read_text())
    ]
    # which reads and restores it for the trainer
    assert found == ["clients/weighbridge/_trainers/states/random_states.py"], found


def test_a_forked_process_pauses_otherwise_than_its_parent() -> None:
    before = DICE.getstate()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, b"same" if DICE.getstate() == before else b"other")
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading, "rb") as said:
        assert said.read() == b"other"
