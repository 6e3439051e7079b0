"""Is a version of another model found out, and is a model left alone by a loader that runs over stand-ins for its
parameters?
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.reference import tiny_config
from weighbridge._core.dtypes import parse
from weighbridge._core.layouts import TensorSpec
from weighbridge.errors import FailedPrecondition
from weighbridge.integrations.engine_rank.fitting import check_config, check_covered, check_tensors
from weighbridge.integrations.engine_rank.storageless import storageless

BF16, FP8 = parse("bf16"), parse("fp8_e4m3")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3"])
def test_a_model_fits_itself(family: str) -> None:
    config = tiny_config(family, tied=False)
    check_config(config, config.to_json_string().encode(), "v")


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        ("llama", {"vocab_size": 256}, "vocab_size is 256, and 128 in the engine"),
        ("llama", {"num_hidden_layers": 6}, "num_hidden_layers is 6, and 4"),
        ("llama", {"tie_word_embeddings": True}, "tie_word_embeddings is True, and False"),
        ("qwen3_moe", {"num_experts": 16}, "num_experts is 16, and 8"),
        ("mixtral", {"num_local_experts": 2}, "num_local_experts is 2, and 4"),
        ("deepseek_v3", {"kv_lora_rank": 16}, "kv_lora_rank is 16, and 32"),
    ],
)
def test_another_configuration_is_refused_by_name(family: str, change: dict[str, Any], said: str) -> None:
    config = tiny_config(family, tied=False)
    other = {**json.loads(config.to_json_string(use_diff=False)), **change}
    with pytest.raises(FailedPrecondition, match=said):
        check_config(config, json.dumps(other).encode(), "v")


def test_heads_that_the_engine_has_padded_are_compared_as_they_were() -> None:
    engine = SimpleNamespace(num_attention_heads=12, original_num_attention_heads=9)
    check_config(engine, b'{"num_attention_heads": 9}', "v")
    with pytest.raises(FailedPrecondition):
        check_config(engine, b'{"num_attention_heads": 12}', "v")


def test_missing_new_and_reshaped_tensors_are_refused_by_name_and_other_dtypes_are_not() -> None:
    known = [TensorSpec("a", BF16, (4, 2)), TensorSpec("b", BF16, (4,))]
    check_tensors(known, [TensorSpec("b", BF16, (4,)), TensorSpec("a", FP8, (4, 2))], "v")
    with pytest.raises(FailedPrecondition, match="b is missing"):
        check_tensors(known, known[:1], "v")
    with pytest.raises(FailedPrecondition, match="c is not known"):
        check_tensors(known, [*known, TensorSpec("c", BF16, (1,))], "v")
    with pytest.raises(FailedPrecondition, match=r"a is \[8, 2\] and was \[4, 2\]"):
        check_tensors(known, [TensorSpec("a", BF16, (8, 2)), known[1]], "v")


def test_a_parameter_that_nothing_goes_to_is_refused_by_name() -> None:
    parameters = {"whole": torch.zeros(4), "half": torch.zeros(4), "none": torch.zeros(4)}
    check_covered({}, parameters, "v")
    with pytest.raises(FailedPrecondition, match="nothing for half: 2 of 4 elements, none: 4 of 4 elements"):
        check_covered({"half": 2, "none": 4}, parameters, "v")


def test_elements_that_may_be_left_alone_are() -> None:
    parameters = {"half": torch.zeros(4), "none": torch.zeros(4), "empty": torch.zeros(0)}
    check_covered({"half": 2}, parameters, "v", lambda parameter: parameter.numel() - 1)
    with pytest.raises(FailedPrecondition, match="nothing for none: 4 of 4 elements"):
        check_covered({"half": 2, "none": 4}, parameters, "v", lambda parameter: parameter.numel() - 1)


class Odd(torch.nn.Parameter):
    """A parameter of a class of its own, as quantised layers have."""


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Linear(3, 4, bias=False)
        self.head = torch.nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.odd = Odd(torch.arange(6.0).reshape(2, 3).t(), requires_grad=False)
        self.odd.loader = self.load_odd  # type: ignore[attr-defined]
        self.register_buffer("scale", torch.ones(2))
        self.derived = torch.ones(3)

    def load_odd(self, parameter: torch.Tensor, loaded: torch.Tensor) -> None:
        parameter.data.copy_(loaded)

    def load_weights(self, loaded: torch.Tensor) -> None:
        found = dict(self.named_parameters())
        found["odd"].loader(found["odd"], loaded)  # type: ignore[attr-defined]
        found["embedding.weight"].data.fill_(7)
        self.scale = torch.zeros(2, device="meta")
        self.derived = found["odd"] * 2
        self.extra = torch.nn.Parameter(torch.zeros(1))


def test_a_loader_that_runs_over_stand_ins_changes_nothing_of_a_model() -> None:
    model = Model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    odd, derived = model.odd, model.derived
    with storageless(model) as targets:
        assert sorted(targets) == ["embedding.weight", "odd", "scale"]
        assert type(targets["odd"]) is Odd
        assert targets["odd"].is_meta
        assert targets["odd"].stride() == odd.stride()
        assert model.head.weight is model.embedding.weight
        model.load_weights(torch.ones(3, 2, device="meta"))
    assert model.odd is odd
    assert model.derived is derived
    assert "extra" not in model._parameters
    assert model.head.weight is model.embedding.weight
    after = model.state_dict()
    assert list(after) == list(before)
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor)


def test_a_model_is_itself_again_after_a_loader_that_fails() -> None:
    model = Model()
    odd = model.odd
    with pytest.raises(RuntimeError), storageless(model):
        model.load_weights(torch.ones(5, 5))
    assert model.odd is odd
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_parameters_that_share_memory_have_stand_ins_that_do() -> None:
    model = torch.nn.Module()
    memory = torch.zeros(8)
    model.first = torch.nn.Parameter(memory[:4], requires_grad=False)
    model.second = torch.nn.Parameter(memory[4:], requires_grad=False)
    with storageless(model) as targets:
        storages = {tensor.untyped_storage()._cdata for tensor in targets.values()}
        assert len(storages) == 1
        assert targets["second"].storage_offset() == 4
