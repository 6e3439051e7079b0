"""Is an adapter compared with the modules of its base by their names, and its config taken as data?"""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.reference import tiny_config, tiny_model
from weighbridge._core import dtypes
from weighbridge._core.layouts import TensorSpec
from weighbridge._formats.torch_state import adapter_shards, tensor_specs
from weighbridge._trainers.peft_adapters import TrainedAdapters
from weighbridge.errors import InvalidArgument, LayoutError
from weighbridge_service.models.adapters import MAX_TEXT, check_adapter_config, check_fits

peft = pytest.importorskip("peft")


def _spec(name: str, *shape: int, dtype: str = "bf16") -> TensorSpec:
    return TensorSpec(name, dtypes.parse(dtype), shape)


def _base(*specs: TensorSpec) -> dict[str, TensorSpec]:
    return {spec.name: spec for spec in specs}


def _fits(base: dict[str, TensorSpec], *adapter: TensorSpec, **config: Any) -> None:
    check_fits(adapter, base, config, "acme/smol@1")


LAYER = "model.layers.0.self_attn.q_proj"
PLAIN = _base(_spec(f"{LAYER}.weight", 12, 8))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt2"])
@pytest.mark.parametrize("target", ["all-linear", ["c_attn", "q_proj", "embed_tokens", "wte"]])
def test_what_peft_adds_to_models_of_transformers_fits_their_own_tensors(family: str, target: Any) -> None:
    if family == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        model: Any = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=12, n_layer=2, n_head=2))
    else:
        model = tiny_model(tiny_config(family, tied=True), seed=1)
    base = {spec.name: spec for spec in tensor_specs(model)}
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=target, task_type="CAUSAL_LM"))
    found = TrainedAdapters().read(wrapped, "default", save_embedding_layers=False)
    specs = adapter_shards(found.state, found.forms, whole=True, of="a").layout.tensors.values()
    check_fits(specs, base, json.loads(found.config_json), "base")


def test_adapters_of_stacked_experts_fit_whatever_the_files_call_the_experts() -> None:
    stacked = _spec("base_model.model.model.layers.0.mlp.experts.lora_A.weight", 32, 8)
    second = _spec("base_model.model.model.layers.0.mlp.experts.base_layer.lora_B.weight", 8, 32)
    for name in (
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.block_sparse_moe.experts.0.w1.weight",
    ):
        _fits(_base(_spec(name, 4, 8, 8)), stacked, second)
    with pytest.raises(LayoutError, match="lacks 1 module"):
        _fits(_base(_spec("model.layers.1.mlp.experts.gate_up_proj", 4, 8, 8)), stacked)


def test_features_are_compared_on_both_sides() -> None:
    right = (
        _spec(f"base_model.model.{LAYER}.lora_A.weight", 4, 8),
        _spec(f"base_model.model.{LAYER}.lora_B.weight", 12, 4),
    )
    _fits(PLAIN, *right)
    for wrong in (_spec(right[0].name, 4, 12), _spec(right[1].name, 8, 4)):
        with pytest.raises(LayoutError, match=r"1 tensor of the adapter does not fit"):
            _fits(PLAIN, wrong)
    _fits(PLAIN, _spec(right[0].name, 4, 12), fan_in_fan_out=True)


def test_names_are_found_behind_what_is_around_the_layers() -> None:
    vision = _base(_spec("language_model.model.layers.0.self_attn.q_proj.weight", 12, 8))
    name = "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight"
    _fits(vision, _spec(name, 4, 8))
    with pytest.raises(LayoutError, match="does not fit"):
        _fits(vision, _spec(name, 4, 9))


@pytest.mark.parametrize(
    ("in_files", "in_memory"),
    [
        ("wte", "transformer.wte"),  # openai-community/gpt2
        ("language_model.model.embed_tokens", "model.language_model.embed_tokens"),  # files of LLaVA
        ("language_model.lm_head", "lm_head"),
    ],
)
def test_modules_outside_the_layers_are_found_by_their_last_names(in_files: str, in_memory: str) -> None:
    base = _base(_spec(f"{in_files}.weight", 40, 8), _spec(f"{LAYER}.weight", 12, 8))
    name = f"base_model.model.{in_memory}.lora_embedding_B"
    _fits(base, _spec(name, 8, 4))
    with pytest.raises(LayoutError, match="does not fit"):
        _fits(base, _spec(name, 9, 4))
    with pytest.raises(LayoutError, match="lacks 1 module"):
        _fits(PLAIN, _spec("base_model.model.model.embed_tokens.lora_embedding_B", 8, 4))


def test_packed_weights_and_other_tensors_are_not_compared() -> None:
    packed = _base(_spec(f"{LAYER}.weight", 48, 1, dtype="uint8"), _spec(f"{LAYER}.qweight", 2, 2, dtype="uint8"))
    _fits(packed, _spec(f"base_model.model.{LAYER}.lora_A.weight", 4, 8))
    _fits(PLAIN, _spec("base_model.model.score.weight", 2, 8), _spec("prompt_embeddings", 3, 8))
    _fits(PLAIN, _spec("base_model.model.lm_head.lora_A.weight", 4, 8))


def test_a_config_is_data_whose_texts_are_bounded_and_whose_numbers_are_finite() -> None:
    check_adapter_config({"peft_type": "LORA", "target_modules": "(a+)+$" * 100})
    nested: Any = {
        "peft_type": "LORA",
        "target_modules": ["q_proj"],
        "rank_pattern": {"x" * (MAX_TEXT + 1): 3},
    }
    with pytest.raises(InvalidArgument, match=r"a key in rank_pattern .* has 16385 characters"):
        check_adapter_config(nested)
    with pytest.raises(InvalidArgument, match=r"target_modules in adapter_config\.json has"):
        check_adapter_config({"peft_type": "LORA", "target_modules": "a" * (MAX_TEXT + 1)})
    for number in ("NaN", "-Infinity", "1e999"):
        for place in ('"lora_alpha": %s', '"alpha_pattern": {"q_proj": [%s]}'):
            with pytest.raises(InvalidArgument, match=r"alpha.* in adapter_config\.json is (nan|-?inf)"):
                check_adapter_config(json.loads('{"peft_type": "LORA", ' + place % number + "}"))
    for wrong in ({}, {"peft_type": 3}, {"peft_type": "x" * 99}):
        with pytest.raises(InvalidArgument, match="peft_type"):
            check_adapter_config(wrong)


def test_a_deep_config_takes_memory_by_its_size_alone() -> None:
    value: dict[str, Any] = {str(i): 0 for i in range(2_000)}
    for _ in range(900):
        value = {"k" * 80: value}
    tracemalloc.start()
    try:
        check_adapter_config({"peft_type": "LORA", "target_modules": value})
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_a_trained_adapter_is_what_peft_would_save_under_any_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = peft.get_peft_model(
        tiny_model(tiny_config("llama", tied=True), seed=1), peft.LoraConfig(r=2, target_modules=["q_proj"])
    )
    model.add_adapter("second", peft.LoraConfig(r=3, target_modules=["v_proj"], init_lora_weights=False))
    found = TrainedAdapters().read(torch.nn.parallel.DataParallel(model), "second")
    model.save_pretrained(tmp_path, selected_adapters=["second"])
    saved = load_file(tmp_path / "second" / "adapter_model.safetensors")
    assert found.state.keys() == saved.keys()
    assert all(torch.equal(found.state[name], tensor) for name, tensor in saved.items())
    assert json.loads(found.config_json) == json.loads((tmp_path / "second" / "adapter_config.json").read_text())
    assert not model.peft_config["second"].inference_mode


def test_peft_names_an_adapter_anew_only_when_the_model_is_made_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    names = peft.get_peft_model_state_dict

    def count(*arguments: Any, **options: Any) -> Any:
        asked.append(options["adapter_name"])
        return names(*arguments, **options)

    monkeypatch.setattr(peft, "get_peft_model_state_dict", count)
    model = peft.get_peft_model(
        tiny_model(tiny_config("llama", tied=False), seed=1),
        peft.LoraConfig(r=2, target_modules=["q_proj"], bias="lora_only", init_lora_weights=False),
    )
    trained = TrainedAdapters()

    def agrees(questions: int, name: str = "default", embeddings: bool | str = False) -> None:
        asked.clear()
        found = trained.read(model, name, embeddings)
        assert len(asked) == questions
        saved = names(model, adapter_name=name, save_embedding_layers=embeddings)
        assert found.state.keys() == saved.keys() == found.forms.keys()
        assert all(torch.equal(found.state[key], value) for key, value in saved.items())

    agrees(1)
    agrees(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
    agrees(0)
    agrees(1, embeddings=True)
    agrees(0)
    model.add_adapter("second", peft.LoraConfig(r=3, target_modules=["v_proj"], init_lora_weights=False))
    agrees(1)
    agrees(1, "second")
    agrees(0, "second")
    model.peft_config["second"].bias = "all"
    agrees(1, "second")
    model.get_base_model().resize_token_embeddings(50)
    agrees(1, "second", embeddings=True)
    model.to(torch.float16)
    agrees(1, "second")
    assert {spec.dtype for spec in trained.read(model, "second").forms.values()} == {dtypes.parse("f16")}


def test_the_config_of_a_trained_adapter_is_the_same_whatever_the_order_of_its_sets() -> None:
    class Backwards(set[str]):
        def __iter__(self) -> Iterator[str]:
            return iter(sorted(super().__iter__(), reverse=True))

    model = peft.get_peft_model(
        tiny_model(tiny_config("llama", tied=True), seed=1),
        peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj", "v_proj"]),
    )
    first = TrainedAdapters().read(model, "default").config_json
    model.peft_config["default"].target_modules = Backwards(["q_proj", "k_proj", "v_proj"])
    assert TrainedAdapters().read(model, "default").config_json == first
    assert json.loads(first)["target_modules"] == ["k_proj", "q_proj", "v_proj"]
