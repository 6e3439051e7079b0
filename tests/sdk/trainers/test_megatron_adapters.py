"""Are the shards of a Megatron-core rank's adapters those of the right rows of the right layers, where models cannot be
run on CPU?
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from torch import Tensor

from weighbridge import LayoutError
from weighbridge._core import dtypes
from weighbridge._core.boxes import Box, Link
from weighbridge._core.layouts import TensorSpec, WeightLinks
from weighbridge._trainers.megatron_adapters import MegatronAdapters, PlacedAdapters
from weighbridge._trainers.peft_adapters import LoraModule, LoraParts

F32 = dtypes.parse("fp32")
LAYERS, EXPERTS, HIDDEN, INNER, RANK = 2, 4, 6, 8, 2


class Adapter(torch.nn.Module):
    """The parameters of an adapter, and how it is scaled."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        super().__init__()
        self.linear_in, self.linear_out = (torch.nn.Linear(*each.shape[:-3:-1], bias=False) for each in (first, second))
        self.linear_in.weight.data, self.linear_out.weight.data = first, second
        self.dim, self.alpha = RANK, 5


class Stage(torch.nn.Module):
    """A part of a model whose sharded state dict is this."""

    def __init__(self, adapter: Adapter, shards: Sequence[Any]) -> None:
        super().__init__()
        self.adapter, self._shards = adapter, shards

    def sharded_state_dict(self) -> dict[str, Any]:
        return dict(enumerate(self._shards))


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def link(source: str, leading: tuple[int, ...], rows: tuple[int, int], target: str, first: int, columns: int) -> Link:
    """Rows of a weight under leading axes that are rows of another one."""
    box = Box((rows[0], 0), (rows[1], columns)).under(leading)
    own = len(leading)
    return Link(source, box, target, Box((first, 0), (rows[1], columns)), (own, own + 1))


def tensors(placed: PlacedAdapters) -> Mapping[str, list[tuple[Box, Tensor]]]:
    found: dict[str, list[tuple[Box, Tensor]]] = {}
    for placement, tensor in zip(placed.layout.placements, placed.tensors, strict=True):
        found.setdefault(placement.shard.tensor, []).append((placement.shard.box, tensor))
    return found


def _of_grouped(kind: str, name: str, weight: Tensor, layer: int) -> Any:
    """The declaration of an adapter of the second half of the experts, as releases of Megatron-Bridge make it."""
    of_layer = 0, layer, LAYERS
    if kind == "shared":
        return ShardedTensor.from_rank_offsets(name, weight, of_layer, prepend_axis_num=1, replica_id=(0, 1, 0))
    if kind == "own":
        return ShardedTensor.from_rank_offsets(name, weight, of_layer, (1, 1, 2), prepend_axis_num=1)

    def build(key: str, data: Tensor, replica_id: Any, flattened_range: Any) -> list[Any]:
        return [
            ShardedTensor.from_rank_offsets(key, data, of_layer, (1, each, EXPERTS), prepend_axis_num=2)
            for each in (2, 3)
        ]

    return ShardedTensorFactory(name, weight, build, lambda built: built[0])


@pytest.mark.parametrize("kind", ["shared", "own", "shared_and_declared_for_each"])
def test_grouped_experts_of_a_rank_have_its_one_adapter_or_one_each(kind: str) -> None:
    each_has = (2,) if kind == "own" else ()
    first, second = numbers(*each_has, RANK, INNER), numbers(*each_has, HIDDEN, RANK)
    key, adapter = "decoder.layers.mlp.experts.experts.linear_fc2", Adapter(first, second)
    layer, held = 1, (2, 3)
    shards: list[Any] = [
        ShardedTensor.from_rank_offsets(
            f"{key}.weight",
            torch.zeros(HIDDEN, INNER),
            (0, layer, LAYERS),
            (1, each, EXPERTS),
            prepend_axis_num=2,
        )
        for each in held
    ]
    for side in ("linear_in", "linear_out"):
        weight = getattr(adapter, side).weight
        shards.append(_of_grouped(kind, f"{key}.adapter.{side}.weight", weight, layer))
    at = list(itertools.product(range(LAYERS), range(EXPERTS)))
    targets = {each: f"model.layers.{each[0]}.mlp.experts.{each[1]}.down_proj" for each in at}
    placed = MegatronAdapters.of(Stage(adapter, shards)).placed(
        WeightLinks(
            {f"{key}.weight": TensorSpec(f"{key}.weight", F32, (LAYERS, EXPERTS, HIDDEN, INNER))},
            {f"{each}.weight": TensorSpec(f"{each}.weight", F32, (HIDDEN, INNER)) for each in targets.values()},
            tuple(link(f"{key}.weight", each, (0, HIDDEN), f"{targets[each]}.weight", 0, INNER) for each in at),
        )
    )
    assert set(placed.modules) == {targets[layer, each] for each in held}
    assert set(placed.modules.values()) == {LoraModule(RANK, 5)}
    found = tensors(placed)
    for index, expert in enumerate(held):
        for part, whole in (("lora_A", first), ("lora_B", second)):
            expected = whole[index] if each_has else whole
            [(box, tensor)] = found[f"base_model.model.{targets[layer, expert]}.{part}.weight"]
            assert box == Box.whole(expected.shape)
            assert torch.equal(tensor, expected)


@pytest.mark.parametrize("apart", [False, True])
def test_rows_beside_a_layer_that_is_not_fused_are_contiguous_whatever_is_declared(apart: bool) -> None:
    """One of two ranks; Megatron-Bridge declares the rows of B as if the layer consisted of gate and up."""
    key, rows = "decoder.layers.0.mlp.linear_fc1", INNER // 2
    adapter = Adapter(numbers(RANK // 2, HIDDEN), numbers(rows, RANK))
    declared = ShardedTensor.from_rank_offsets(f"{key}.adapter.linear_out.weight", adapter.linear_out.weight, (0, 1, 2))
    shards = [
        ShardedTensor.from_rank_offsets(f"{key}.weight", torch.zeros(rows, HIDDEN), (0, 1, 2)),
        ShardedTensor.from_rank_offsets(f"{key}.adapter.linear_in.weight", adapter.linear_in.weight, (0, 1, 2)),
        apply_swiglu_sharded_factory(declared, (), singleton_local_shards=apart),
    ]
    up = "model.layers.0.mlp.up_proj"
    placed = MegatronAdapters.of([Stage(adapter, shards)]).placed(
        WeightLinks(
            {f"{key}.weight": TensorSpec(f"{key}.weight", F32, (INNER, HIDDEN))},
            {f"{up}.weight": TensorSpec(f"{up}.weight", F32, (INNER, HIDDEN))},
            (link(f"{key}.weight", (), (0, INNER), f"{up}.weight", 0, HIDDEN),),
        )
    )
    found = tensors(placed)
    [(box, tensor)] = found[f"base_model.model.{up}.lora_B.weight"]
    assert box == Box((rows, 0), (rows, RANK))
    assert torch.equal(tensor, adapter.linear_out.weight)
    assert placed.layout.tensors[f"base_model.model.{up}.lora_B.weight"].shape == (INNER, RANK)
    [(box, tensor)] = found[f"base_model.model.{up}.lora_A.weight"]
    assert box == Box((1, 0), (1, HIDDEN))


def _one_layer(adapter: Adapter, other: Sequence[Any] = ()) -> Stage:
    key = "decoder.layers.0.mlp.linear_fc2"
    shards = [
        ShardedTensor.from_rank_offsets(f"{key}.weight", torch.zeros(HIDDEN, INNER)),
        ShardedTensor.from_rank_offsets(f"{key}.adapter.linear_in.weight", adapter.linear_in.weight),
        ShardedTensor.from_rank_offsets(f"{key}.adapter.linear_out.weight", adapter.linear_out.weight),
    ]
    return Stage(adapter, [*shards, *other])


def test_what_peft_has_no_adapter_of_is_refused_by_name() -> None:
    key = "decoder.layers.0.mlp.linear_fc2.weight"
    stage = _one_layer(Adapter(numbers(RANK, INNER), numbers(HIDDEN, RANK)))
    source = {key: TensorSpec(key, F32, (HIDDEN, INNER))}
    stacked = TensorSpec("model.layers.0.mlp.experts.down_proj", F32, (EXPERTS, INNER, HIDDEN))
    onto = Link(key, Box.whole((HIDDEN, INNER)), stacked.name, Box((0, 0, 0), (1, INNER, HIDDEN)), (None, 1, 0))
    found = MegatronAdapters.of(stage)
    with pytest.raises(LayoutError, match=r"experts\.down_proj .* is not the weight of a linear layer"):
        found.placed(WeightLinks(source, {stacked.name: stacked}, (onto,)))
    with pytest.raises(LayoutError, match="1 layer with adapters is not in the base") as unknown:
        found.placed(WeightLinks({}, {}, ()))
    assert list(unknown.value.details) == [key]


def test_adapters_of_another_kind_are_refused_by_name() -> None:
    magnitude = ShardedTensor.from_rank_offsets(
        "decoder.layers.0.mlp.linear_fc2.adapter.weight_magnitude", torch.zeros(HIDDEN)
    )
    stage = _one_layer(Adapter(numbers(RANK, INNER), numbers(HIDDEN, RANK)), [magnitude])
    with pytest.raises(LayoutError, match="1 tensor of adapters is not part of plain LoRA") as refused:
        MegatronAdapters.of(stage)
    assert "weight_magnitude" in refused.value.details[0]


def test_ranks_that_say_different_things_of_one_layer_are_refused() -> None:
    spec = TensorSpec("base_model.model.a.lora_A.weight", F32, (2, 3))
    one = LoraParts({spec.name: spec}, {"a": LoraModule(2, 4)})
    assert LoraParts.together([one, LoraParts.decode(one.encoded)]) == one
    other = LoraParts({spec.name: spec}, {"a": LoraModule(2, 8)})
    with pytest.raises(LayoutError, match="1 part of the adapter differs between ranks"):
        LoraParts.together([one, other])
