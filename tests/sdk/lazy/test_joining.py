"""Lazy tensors that a loader stacks and concatenates: are they still known part by part, whatever is done with them?"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from tests.sdk.lazy.test_tensors import VIEWS, Memory
from weighbridge import _lazy as lazy
from weighbridge._core.dtypes import from_torch, parse
from weighbridge._core.layouts import TensorSpec
from weighbridge.errors import LayoutError

EXPERTS = [TensorSpec(f"experts.{e}.{p}", parse("bf16"), (6, 4)) for e in range(3) for p in ("gate", "up")]
JOINS = ("stacked", "joined")
AFTER = (
    "transpose",
    "permute",
    "detach",
    "contiguous",
    "clone",
    "half",
    "same",
    "added",
    "narrow",
    "view",
    "stacked",
    "joined",
)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_joined_tensors_have_the_same_bits_as_real_ones(seed: int, inference: bool) -> None:
    chance = random.Random(seed)
    with torch.inference_mode(inference):
        for _ in range(150):
            shape = [chance.choice((1, 2, 3, 4)) for _ in range(chance.randint(1, 3))]
            real = torch.randn(shape)
            spec = TensorSpec("w", from_torch(real.dtype), tuple(shape))
            found: torch.Tensor = lazy.LazyTensor.of(spec, Memory({"w": real.clone()}))
            for name in (
                *chance.choices(list(VIEWS), k=2),
                chance.choice(JOINS),
                *chance.choices(AFTER, k=3),
            ):
                before = chance.getstate()
                try:
                    real = VIEWS[name](real, chance)
                except (RuntimeError, IndexError, ValueError):
                    continue
                chance.setstate(before)
                found = VIEWS[name](found, chance)
                assert (found.shape, found.dtype) == (real.shape, real.dtype), name
            target = torch.zeros(real.shape, dtype=real.dtype)
            target.copy_(found)
            assert target.equal(real)


def _experts(tensors: Iterator[tuple[str, torch.Tensor]]) -> torch.Tensor:
    """Gate and up of all experts in one tensor ``[E, 12, 4]``, as transformers makes it."""
    found = dict(tensors)
    halves = [torch.stack([found[f"experts.{e}.{half}"] for e in range(3)]) for half in ("gate", "up")]
    return torch.cat(halves, dim=1)


@pytest.mark.parametrize("turned", [False, True])
def test_a_loader_that_joins_tensors_is_recorded_with_each_ones_own_box(turned: bool) -> None:
    target = torch.empty((3, 4, 12) if turned else (3, 12, 4), dtype=torch.bfloat16, device="meta")

    def load(tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        experts = torch.nn.Parameter(_experts(tensors))
        target.copy_(experts.transpose(1, 2).contiguous() if turned else experts)

    recording = lazy.record(EXPERTS, load, {"experts": target})
    assert not recording.unrecorded
    assert not recording.unwritten
    assert recording.nbytes == target.numel() * 2
    assert sorted(name for name, _ in recording.boxes) == sorted(spec.name for spec in EXPERTS)


def test_a_loader_that_joins_them_with_tensors_of_its_own_is_not_recorded() -> None:
    target = torch.empty((8, 4), dtype=torch.bfloat16, device="meta")

    def load(tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        gate = dict(tensors)["experts.0.gate"]
        target.copy_(torch.cat([gate, torch.ones(2, 4, dtype=torch.bfloat16)]))

    recording = lazy.record(EXPERTS, load, {"padded": target})
    assert list(recording.unrecorded) == ["experts.0.gate"]


def test_writing_to_what_was_joined_shows_in_its_views_and_nowhere_else() -> None:
    one = torch.arange(6.0).view(2, 3)
    memory = Memory({"w": one.clone()})
    lazies = [lazy.LazyTensor.of(TensorSpec("w", from_torch(one.dtype), (2, 3)), memory) for _ in range(2)]
    both = torch.cat(lazies)
    turned, copy = both.t(), both.clone()
    lazies[0].add_(100)
    both.mul_(2)
    expected = torch.cat([one, one])
    for mine, theirs in ((both, 2 * expected), (turned, 2 * expected.t()), (copy, expected)):
        assert torch.empty(theirs.shape).copy_(mine).equal(theirs)


def test_what_was_joined_does_not_fit_into_another_shape() -> None:
    whole = torch.zeros(2, 3)
    some = lazy.LazyTensor.of(TensorSpec("w", from_torch(whole.dtype), (2, 3)), Memory({"w": whole}))
    with pytest.raises(LayoutError, match=r"joined to shape \[2, 2, 3\] were copied to one of \[3, 2, 3\].*w"):
        torch.empty(3, 2, 3).copy_(torch.stack([some, some]))
