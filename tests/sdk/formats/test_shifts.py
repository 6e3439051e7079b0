"""Are shifted elements what exact arithmetic rounds to, and what torch computes, in every dtype?"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from weighbridge._core.dtypes import parse
from weighbridge._formats.shifts import shifted

ALL_16_BITS = np.arange(1 << 16, dtype=np.uint16)
TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


def values(raw: np.ndarray, dtype: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(raw.tobytes(), np.uint8).copy()).view(TORCH[dtype])


def samples(dtype: str) -> np.ndarray:
    """Bit patterns: all of 16 bits, and of wider dtypes random ones of all sizes, with those at the edges."""
    if dtype in ("bf16", "fp16"):
        return ALL_16_BITS
    integers = {"fp32": np.uint32, "fp64": np.uint64}[dtype]
    random = np.random.default_rng(3)
    bits = random.integers(0, np.iinfo(integers).max, 100_000, integers, endpoint=True)
    edges = torch.tensor([0.0, -0.0, -1.0, torch.inf, -torch.inf, torch.nan, 0.5, 2.0], dtype=TORCH[dtype])
    around = (1 + torch.randn(100_000, generator=torch.Generator().manual_seed(1)) / 4).to(TORCH[dtype])
    return np.concatenate([bits, *(each.view(torch.uint8).numpy().view(integers) for each in (edges, around))])


@pytest.mark.parametrize("shift", [1.0, -1.0])
@pytest.mark.parametrize("dtype", TORCH)
def test_the_sum_is_what_torch_makes_of_it(dtype: str, shift: float) -> None:
    raw = samples(dtype)
    found = values(shifted(raw.view(np.uint8), parse(dtype), shift), dtype)
    expected = values(raw, dtype) + shift
    numbers = ~expected.isnan()
    assert torch.equal(found[numbers], expected[numbers])
    assert torch.equal(found[numbers].signbit(), expected[numbers].signbit())
    assert torch.equal(found.isnan(), expected.isnan())


@pytest.mark.parametrize("shift", [1.0, -1.0])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_of_16_bits_it_is_the_exact_sum_rounded_once(dtype: str, shift: float) -> None:
    """The nearest of all numbers of the dtype, and of two as near the one whose last bit is zero."""
    numbers = values(ALL_16_BITS, dtype).double().numpy()
    finite = np.isfinite(numbers)
    table, bits = np.unique(numbers[finite & ~np.signbit(numbers)], return_index=True)
    exact = numbers[finite] + shift
    magnitude = np.abs(exact)
    above = np.clip(np.searchsorted(table, magnitude), 1, len(table) - 1)
    low, high = table[above - 1], table[above]
    nearer_high = (high - magnitude < magnitude - low) | (
        (high - magnitude == magnitude - low) & (bits[above] % 2 == 0)
    )
    expected = np.copysign(np.where(nearer_high, high, low), exact)
    found = values(shifted(ALL_16_BITS.view(np.uint8), parse(dtype), shift), dtype).double().numpy()[finite]
    inside = magnitude <= table[-1]
    assert inside.sum() >= finite.sum() - 2
    assert np.array_equal(found[inside], expected[inside])


def test_a_bfloat16_comes_back_from_less_one_if_it_is_from_one_half_to_256() -> None:
    """Below, within half of the distance of two neighbours of what is less one."""
    numbers = values(ALL_16_BITS, "bf16")
    less = shifted(ALL_16_BITS.view(np.uint8), parse("bf16"), -1.0)
    back = values(shifted(less, parse("bf16"), 1.0), "bf16").double()
    exact = numbers.double()
    assert torch.equal(back[(exact >= 0.5) & (exact <= 256)], exact[(exact >= 0.5) & (exact <= 256)])
    below = (exact > 0) & (exact < 0.5)
    assert float((back - exact)[below].abs().max()) == 2**-9


def test_what_megatron_has_near_zero_is_rounded_to_the_bfloat16_that_is_near_one() -> None:
    numbers = values(ALL_16_BITS, "bf16").double()
    found = values(shifted(ALL_16_BITS.view(np.uint8), parse("bf16"), 1.0), "bf16").double()
    for low, high, off in ((-1, -0.5, 0), (-0.5, 0, 2**-9), (0, 1, 2**-8)):
        between = (numbers >= low) & (numbers < high)
        assert float((found - 1 - numbers)[between].abs().max()) == off


@pytest.mark.parametrize("dtype", TORCH)
def test_every_nan_becomes_the_quiet_one_without_a_payload(dtype: str) -> None:
    raw = samples(dtype)
    nan = values(raw, dtype).isnan()
    found = shifted(raw.view(np.uint8), parse(dtype), 1.0).view(raw.dtype)[nan.numpy()]
    quiet = torch.tensor(torch.nan, dtype=TORCH[dtype]).reshape(1).view(torch.uint8).numpy().view(raw.dtype)
    assert len(found) > 0
    assert (found == quiet).all()


@pytest.mark.parametrize("dtype", TORCH)
def test_elements_may_lie_at_any_address_and_are_left_as_they_are(dtype: str) -> None:
    raw = samples(dtype)[:1000].view(np.uint8)
    apart = np.zeros(len(raw) + 1, np.uint8)
    apart[1:] = raw
    assert bytes(shifted(apart[1:], parse(dtype), 1.0)) == bytes(shifted(raw, parse(dtype), 1.0))
    assert bytes(shifted(raw.tobytes(), parse(dtype), 1.0)) == bytes(shifted(raw, parse(dtype), 1.0))
    assert bytes(apart[1:]) == bytes(raw)
    assert len(shifted(b"", parse(dtype), 1.0)) == 0


def test_what_a_bf16_trainer_holds_comes_back_as_near_as_the_document_says() -> None:
    """docs/families.md, of qwen3_next: less one on the way to the trainer, plus one on the way back."""
    held = shifted(ALL_16_BITS.view(np.uint8), parse("bf16"), -1.0)
    weights, back = (
        values(np.asarray(raw), "bf16").double() for raw in (ALL_16_BITS, shifted(held, parse("bf16"), 1.0))
    )
    error, from_one = (back - weights).abs(), (weights - 1).abs()
    for low, high, most in ((0.5, 256.0, 0.0), (0.0, 0.5, 2**-9), (-1.0, 0.0, 2**-8)):
        inside = (low <= weights) & (weights <= high)
        assert error[inside].max() == most
    rest = weights.isfinite() & back.isfinite() & ((weights < -1) | (weights > 256))
    assert (error[rest] <= from_one[rest] * 2**-7).all()
