"""Are the ranges that ZeRO-3 leaves a rank boxes of the parameter, which alias them and leave padding alone?"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.zero3_ranges import Status, gathered, partition
from weighbridge._core import dtypes
from weighbridge._core.layouts import TensorSpec
from weighbridge._formats.torch_state import check_not_copied, torch_shards
from weighbridge._formats.zero3 import partition_shards
from weighbridge.errors import LayoutError


@given(st.lists(st.integers(1, 5), max_size=4), st.integers(1, 7))
@settings(max_examples=150, deadline=None)
def test_all_ranks_ranges_are_every_element_once(shape: list[int], ranks: int) -> None:
    whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    parameters, filled = [], torch.full_like(whole, -1)
    for rank in range(ranks):
        parameter = torch.nn.Parameter(whole.clone())
        partition(parameter, rank, ranks)
        parameters.append(parameter)
        shards = partition_shards(parameter)
        assert len(shards) <= max(2 * len(shape) - 1, 1)
        for box, tensor in shards:
            where = tuple(slice(o, o + e) for o, e in zip(box.offset, box.extent, strict=True))
            assert torch.equal(whole[where], tensor)
            assert bool((filled[where] == -1).all())
            filled[where] = tensor
            tensor.fill_(5)
    assert torch.equal(filled, whole)
    assert torch.equal(gathered(parameters), torch.full(tuple(shape), 5.0))
    padding = torch.cat([each.ds_tensor for each in parameters])[whole.numel() :]
    assert bool((padding == -77).all())


MODEL = {name: TensorSpec(name, dtypes.parse("fp32"), shape) for name, shape in {"a": (3, 4), "b": (2,)}.items()}


def _module(**persistent: bool) -> torch.nn.Module:
    module = torch.nn.Module()
    for spec in MODEL.values():
        parameter = torch.nn.Parameter(torch.ones(spec.shape))
        partition(parameter, 0, 2, persistent=persistent.get(spec.name, False))
        module.register_parameter(spec.name, parameter)
    return module


def test_a_module_is_read_by_its_ranges_and_filled_with_the_copies_that_it_keeps() -> None:
    module = _module(b=True)
    pushed = torch_shards(module, MODEL)
    assert [tensor.numel() for tensor in pushed.tensors] == [4, 2, 1]  # a row, half of one, half of b
    filled = torch_shards(module, MODEL, filled=True)
    assert [tensor.numel() for tensor in filled.tensors] == [4, 2, 1, 2]
    check_not_copied(module, filled.layout, filled.tensors)
    assert torch_shards(module.named_parameters(), MODEL).layout == pushed.layout
    module.register_parameter("tied", module.get_parameter("a"))
    assert torch_shards(module, MODEL).layout == pushed.layout


def test_what_has_no_numbers_to_push_is_refused_by_name() -> None:
    with pytest.raises(LayoutError, match=r"a is empty.*pass the module itself"):
        torch_shards(_module().state_dict(), MODEL)
    module = _module()
    module.a.ds_tensor.ds_quant_scale = torch.ones(1)  # type: ignore[union-attr]
    module.b.ds_tensor.status = Status.NOT_AVAILABLE  # type: ignore[union-attr]
    with pytest.raises(LayoutError) as error:
        torch_shards(module, MODEL)
    assert [detail.split(";")[0] for detail in error.value.details] == [
        "a: its partition is quantised",
        "b: its partition is not in memory",
    ]
