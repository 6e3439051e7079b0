"""Are the steps of verl's loops read from its logs, and do the cases differ as they say?"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.verl_loops import command, compute_score, steps_of

LOG = (
    "(TaskRunner pid=1) 'Initial validation'\n"
    "\x1b[36m(TaskRunner pid=1)\x1b[0m step:2 - training/global_step:2 - critic/rewards/mean:np.float64(0.1484) - "
    "timing_s/update_weights:0.44077 - weighbridge/version:3 - actor/lr:np.float64(1e-06)\n"
)


def test_metrics_of_steps_are_read_from_a_log() -> None:
    [step] = steps_of(LOG)
    assert step["training/global_step"] == 2
    assert step["critic/rewards/mean"] == 0.1484
    assert step["timing_s/update_weights"] == 0.44077
    assert step["weighbridge/version"] == 3
    assert step["actor/lr"] == 1e-06


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        ("nccl", "checkpoint_engine.backend=nccl"),
        ("tensors", "trainer_mode=separate_async"),
        ("slices", "engine_kwargs.weighbridge.mode=slices"),
        ("resumed", "trainer.save_freq=5"),
    ],
)
def test_a_case_has_what_it_is_named_for_and_no_other_case_has(case: str, wanted: str) -> None:
    having = [
        each
        for each in ("nccl", "tensors", "slices", "resumed")
        if any(wanted in word for word in command(each, Path("/tmp/x"), "127.0.0.1:1", 20))
    ]
    assert case in having
    if case != "tensors":  # all but the other trainer run separate_async
        assert having == [case]
    else:
        assert "slices" not in having


@pytest.mark.parametrize(("said", "score"), [("7", 1.0), (" 7 ", 1.0), ("8", 0.1), ("seven", 0.0), ("17", 0.1)])
def test_a_response_is_rewarded_for_the_right_number(said: str, score: float) -> None:
    assert compute_score("sums", said, "7") == score
