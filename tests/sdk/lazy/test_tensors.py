"""Lazy tensors: is what a loader copies of them what it would copy of real ones, whatever it does before?"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from weighbridge import _lazy as lazy
from weighbridge._core.dtypes import from_torch
from weighbridge._core.layouts import TensorSpec
from weighbridge._lazy.views import Strided, box_of_view, is_whole

VIEWS: dict[str, Callable[[torch.Tensor, random.Random], torch.Tensor]] = {
    "narrow": lambda t, r: t.narrow(
        d := r.randrange(t.dim()), s := r.randrange(t.shape[d]), r.randint(1, t.shape[d] - s)
    ),
    "select": lambda t, r: t.select(d := r.randrange(t.dim()), r.randrange(t.shape[d])),
    "chunk": lambda t, r: t.chunk(2, r.randrange(t.dim()))[-1],
    "split": lambda t, r: t.split(3, r.randrange(t.dim()))[0],
    "unbind": lambda t, r: t.unbind(0)[0],
    "transpose": lambda t, r: t.transpose(0, -1),
    "permute": lambda t, r: t.permute(r.sample(range(t.dim()), t.dim())),
    "view": lambda t, r: t.view(-1),
    "reshape": lambda t, r: t.reshape(-1),
    "unflatten": lambda t, r: t.unflatten(d := r.randrange(t.dim()), (t.shape[d] // 2, 2)),
    "flatten": lambda t, r: t.flatten(0, 1),
    "unsqueeze": lambda t, r: t.unsqueeze(r.randrange(t.dim() + 1)),
    "squeeze": lambda t, r: t.squeeze(),
    "every second": lambda t, r: t[..., ::2],
    "rows": lambda t, r: t[1:],
    "expand": lambda t, r: t.unsqueeze(0).expand(2, *t.shape),
    "diagonal": lambda t, r: t.diagonal(),
    "as_strided": lambda t, r: t.as_strided((1, t.shape[-1]), (1, t.stride(-1)), t.storage_offset()),
    "detach": lambda t, r: t.detach(),
    "contiguous": lambda t, r: t.contiguous(),
    "clone": lambda t, r: t.clone(),
    "half": lambda t, r: t.to(torch.float16),
    "bfloat16": lambda t, r: t.bfloat16(),
    "float": lambda t, r: t.float(),
    "same": lambda t, r: t.to("cpu"),
    "twice": lambda t, r: t * 2,
    "added": lambda t, r: t.clone().add_(1),
    "stacked": lambda t, r: torch.stack([t, t]),
    "joined": lambda t, r: torch.cat([t, t], 0),
    "indexed": lambda t, r: t[torch.tensor([0, 0])],
    "bits": lambda t, r: t.view(torch.uint8),
    "negated": lambda t, r: torch._neg_view(t),
}


class Memory:
    """Reads boxes of tensors that are there: what a lazy tensor says it needs, by plain indexing."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.copied = 0

    def filled(self, found: lazy.LazyTensor) -> torch.Tensor:
        box, _ = found.located()
        whole = self.tensors[found.spec.name]
        dense = whole[tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))]
        self.copied += dense.nbytes
        return found.filled(dense.clone(memory_format=torch.contiguous_format))

    def copy(self, target: torch.Tensor, source: lazy.LazyTensor) -> None:
        target.copy_(self.filled(source))

    def compute(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        def real(value: Any) -> Any:
            if isinstance(value, lazy.LazyTensor):
                return self.filled(value)
            return [real(each) for each in value] if isinstance(value, list) else value

        return func(*[real(each) for each in args], **{name: real(each) for name, each in kwargs.items()})


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.numel(), 1, dtype=tensor.dtype).copy_(tensor.reshape(-1, 1)).view(torch.uint8)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_done_before_copying_gives_the_same_bits_as_on_a_real_tensor(seed: int) -> None:
    chance = random.Random(seed)
    done = 0
    for _ in range(300):
        shape = [chance.choice((1, 2, 3, 4, 6)) for _ in range(chance.randint(1, 4))]
        real = torch.randn(shape, generator=torch.Generator().manual_seed(chance.randrange(1 << 30)))
        found: torch.Tensor = lazy.LazyTensor.of(
            TensorSpec("w", from_torch(real.dtype), tuple(shape)), Memory({"w": real.clone()})
        )
        for name in chance.choices(list(VIEWS), k=chance.randint(0, 6)):
            before = chance.getstate()
            try:
                real = VIEWS[name](real, chance)
            except (RuntimeError, IndexError, ValueError):
                continue
            chance.setstate(before)
            found = VIEWS[name](found, chance)
            done += 1
            assert (found.shape, found.dtype) == (real.shape, real.dtype), name
        target = torch.zeros(real.shape, dtype=real.dtype)
        target.copy_(found)
        assert bits(target).equal(bits(real))
    assert done > 500


@pytest.mark.parametrize("seed", range(4))
def test_the_box_of_a_view_holds_the_view_and_little_else(seed: int) -> None:
    chance = random.Random(seed)
    plain = [name for name in VIEWS if name in ("narrow", "select", "chunk", "transpose", "unsqueeze", "rows")]
    for _ in range(500):
        shape = [chance.choice((1, 2, 3, 4, 6, 8)) for _ in range(chance.randint(1, 4))]
        whole = torch.arange(math.prod(shape)).view(shape)
        found = whole
        for name in chance.choices(plain, k=chance.randint(0, 5)):
            try:
                found = VIEWS[name](found, chance)
            except (RuntimeError, IndexError, ValueError):
                continue
        view = Strided(tuple(found.shape), tuple(found.stride()), int(found.storage_offset()))
        box, inside = box_of_view(shape, view)
        part = whole[tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))].clone(
            memory_format=torch.contiguous_format
        )
        assert part.as_strided(*inside).equal(found)
        if is_whole(inside, box.extent):
            assert part.flatten().equal(found.flatten())
        assert box.volume == found.numel()


def test_a_column_cut_that_was_flattened_is_still_one_box() -> None:
    whole = torch.arange(4 * 6 * 8).view(4, 6, 8)
    cut = whole[:, 3:6].flatten(1)
    box, inside = box_of_view(whole.shape, Strided(tuple(cut.shape), tuple(cut.stride()), int(cut.storage_offset())))
    assert box.volume == cut.numel()
    assert whole[:, 3:6].contiguous().as_strided(*inside).equal(cut)


def test_writing_to_a_view_shows_in_the_others() -> None:
    real = torch.arange(12.0).view(3, 4)
    found = lazy.LazyTensor.of(TensorSpec("w", from_torch(real.dtype), (3, 4)), Memory({"w": real.clone()}))
    row, column, copy = found[1], found[:, 2], found.clone()
    row += 1
    copy[0] = 7
    real_column, real_copy = real[:, 2], real.clone()
    real[1] += 1
    real_copy[0] = 7
    for mine, theirs in ((row, real[1]), (column, real_column), (found, real), (copy, real_copy)):
        assert torch.empty(theirs.shape).copy_(mine).equal(theirs)


def test_what_takes_only_the_shape_reads_nothing() -> None:
    reader = Memory({"w": torch.ones(3, 4)})
    found = lazy.LazyTensor.of(TensorSpec("w", from_torch(torch.float32), (3, 4)), reader)
    assert torch.zeros_like(found).equal(torch.zeros(3, 4))
    assert found.new_ones(2, dtype=torch.float64).equal(torch.ones(2, dtype=torch.float64))
    assert torch.empty_like(found.t()).shape == (4, 3)
    assert reader.copied == 0


@pytest.mark.parametrize("way", ["data_ptr", "numpy", "tolist", "share_memory_"])
def test_what_would_look_at_memory_that_is_not_there_says_so(way: str) -> None:
    found = lazy.LazyTensor.of(TensorSpec("w", from_torch(torch.float32), (3, 4)), Memory({}))
    with pytest.raises(RuntimeError):
        getattr(found, way)()
