"""Are fp8 checkpoints with scales recognised, and the shapes of their scales those of the blocks? Counted by numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighbridge._core.block_scales import DEFAULT_BLOCK, block_of, is_quantized, scale_shape
from weighbridge.errors import InvalidArgument

sides = st.tuples(st.integers(1, 40), st.integers(1, 40))


@given(sides, sides)
def test_there_is_one_scale_for_each_block_that_has_weights(shape: tuple[int, int], block: tuple[int, int]) -> None:
    rows, columns = np.indices(shape)
    blocks = {*zip((rows // block[0]).flat, (columns // block[1]).flat, strict=True)}
    height, width = scale_shape(shape, block)
    assert blocks == {(row, column) for row in range(height) for column in range(width)}


def test_a_weight_with_other_axes_than_its_blocks_has_no_scales() -> None:
    with pytest.raises(InvalidArgument, match=r"\[3, 4, 5\]"):
        scale_shape((3, 4, 5), DEFAULT_BLOCK)


def test_a_config_says_whether_weights_have_scales_and_for_which_blocks() -> None:
    assert not is_quantized({})
    assert not is_quantized({"quantization_config": {"quant_method": "gptq"}})
    assert is_quantized({"quantization_config": {"quant_method": "fp8"}})
    assert block_of({}) == block_of({"quantization_config": {}}) == DEFAULT_BLOCK
    assert block_of({"quantization_config": {"weight_block_size": [64, 32]}}) == (64, 32)


@pytest.mark.parametrize("size", [[64], [64, 64, 64], [0, 1], [-1, 1], [1.5, 1], [True, 1], "64", {"rows": 64}])
def test_a_size_that_no_block_has_is_refused(size: Any) -> None:
    with pytest.raises(InvalidArgument, match="weight_block_size"):
        block_of({"quantization_config": {"weight_block_size": size}})
