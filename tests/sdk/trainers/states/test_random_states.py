"""Random number generators: do all go on with the numbers that they would have given?"""

from __future__ import annotations

import random

import numpy as np
import torch

from weighbridge import RandomStates
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
