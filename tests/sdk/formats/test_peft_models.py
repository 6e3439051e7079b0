"""Are the weights of a model with merged adapters those that peft itself makes of it, and those with others refused?"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.reference import tiny_config, tiny_model
from weighbridge import LayoutError, TensorSpec
from weighbridge._core import dtypes
from weighbridge._formats.gathered_shards import GatheredShards, share_layout
from weighbridge._formats.memory_forms import TensorForms
from weighbridge._formats.torch_state import torch_shards
from weighbridge.integrations.peft import merged_weights

peft = pytest.importorskip("peft")
CONFIG = tiny_config("llama", tied=False, num_hidden_layers=2, vocab_size=64)


def adapted(**options: Any) -> Any:
    """A model with adapters that change what it computes."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False, **options)
    torch.manual_seed(3)
    return peft.get_peft_model(tiny_model(CONFIG, seed=1), config)


def merged_by_peft(model: Any) -> dict[str, Tensor]:
    """What peft makes of a model with adapters, without touching it."""
    state: dict[str, Tensor] = copy.deepcopy(model).merge_and_unload().state_dict()
    return state


def specs(state: dict[str, Tensor]) -> dict[str, TensorSpec]:
    return {
        name: TensorSpec(name, dtypes.parse("fp32"), tuple(tensor.shape)) for name, tensor in state.items()
    }


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(tensor, expected[name]) for name, tensor in found.items()
    )


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}])
def test_merged_weights_are_those_that_peft_unloads(options: dict[str, Any]) -> None:
    model = adapted(**options)
    if options.get("modules_to_save"):
        head = model.base_model.model.lm_head.modules_to_save["default"]
        torch.nn.init.normal_(head.weight)
    expected = merged_by_peft(model)
    base = tiny_model(CONFIG, seed=1).state_dict()
    assert not equal(expected, base)
    model.merge_adapter()
    assert equal(dict(merged_weights(model)), expected)

    shards = torch_shards(model, specs(base), whole=True)
    pushed = {
        each.shard.tensor: tensor
        for each, tensor in zip(shards.layout.placements, shards.tensors, strict=True)
    }
    assert equal(pushed, expected)


def test_wrappers_around_the_model_and_its_layers_change_nothing() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = adapted()
    expected = merged_by_peft(model)
    model.merge_adapter()
    layers = model.base_model.model.model.layers
    layers[0] = checkpoint_wrapper(layers[0])
    shards = torch_shards(torch.compile(model), specs(expected), whole=True)
    assert sorted(placement.shard.tensor for placement in shards.layout.placements) == sorted(expected)


def test_weights_without_adapters_that_count_are_the_model_s() -> None:
    model = adapted()
    base = tiny_model(CONFIG, seed=1).state_dict()
    with model.disable_adapter():
        assert equal(dict(merged_weights(model)), base)


def test_adapters_that_are_not_merged_are_refused_and_told_where_they_are() -> None:
    model = adapted()
    state = specs(tiny_model(CONFIG, seed=1).state_dict())
    with pytest.raises(LayoutError, match="4 layers have adapters that are not merged") as refused:
        torch_shards(model, state)
    assert "q_proj" in str(refused.value)
    assert "merge_adapter" in refused.value.fix
    model.merge_adapter()
    model.unmerge_adapter()
    with pytest.raises(LayoutError, match="not merged"):
        list(merged_weights(model))


def test_a_second_adapter_counts_only_if_it_is_merged_as_well() -> None:
    model = adapted()
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.merge_adapter(["default"])
    assert dict(merged_weights(model)), "the other one is not active"
    model.unmerge_adapter()
    model.base_model.set_adapter(["default", "other"])
    model.merge_adapter(["default"])
    with pytest.raises(LayoutError, match="2 layers"):
        list(merged_weights(model))


def test_a_state_dict_does_not_say_whether_it_is_merged_and_is_refused() -> None:
    model = adapted()
    model.merge_adapter()
    state = specs(tiny_model(CONFIG, seed=1).state_dict())
    with pytest.raises(LayoutError, match="push the model itself"):
        torch_shards(model.state_dict(), state)


def test_a_model_with_adapters_is_not_filled() -> None:
    model = adapted()
    model.merge_adapter()
    with pytest.raises(LayoutError, match="before peft adds them"):
        torch_shards(model, specs(tiny_model(CONFIG, seed=1).state_dict()), filled=True)


def test_ranks_take_their_shares_of_merged_weights_as_they_pass_by() -> None:
    model = adapted()
    expected = merged_by_peft(model)
    model.merge_adapter()
    forms = TensorForms.of(specs(expected))
    found: dict[str, list[Tensor]] = {}
    for rank in range(2):
        stream = share_layout(specs(expected), rank, 2)
        passing = GatheredShards(merged_weights(model), forms, stream, rank=rank, ranks=2, cast="never")
        for part in passing.parts():
            for index, tensor in zip(part.indexes, part.tensors, strict=True):
                found.setdefault(stream.placements[index].shard.tensor, []).append(tensor.clone())
    assert equal({name: torch.cat(tensors) for name, tensors in found.items()}, expected)
