"""Are the weights of a model with merged adapters those that peft computes, and are models with other adapters
refused?
"""

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
from weighbridge._formats.peft_models import merged_layers
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
    """The state dict that peft makes by merging a copy of the model."""
    state: dict[str, Tensor] = copy.deepcopy(model).merge_and_unload().state_dict()
    return state


def specs(state: dict[str, Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(name, dtypes.parse("fp32"), tuple(tensor.shape)) for name, tensor in state.items()}


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(tensor, expected[name]) for name, tensor in found.items()
    )


def pushed(model: Any, expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that a push of the model takes, where the registered model has these."""
    shards = torch_shards(model, specs(expected), whole=True)
    each = zip(shards.layout.placements, shards.tensors, strict=True)
    return {placement.shard.tensor: tensor for placement, tensor in each}


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}])
def test_merged_weights_are_those_that_peft_unloads(options: dict[str, Any], in_place: bool) -> None:
    model = adapted(**options)
    if options.get("modules_to_save"):
        head = model.base_model.model.lm_head.modules_to_save["default"]
        torch.nn.init.normal_(head.weight)
    expected = merged_by_peft(model)
    base = tiny_model(CONFIG, seed=1).state_dict()
    assert not equal(expected, base)
    if in_place:
        model.merge_adapter()
    assert equal(dict(merged_weights(model)), expected)
    assert equal(pushed(model, base), expected)


def test_a_tied_head_that_peft_trains_apart_is_refused_with_what_ties_it_again() -> None:
    tied = tiny_config("llama", tied=True)
    names = dict(tiny_model(tied, seed=1).named_parameters())
    assert "lm_head.weight" not in names  # transformers writes one tensor for both
    modules = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}
    with pytest.warns(UserWarning, match="ensure_weight_tying"):
        apart = peft.get_peft_model(tiny_model(tied, seed=1), peft.LoraConfig(**modules))
    with pytest.raises(LayoutError) as refused:
        pushed(apart, names)
    assert "its head, if it has one, is model.embed_tokens.weight" in refused.value.details[0]
    assert "ensure_weight_tying=True" in refused.value.details[0]
    config = peft.LoraConfig(**modules, ensure_weight_tying=True)
    together = peft.get_peft_model(tiny_model(tied, seed=1), config)
    torch.nn.init.normal_(together.base_model.model.lm_head.modules_to_save["default"].weight)
    found = pushed(together, names)
    assert torch.equal(found["model.embed_tokens.weight"], merged_by_peft(together)["lm_head.weight"])


T = ["q_proj", "up_proj"]
OTHERS = {
    "rslora": lambda: peft.LoraConfig(r=4, target_modules=T, use_rslora=True),
    "loha": lambda: peft.LoHaConfig(r=4, target_modules=T),
    "lokr": lambda: peft.LoKrConfig(r=4, target_modules=T),
    "ia3": lambda: peft.IA3Config(target_modules=T, feedforward_modules=["up_proj"]),
    "oft": lambda: peft.OFTConfig(r=0, oft_block_size=4, target_modules=T),
    "vera": lambda: peft.VeraConfig(r=4, target_modules=["q_proj"]),
    "hra": lambda: peft.HRAConfig(r=4, target_modules=T),
    "layer norms": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "embeddings": lambda: peft.LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"]),
    "tokens": lambda: peft.LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[1, 2]),
}


@pytest.mark.parametrize("method", OTHERS)
def test_every_method_that_peft_merges_is_merged_into_copies_alone(method: str) -> None:
    torch.manual_seed(3)
    model = peft.get_peft_model(tiny_model(CONFIG, seed=1), OTHERS[method]())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = merged_by_peft(model)
    base = tiny_model(CONFIG, seed=1).state_dict()
    assert not equal(expected, base)
    assert equal(pushed(model, base), expected)
    assert equal(dict(model.state_dict()), before)
    assert not merged_layers(model)


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


def test_adapters_that_cannot_be_merged_are_refused_by_peft_s_own_reason() -> None:
    model = adapted(task_type="CAUSAL_LM", alora_invocation_tokens=[1, 2])
    with pytest.raises(LayoutError, match="q_proj: aLoRA does not support merging"):
        list(merged_weights(model))


def test_an_adapter_of_a_tied_weight_is_refused_for_merged_it_would_be_two_weights() -> None:
    tied = tiny_model(tiny_config("llama", tied=True, num_hidden_layers=2, vocab_size=64), seed=1)
    model = peft.get_peft_model(tied, peft.LoraConfig(r=4, target_modules=["embed_tokens"]))
    with pytest.raises(LayoutError, match="1 layer has adapters and a weight that another layer shares") as refused:
        list(merged_weights(model))
    assert refused.value.details == ("base_model.model.model.embed_tokens",)


def test_a_check_of_names_and_shapes_merges_nothing() -> None:
    model = adapted()
    base = tiny_model(CONFIG, seed=1).state_dict()
    shards = torch_shards(model, specs(base), whole=True, merge=False)
    assert sorted(shards.layout.tensors) == sorted(base)
    own = {each.data_ptr() for each in model.state_dict().values()}
    assert all(tensor.data_ptr() in own for tensor in shards.tensors)


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
