"""Do the maps say what mbridge does, in both directions, and refuse what they do not know?"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.published_families import NEMOTRON
from tests.support.raw_clients import mapped_files
from tests.support.reference import TINY_FAMILIES, make_bridge, tiny_config, tiny_model
from weighbridge._core import dtypes
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Layout, Shard, TensorSpec
from weighbridge._formats.safetensors_files import lay_out_files
from weighbridge.errors import InvalidArgument, LayoutError
from weighbridge_service.families import Rule, model_types
from weighbridge_service.families.dense import Llama
from weighbridge_service.models.bridges import Bridge, Target, bridge_for
from weighbridge_service.models.model_tensors import ModelTensors
from weighbridge_service.models.registered_model import RegisteredModel
from weighbridge_service.models.tracing import trace
from weighbridge_service.models.weight_maps import derive_weight_map, registered_specs, shifts_back
from weighbridge_service.plan.planning import make_plan
from weighbridge_service.plan.transfers import Transfer
from weighbridge_storage.documents.names import ModelName

F32 = dtypes.parse("fp32")
CASES = [(family, tied) for family in TINY_FAMILIES for tied in (True, False)]


def _bridge(config: Any) -> Any:
    return bridge_for(config.to_json_string().encode())


def _megatron_specs(bridge: Bridge, tensors: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """The model's tensors in Megatron-core's space, one for each layer and expert, without padding."""
    return {
        name: TensorSpec(name, tensors[entry.targets[0].name].dtype, entry.shape)
        for name, entry in bridge.megatron.items()
    }


@pytest.mark.parametrize(("family", "tied"), CASES)
def test_hugging_face_to_megatron_is_what_mbridge_makes_of_the_weights(family: str, tied: bool) -> None:
    config = tiny_config(family, tied=tied)
    state = tiny_model(config, seed=5).state_dict()
    bridge = _bridge(config)
    specs = _megatron_specs(bridge, ModelTensors(F32).specs(bridge))
    weight_map = derive_weight_map(bridge, ModelTensors(F32).specs(bridge), specs)
    files = lay_out_files(list(ModelTensors(F32).specs(bridge).values()))
    image = {f.name: np.zeros(f.nbytes, np.uint8) for f in files.files}
    for p in files.layout.placements:
        image[p.buffer][p.offset : p.offset + p.nbytes] = state[p.shard.tensor].reshape(-1).view(torch.uint8).numpy()
    target = Layout.stream(specs.values(), [Shard(s.name, Box.whole(s.shape)) for s in specs.values()])
    transfer = Transfer(make_plan(files.layout, target, weight_map.inverse_links), scatter=False)
    reference = make_bridge(config, torch.float32)
    for p in target.placements:
        found = torch.frombuffer(
            bytearray(transfer.gather(p.offset, p.nbytes, mapped_files(image))), dtype=torch.float32
        )
        sources = [state[target.name] for target in bridge.megatron[p.shard.tensor].targets]
        expected = reference._weight_to_mcore_format(p.shard.tensor, sources)
        assert torch.equal(found.view(expected.shape), expected), p.shard.tensor


@pytest.mark.parametrize(("family", "tied"), CASES)
def test_the_map_covers_every_tensor_that_transformers_has(family: str, tied: bool) -> None:
    config = tiny_config(family, tied=tied)
    state = tiny_model(config, seed=0).state_dict()
    if tied:
        del state["lm_head.weight"]
    bridge = _bridge(config)
    assert {name: tuple(t.shape) for name, t in state.items()} == bridge.hugging_face
    assert sorted(t.name for entry in bridge.megatron.values() for t in entry.targets) == sorted(state)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_a_tied_and_an_untied_model_of_one_family_do_not_disturb_each_other(family: str) -> None:
    untied_before = _bridge(tiny_config(family, tied=False, max_position_embeddings=64))
    tied = _bridge(tiny_config(family, tied=True, max_position_embeddings=64))
    untied_after = _bridge(tiny_config(family, tied=False, max_position_embeddings=32))
    assert untied_before.megatron["output_layer.weight"].targets == (Target("lm_head.weight"),)
    assert untied_after.megatron.keys() == untied_before.megatron.keys()
    assert "output_layer.weight" not in tied.megatron


def test_a_model_type_without_a_map_is_refused_with_the_list() -> None:
    with pytest.raises(InvalidArgument) as error:
        bridge_for(json.dumps({"model_type": "gpt2"}).encode())
    assert ", ".join(model_types()) in error.value.details[0]


def test_a_trainer_with_unknown_misshapen_or_miscast_tensors_is_told_of_each() -> None:
    bridge = _bridge(tiny_config("llama", tied=False))
    specs = dict(_megatron_specs(bridge, ModelTensors(F32).specs(bridge)))
    norm = "decoder.final_layernorm.weight"
    specs[norm] = TensorSpec(norm, dtypes.parse("bf16"), specs[norm].shape)
    fc2 = "decoder.layers.0.mlp.linear_fc2.weight"
    specs[fc2] = TensorSpec(fc2, F32, (specs[fc2].shape[0] + 1, specs[fc2].shape[1]))
    specs["optimizer.state.exp_avg.x"] = TensorSpec("optimizer.state.exp_avg.x", F32, (3,))
    with pytest.raises(LayoutError) as error:
        derive_weight_map(bridge, ModelTensors(F32).specs(bridge), specs)
    text = str(error.value)
    assert f"{norm} BF16" in text
    assert "wrong dtype" in text
    assert f"{fc2} F32" in text
    assert "wrong shape" in text
    assert "optimizer.state.exp_avg.x" in text


def test_tensors_in_all_their_forms_are_found_with_the_dtype_that_the_model_has() -> None:
    bridge = _bridge(tiny_config("llama", tied=False, num_hidden_layers=2))
    bf16 = dtypes.parse("bf16")
    tensors = dict(ModelTensors(bf16).specs(bridge))
    own = _megatron_specs(bridge, tensors)
    fc1, fc2, norm = (
        own[f"decoder.layers.0.{name}"].shape
        for name in (
            "mlp.linear_fc1.weight",
            "mlp.linear_fc2.weight",
            "self_attention.linear_qkv.layer_norm_weight",
        )
    )
    declared = {
        name: TensorSpec(name, F32, shape)
        for name, shape in {
            "decoder.layers.1.mlp.linear_fc2.weight": fc2,
            "decoder.layers.self_attention.linear_qkv.layer_norm_weight": (2, *norm),
            "decoder.layers.0.mlp.linear_fc1.weight_w": (fc1[0] // 2, fc1[1]),
            "embedding.word_embeddings.weight": (1 << 10, fc1[1]),
            "decoder.final_layernorm.weight": norm,
            "adapter.linear_in.weight": (4, 4),
        }.items()
    }
    tensors["model.norm.weight"] = replace(tensors["model.norm.weight"], dtype=F32)
    tensors["model.layers.1.mlp.down_proj.weight"] = replace(tensors["model.layers.1.mlp.down_proj.weight"], dtype=F32)
    found = {spec.name: spec for spec in registered_specs(bridge, tensors, declared.values())}
    assert {name: (spec.dtype, spec.shape) for name, spec in found.items()} == {
        "decoder.layers.1.mlp.linear_fc2.weight": (F32, fc2),
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight": (bf16, (2, *norm)),
        "decoder.layers.0.mlp.linear_fc1.weight_w": (bf16, (fc1[0] // 2, fc1[1])),
        "embedding.word_embeddings.weight": (bf16, (1 << 10, fc1[1])),
        "decoder.final_layernorm.weight": (F32, norm),
    }
    stacked = TensorSpec("decoder.layers.mlp.linear_fc2.weight", F32, (2, *fc2))
    assert list(registered_specs(bridge, tensors, [stacked])) == [], "its layers have two dtypes"


def test_what_has_sections_is_not_taken_whole() -> None:
    """A rank's part of it has the sections' parts above each other, which is no part of the whole."""
    bridge = bridge_for(json.dumps({**NEMOTRON, "model_type": "nemotron_h"}).encode())
    tensors = ModelTensors(F32).specs(bridge)
    name = "decoder.layers.0.mixer.in_proj.weight"
    whole = TensorSpec(name, F32, bridge.megatron[name].shape)
    with pytest.raises(LayoutError, match="contradicts the model") as error:
        derive_weight_map(bridge, tensors, {name: whole})
    assert "is not a tensor of this nemotron_h model" in error.value.details[0]
    section = TensorSpec(f"{name}.B", F32, (24, 64))
    (link,) = derive_weight_map(bridge, tensors, {section.name: section}).links
    assert link.target_box == Box((2 * 96, 0), (24, 64))


class ShiftedLlama(Llama):
    """A llama whose norms Megatron-core has less one half, but for that of the first layer."""

    def rules(self) -> list[Rule]:
        """Those of a llama, with the constant."""
        rules = list(super().rules())
        norm = next(rule for rule in rules if rule.megatron.endswith(".linear_qkv.layer_norm_weight"))
        first = replace(
            norm,
            megatron=norm.megatron.replace("{layer}", "0"),
            hugging_face=tuple(name.replace("{layer}", "0") for name in norm.hugging_face),
        )
        return [first, *(replace(rule, shift=0.5) if rule is norm else rule for rule in rules)]


def test_a_tensor_of_layers_with_different_constants_is_refused_and_its_layers_are_not() -> None:
    bridge = Bridge(ShiftedLlama(json.loads(tiny_config("llama", tied=False).to_json_string())))
    tensors = ModelTensors(F32).specs(bridge)
    specs = _megatron_specs(bridge, tensors)
    name = "decoder.layers.{}self_attention.linear_qkv.layer_norm_weight"
    weight_map = derive_weight_map(bridge, tensors, specs)
    assert weight_map.shifts == {name.format(f"{layer}."): 0.5 for layer in (1, 2, 3)}
    assert weight_map.inverse_shifts == shifts_back(bridge, specs)
    assert weight_map.shifts_there == {f"model.layers.{n}.input_layernorm.weight": 0.5 for n in (1, 2, 3)}
    stacked = TensorSpec(name.format(""), F32, (4, 64))
    with pytest.raises(LayoutError) as error:
        derive_weight_map(bridge, tensors, {stacked.name: stacked})
    assert "different constants" in error.value.details[0]


def test_constants_are_added_to_floating_point_numbers_only() -> None:
    bridge = Bridge(ShiftedLlama(json.loads(tiny_config("llama", tied=False).to_json_string())))
    name = "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight"
    whole_numbers = {
        key: replace(spec, dtype=dtypes.parse("i32")) for key, spec in ModelTensors(F32).specs(bridge).items()
    }
    with pytest.raises(LayoutError) as error:
        derive_weight_map(bridge, whole_numbers, {name: TensorSpec(name, dtypes.parse("i32"), (64,))})
    assert "adds 0.5 to its elements" in error.value.details[0]


@pytest.mark.parametrize("shift", [0.1, 1e39, float("inf"), float("nan")])
def test_constants_that_are_no_finite_float32_are_refused_by_name(shift: float) -> None:
    with pytest.raises(InvalidArgument, match=r"to decoder\.final_layernorm\.weight, which is not a finite float32"):
        Bridge(_llama_with(r"decoder.final_layernorm.weight", shift))


def test_a_constant_that_would_be_added_to_padding_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"to embedding\.word_embeddings\.weight, which has rows of padding"):
        Bridge(_llama_with("embedding.word_embeddings.weight", 1.0))


def _llama_with(name: str, shift: float) -> Llama:
    class Shifted(Llama):
        def rules(self) -> list[Rule]:
            rules = super().rules()
            assert any(rule.megatron == name for rule in rules)
            return [replace(rule, shift=shift) if rule.megatron == name else rule for rule in rules]

    return Shifted(json.loads(tiny_config("llama", tied=False).to_json_string()))


def test_a_constant_tells_a_model_from_the_same_without_it() -> None:
    config = tiny_config("llama", tied=False).to_json_string().encode()

    def identity(family: type[Llama]) -> str:
        model = RegisteredModel(ModelName("tests", "any"), config, ModelTensors(F32), "0" * 32, ["config.json"])
        vars(model)["bridge"] = Bridge(family(json.loads(config)))
        return model.identity

    assert identity(ShiftedLlama) != identity(Llama)


@contextmanager
def at_most(calls: int) -> Iterator[None]:
    """Fail after so many calls of functions: what has no end is not waited for."""
    left = calls

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal left
        left -= event == "call"
        if left < 0:
            sys.setprofile(None)
            raise AssertionError(f"more than {calls} calls")

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)


MANY = 1 << 34


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("decoder.layers.mlp.linear_fc2.weight", (MANY, 64, 128)),
        ("decoder.layers.self_attention.linear_proj.weight", (MANY,)),
        ("decoder.layers.input_layernorm.weight", (MANY, 0)),
        ("decoder.layers.nothing.weight", (MANY, 64, 128)),
        ("decoder.layers.mlp.experts.experts.linear_fc2.weight", (MANY, 64, 128)),
        ("decoder.layers.mlp.experts.experts.linear_fc2.weight", (4, MANY, 64, 128)),
        ("decoder.layers.mlp.experts.experts.linear_fc2.weight", (MANY, MANY, 64, 128)),
        ("decoder.layers.mlp.experts.experts.linear_fc2.weight", (MANY, 0)),
        ("decoder.layers.mlp.experts.experts.linear_fc1.weight_w", (4, MANY, 64, 128)),
        ("decoder.layers.1.mlp.experts.experts.linear_fc2.weight", (MANY, 64, 128)),
        ("decoder.layers.1.mlp.experts.experts.nothing.weight", (MANY, 64, 128)),
        ("mtp.layers.transformer_layer.mlp.experts.experts.linear_fc1.weight", (MANY, MANY, 96, 64)),
        ("decoder.layers.mlp.experts.experts.linear_fc2.weight", (MANY,)),
        ("decoder.layers.mlp.experts.experts.nothing.weight", (MANY, 0, 128)),
    ],
)
def test_layers_and_experts_beyond_count_are_refused_by_name_without_counting_them(
    name: str, shape: tuple[int, ...]
) -> None:
    bridge = _bridge(tiny_config("mixtral", tied=False))
    specs = {
        spec.name: spec
        for spec in (TensorSpec("decoder.final_layernorm.weight", F32, (64,)), TensorSpec(name, F32, shape))
    }
    tensors = ModelTensors(F32).specs(bridge)
    with at_most(20_000), pytest.raises(LayoutError) as caught:
        derive_weight_map(bridge, tensors, specs)
    assert caught.value.details == (f"{specs[name]} is not a tensor of this mixtral model",)


def test_tracing_follows_permuted_stacked_and_split_axes() -> None:
    def conversion(tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        # experts [E, h, 2f] -> for each expert gate and up [f, h]
        return [
            (f"{e}.{half}", part.t())
            for e, expert in enumerate(tensor)
            for half, part in zip(("gate", "up"), expert.chunk(2, dim=-1), strict=True)
        ]

    shape = (3, 4, 10)
    whole = torch.arange(120).view(shape)
    expected = dict(conversion(whole))
    found = {name: torch.full_like(t, -1) for name, t in expected.items()}
    for link in trace("w", shape, conversion):
        source = whole[tuple(slice(o, e) for o, e in zip(link.source_box.offset, link.source_box.end, strict=True))]
        axes = [a for a in link.axes if a is not None]
        moved = source.permute(*axes, *(a for a in range(3) if a not in axes)).reshape(link.target_box.extent)
        region = tuple(slice(o, e) for o, e in zip(link.target_box.offset, link.target_box.end, strict=True))
        found[link.target][region] = moved
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    "conversion",
    [
        pytest.param(lambda t: [("x", t + 1)], id="shift"),
        pytest.param(lambda t: [("x", t * 2)], id="scale"),
        pytest.param(lambda t: [("x", t.reshape(-1))], id="merged-axes"),
        pytest.param(lambda t: [("x", t.repeat(2, 1))], id="repeat"),
        pytest.param(lambda t: [("x", t.unsqueeze(0).expand(3, -1, -1))], id="broadcast"),
        pytest.param(lambda t: [("x", torch.zeros_like(t))], id="constant"),
    ],
)
def test_tracing_refuses_what_is_not_pure_placement(conversion: Any) -> None:
    links = None
    try:
        links = trace("w", (4, 6), conversion)
    except LayoutError:
        return
    # a repeat is placement: one source for two targets; a plan refuses it when the source must be used once
    files = lay_out_files([TensorSpec("x", F32, tuple(conversion(torch.zeros(4, 6))[0][1].shape))])
    source = Layout.stream([TensorSpec("w", F32, (4, 6))], [Shard("w", Box.whole((4, 6)))])
    with pytest.raises(LayoutError):
        make_plan(source, files.layout, links, use_all=True)
