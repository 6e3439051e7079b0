"""Do the conversions of rules place each element where Megatron-core has it? Compared with loops over its documented
order.
"""

from __future__ import annotations

import pytest
import torch

from weighbridge_service.families.qwen3_next import DeltaNetProjections
from weighbridge_service.families.rules import WHOLE, GroupedQKV, Halves, Rearrangement, Swapped, Transposed

HIDDEN = 6


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 2), (8, 2, 3), (6, 1, 4), (1, 1, 1)])
@pytest.mark.parametrize("rest", [(HIDDEN,), ()], ids=["weight", "bias"])
def test_each_group_has_its_query_heads_then_its_key_then_its_value(
    heads: int, kv_heads: int, head_dim: int, rest: tuple[int, ...]
) -> None:
    conversion = GroupedQKV(heads, kv_heads)
    shapes = [(n * head_dim, *rest) for n in (heads, kv_heads, kv_heads)]
    whole = numbered(*conversion.megatron_shape(shapes))
    q, k, v = conversion.split(whole)
    assert [tuple(part.shape) for part in (q, k, v)] == shapes
    per_group = heads // kv_heads
    rows = iter(whole)
    for group in range(kv_heads):
        for part, first, count in ((q, group * per_group, per_group), (k, group, 1), (v, group, 1)):
            for row in part[first * head_dim : (first + count) * head_dim]:
                assert torch.equal(row, next(rows))
    assert next(rows, None) is None


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 2), (8, 2, 3), (6, 1, 4), (1, 1, 1)])
@pytest.mark.parametrize("rest", [(HIDDEN,), ()], ids=["weight", "bias"])
def test_gates_of_a_group_lie_behind_its_query_heads_and_behind_each_of_them_on_the_other_side(
    heads: int, kv_heads: int, head_dim: int, rest: tuple[int, ...]
) -> None:
    """As `SelfAttention.get_query_key_value_tensors` splits it, and transformers chunks each head."""
    conversion = GroupedQKV(heads, kv_heads, gated=True)
    shapes = [(n * head_dim, *rest) for n in (2 * heads, kv_heads, kv_heads)]
    whole = numbered(*conversion.megatron_shape(shapes))
    q, k, v = conversion.split(whole)
    assert [tuple(part.shape) for part in (q, k, v)] == shapes
    per_group = heads // kv_heads
    rows = iter(whole)
    for group in range(kv_heads):
        of_group = range(group * per_group, (group + 1) * per_group)
        places = [(q, 2 * head) for head in of_group] + [(q, 2 * head + 1) for head in of_group]
        for part, place in (*places, (k, group), (v, group)):
            for row in part[place * head_dim : (place + 1) * head_dim]:
                assert torch.equal(row, next(rows))
    assert next(rows, None) is None


def test_projections_of_a_delta_net_lie_by_key_head() -> None:
    """As transformers' `fix_query_key_value_ordering` takes them apart again, whose views are written down here as
    loops.
    """
    heads, per_head, key, value = 3, 2, 4, 5
    rows = (heads * key, heads * key, *[heads * per_head * value] * 2, *[heads * per_head] * 2)
    conversion = DeltaNetProjections(heads, rows)
    shapes = [(2 * sum(rows[1:3]), HIDDEN), (2 * heads * per_head, HIDDEN)]
    whole = numbered(*conversion.megatron_shape(shapes))
    qkvz, ba = conversion.split(whole)
    assert [tuple(part.shape) for part in (qkvz, ba)] == shapes
    query, keys, values, z, beta, alpha = whole.split(rows)
    there = iter(qkvz)
    for head in range(heads):
        for part, size in ((query, key), (keys, key), (values, per_head * value), (z, per_head * value)):
            for row in part[head * size : (head + 1) * size]:
                assert torch.equal(row, next(there))
    there = iter(ba)
    for head in range(heads):
        for part in (beta, alpha):
            for row in part[head * per_head : (head + 1) * per_head]:
                assert torch.equal(row, next(there))


@pytest.mark.parametrize("axis", [0, 1])
def test_halves_lie_above_or_beside_each_other(axis: int) -> None:
    conversion = Halves(axis)
    whole = numbered(*conversion.megatron_shape([(4, HIDDEN), (4, HIDDEN)]))
    gate, up = conversion.split(whole)
    assert gate.shape == up.shape == (4, HIDDEN)
    assert torch.equal(torch.cat([gate, up], dim=axis), whole)


@pytest.mark.parametrize("axis", [0, 1])
def test_swapped_halves_swapped_again_are_what_they_were(axis: int) -> None:
    conversion = Swapped(axis)
    whole = numbered(4, HIDDEN)
    [swapped] = conversion.split(whole)
    assert torch.equal(swapped, whole.roll(whole.shape[axis] // 2, dims=axis))
    assert torch.equal(conversion.split(swapped)[0], whole)


def test_a_transposed_matrix_has_rows_for_columns() -> None:
    whole = numbered(*Transposed().megatron_shape([(4, HIDDEN)]))
    [found] = Transposed().split(whole)
    assert all(found[row, column] == whole[column, row] for row in range(4) for column in range(HIDDEN))


@pytest.mark.parametrize(
    ("conversion", "shapes"),
    [
        (WHOLE, [(4, HIDDEN)]),
        (Halves(), [(4, HIDDEN)] * 2),
        (Swapped(), [(4, HIDDEN)]),
        (Transposed(), [(4, HIDDEN)]),
        (GroupedQKV(4, 2), [(8, HIDDEN), (4, HIDDEN), (4, HIDDEN)]),
        (GroupedQKV(4, 2, gated=True), [(16, HIDDEN), (4, HIDDEN), (4, HIDDEN)]),
        (DeltaNetProjections(2, (4, 4, 6, 6, 2, 2)), [(20, HIDDEN), (4, HIDDEN)]),
    ],
)
def test_every_element_goes_to_one_place(conversion: Rearrangement, shapes: list[tuple[int, ...]]) -> None:
    whole = numbered(*conversion.megatron_shape(shapes))
    parts = conversion.split(whole)
    assert [tuple(part.shape) for part in parts] == shapes
    assert sorted(torch.cat([part.flatten() for part in parts]).tolist()) == whole.flatten().tolist()
