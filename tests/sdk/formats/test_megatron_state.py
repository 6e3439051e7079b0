"""Is a push of something other than a sharded state dict refused with the method to call, with and without
Megatron-core?
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

from weighbridge._formats.megatron_state import sharded_tensors
from weighbridge.errors import FailedPrecondition, InvalidArgument


@pytest.mark.parametrize("given", [{"w": torch.ones(2)}, torch.nn.Linear(2, 2), torch.ones(2), "model"])
def test_a_torch_state_dict_is_sent_to_the_method_that_takes_it(given: object) -> None:
    with pytest.raises(InvalidArgument, match="push_state_dict"):
        sharded_tensors(given)


def test_without_megatron_core_the_same_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(FailedPrecondition, match=r"megatron-core is not installed\n.*push_state_dict"):
        sharded_tensors({"w": torch.ones(2)})
