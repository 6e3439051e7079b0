"""Are the changed elements of two tensors found, with the size of each change? Compared with torch and Python's
integers.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weighbridge._comparing.differences import Difference
from weighbridge._comparing.elements import difference
from weighbridge._core.dtypes import DTYPES, DType, parse

FLOATS = [dtype for dtype in DTYPES if dtype.torch.is_floating_point]
INTEGERS = [dtype for dtype in DTYPES if not dtype.torch.is_floating_point and dtype.name != "C64"]
NAMED = {"ids": str}


def tensor(data: bytes, dtype: DType) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype.torch)


def of_bytes(dtype: DType, before: bytes, after: bytes) -> Difference:
    return difference(dtype, *(np.frombuffer(each, np.uint8) for each in (before, after)))


def of_values(dtype: DType, before: list[float], after: list[float]) -> Difference:
    made = (torch.tensor(each, dtype=torch.float64).to(dtype.torch) for each in (before, after))
    return of_bytes(dtype, *(each.view(torch.uint8).numpy().tobytes() for each in made))


@pytest.mark.parametrize("dtype", FLOATS, **NAMED)
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_floats_of_any_bits_differ_as_torch_says(dtype: DType, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 40))
    size = dtype.itemsize
    before, other = (data.draw(st.binary(min_size=count * size, max_size=count * size)) for _ in range(2))
    mask = data.draw(st.integers(0, (1 << count) - 1))
    after = b"".join((other if mask >> i & 1 else before)[i * size : (i + 1) * size] for i in range(count))
    found = of_bytes(dtype, before, after)
    old, new = (tensor(each, dtype).to(torch.float64).tolist() for each in (before, after))
    changed = [
        (a, b)
        for i, (a, b) in enumerate(zip(old, new, strict=True))
        if before[i * size : (i + 1) * size] != after[i * size : (i + 1) * size]
    ]
    finite = [(a, b) for a, b in changed if math.isfinite(a) and math.isfinite(b)]
    steps = [abs(Fraction(a) - Fraction(b)) for a, b in finite]
    most = Fraction(np.finfo(np.float64).max)
    assert found.elements == count
    assert found.changed == len(changed)
    assert found.nonfinite == len(changed) - len(finite)
    assert found.step == float(min(max(steps, default=Fraction(0)), most))


@pytest.mark.parametrize("dtype", INTEGERS, **NAMED)
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_integers_differ_by_integers(dtype: DType, data: st.DataObject) -> None:
    signed, bits = dtype.name.startswith("I"), 8 * dtype.itemsize
    number = st.integers(-(1 << bits - 1), (1 << bits - 1) - 1) if signed else st.integers(0, (1 << bits) - 1)
    pairs = data.draw(st.lists(st.tuples(number, number) | number.map(lambda each: (each, each)), min_size=1))
    before, after = (
        b"".join(pair[side].to_bytes(dtype.itemsize, "little", signed=signed) for pair in pairs) for side in (0, 1)
    )
    found = of_bytes(dtype, before, after)
    assert found.changed == sum(a != b for a, b in pairs)
    assert found.step == max(abs(a - b) for a, b in pairs)
    assert isinstance(found.step, int) or not found.changed
    assert found.nonfinite == 0


def test_complex_numbers_differ_by_the_length_of_their_difference() -> None:
    before = torch.tensor([1 + 1j, 2, complex(math.nan, 0)], dtype=torch.complex64)
    after = torch.tensor([4 + 5j, 2, complex(0, 0)], dtype=torch.complex64)
    found = of_bytes(parse("c64"), *(torch.view_as_real(each).numpy().tobytes() for each in (before, after)))
    assert found == Difference(3, 2, nonfinite=1, step=5.0)


@pytest.mark.parametrize("dtype", [parse(each) for each in ("bf16", "fp16", "fp32", "fp64", "fp8_e5m2")], **NAMED)
def test_a_nan_that_stays_has_not_changed_and_one_that_comes_or_goes_has_no_step(dtype: DType) -> None:
    nan, inf = math.nan, math.inf
    assert of_values(dtype, [nan, inf, 1], [nan, inf, 1]) == Difference(3)
    assert of_values(dtype, [nan, 1, inf, inf, 1], [1, nan, -inf, 2, 1.5]) == Difference(5, 5, 4, 0.5)


def test_zero_and_minus_zero_differ_in_their_bits_by_no_step() -> None:
    assert of_values(parse("bf16"), [0.0, 1.0], [-0.0, 1.0]) == Difference(2, 1, 0, 0.0)


def test_a_step_beyond_float64_is_its_largest_number() -> None:
    most = float(np.finfo(np.float64).max)
    assert of_values(parse("fp64"), [most], [-most]).step == most


def test_tensors_of_many_windows_are_counted_whole() -> None:
    before = torch.zeros((3 << 20) + 5, dtype=torch.bfloat16)
    after = before.clone()
    after[:: 1 << 18] = 0.5
    after[-1] = -2
    found = of_bytes(parse("bf16"), *(each.view(torch.uint8).numpy().tobytes() for each in (before, after)))
    assert found == Difference(len(before), int((before != after).sum()), 0, 2.0)
