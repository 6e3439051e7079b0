"""Entries of a flattened state dict: are they found, and is what is wrong with them told so that one can mend it?"""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

from weighbridge._core import dtypes
from weighbridge._core.layouts import TensorSpec
from weighbridge._formats.memory_forms import TensorForms
from weighbridge._formats.torch_state import ALLOW
from weighbridge.errors import LayoutError
from weighbridge.integrations.torch.entries import Entries, planned_shards

MODEL = TensorForms(
    {name: TensorSpec(name, dtypes.parse("fp32"), (2,)) for name in ("model.norm.weight", "lm_head.bias")}
)


@pytest.mark.parametrize("prefix", ["app.", "app.state."])
def test_a_prefix_that_was_not_given_is_named(prefix: str) -> None:
    state = {f"{prefix}{name}": torch.ones(2) for name in MODEL}
    items = create_default_local_save_plan(state, True).items
    with pytest.raises(LayoutError) as raised:
        planned_shards(items, Entries(MODEL, "model."), ALLOW)
    assert f"prefix={prefix!r}" in str(raised.value)
    found = planned_shards(items, Entries(MODEL, prefix), ALLOW)
    assert [shard.tensor for shard, _, _, _ in found.layout.placements] == list(MODEL)


def test_other_names_are_no_prefix() -> None:
    items = create_default_local_save_plan({"ema.weights": torch.ones(2)}, True).items
    with pytest.raises(LayoutError, match=r"in 1 entry(?s:.*)ema.weights"):
        planned_shards(items, Entries(MODEL, "model."), ALLOW)
