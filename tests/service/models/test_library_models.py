"""Does the comparison with transformers' own model say what transformers' loader says: what is missing, and what it
would not take?
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support.unmapped_models import auto_class, unmapped_model
from weighbridge._core import dtypes
from weighbridge._core.layouts import TensorSpec
from weighbridge.errors import InvalidArgument
from weighbridge_service.catalog.catalog import Catalog
from weighbridge_service.families.rules import Shape
from weighbridge_service.models import library_models
from weighbridge_service.models.library_models import compare_with_library, compared_by
from weighbridge_storage.stores.local import LocalStore

MISTRAL: dict[str, Any] = {
    "model_type": "mistral", "architectures": ["MistralForCausalLM"], "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
}  # fmt: skip


def compared(folder: Path) -> tuple[set[str], set[str]]:
    tensors = load_file(folder / "model.safetensors")
    found = compare_with_library(
        (folder / "config.json").read_bytes(), {name: tuple(t.shape) for name, t in tensors.items()}
    )
    assert found is not None
    assert found.misshapen == ()
    return set(found.missing), set(found.unknown)


def by_transformers(model_type: str, folder: Path) -> tuple[set[str], set[str]]:
    _, told = auto_class(model_type).from_pretrained(folder, output_loading_info=True)
    return set(told["missing_keys"]), set(told["unexpected_keys"])


@pytest.mark.parametrize(
    ("model_type", "lost"),
    [
        ("phi3", "model.layers.1.mlp.down_proj.weight"),
        ("gpt2", "transformer.h.0.attn.c_attn.bias"),
        ("olmoe", "model.layers.1.mlp.experts.3.up_proj.weight"),
        ("t5", "decoder.block.1.layer.2.DenseReluDense.wo.weight"),
        ("clip", "logit_scale"),
    ],
)
def test_what_is_missing_or_unknown_is_what_transformers_says(tmp_path: Path, model_type: str, lost: str) -> None:
    unmapped_model(model_type).save_pretrained(tmp_path)
    assert compared(tmp_path) == (set(), set())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[lost]
    save_file({**tensors, "mtp.0.weight": torch.ones(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    assert compared(tmp_path) == ({lost}, {"mtp.0.weight"})
    if model_type == "olmoe" and not transformers.__version__.startswith("4."):
        with pytest.raises(RuntimeError, match="conversion of the weights"):  # 5 stacks the experts
            by_transformers(model_type, tmp_path)
    else:
        assert by_transformers(model_type, tmp_path) == ({lost}, {"mtp.0.weight"})


def test_names_of_the_bare_model_and_of_old_releases_are_understood_as_transformers_does(
    tmp_path: Path,
) -> None:
    unmapped_model("bert").save_pretrained(tmp_path)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    save_file(old, tmp_path / "model.safetensors", {"format": "pt"})
    assert compared(tmp_path) == (set(), set()) == by_transformers("bert", tmp_path)
    (tmp_path / "gpt2").mkdir()
    unmapped_model("gpt2").save_pretrained(tmp_path / "gpt2")
    bare = load_file(tmp_path / "gpt2/model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in bare.items()}
    save_file(bare, tmp_path / "gpt2/model.safetensors", {"format": "pt"})
    assert compared(tmp_path / "gpt2") == (set(), set()) == by_transformers("gpt2", tmp_path / "gpt2")


def test_configs_within_a_config_are_of_the_types_that_they_name() -> None:
    text = {**MISTRAL, "model_type": "mistral"}
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
        "intermediate_size": 48, "image_size": 16, "patch_size": 8,
    }  # fmt: skip
    config = transformers.LlavaConfig(text_config=text, vision_config=vision)
    with torch.device("meta"):
        model = transformers.LlavaForConditionalGeneration(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    told = {**config.to_dict(), "architectures": ["LlavaForConditionalGeneration"]}
    found = compare_with_library(json.dumps(told).encode(), shapes)
    assert found is not None
    assert (found.missing, found.misshapen, found.unknown) == ((), (), ())


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "nobody-knows-it"},
        {"architectures": ["SomebodysForCausalLM"]},
        {"architectures": ["GPT2LMHeadModel"]},
        {"architectures": ["AutoModel"]},
        {"quantization_config": {"quant_method": "gptq"}},
        {"num_hidden_layers": 1 << 40},
        {"num_labels": 1 << 40},
        {"vision_config": {"model_type": "swin", "depths": [2, 1 << 40]}},
        {"hidden_size": "wide"},
        {"num_attention_heads": 0},
    ],
    ids=lambda changes: str(next(iter(changes.items())))[:40],
)
def test_what_transformers_does_not_know_or_cannot_make_is_not_compared(changes: Mapping[str, Any]) -> None:
    assert compare_with_library(json.dumps({**MISTRAL, **changes}).encode(), {}) is None


def test_a_model_of_too_many_modules_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.dumps(MISTRAL).encode()
    assert compare_with_library(config, {}) is not None
    monkeypatch.setattr(library_models, "_MOST_MODULES", 10)
    assert compare_with_library(config, {}) is None


def listed(shapes: Mapping[str, Shape]) -> list[TensorSpec]:
    return [TensorSpec(name, dtypes.parse("bf16"), shape) for name, shape in shapes.items()]


def test_a_model_that_is_not_whole_is_registered_by_its_tensors_alone(tmp_path: Path) -> None:
    files = {"config.json": json.dumps(MISTRAL).encode()}
    with torch.device("meta"):
        model = transformers.MistralForCausalLM(transformers.MistralConfig(**MISTRAL))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    lost = "model.layers.1.self_attn.q_proj.weight"
    less = {name: shape for name, shape in shapes.items() if name != lost}
    other = {**shapes, lost: (16, 32)}
    with closing(LocalStore(tmp_path / "store")) as store, compared_by(compare_with_library):
        catalog = Catalog(store)
        with pytest.raises(InvalidArgument, match=r"not those of a MistralForCausalLM, .* in 1 tensor") as refused:
            catalog.register_model("acme/less", files, found=listed(less))
        assert refused.value.details == (f"{lost} is missing",)
        assert "--no-weight-map" in refused.value.fix
        with pytest.raises(InvalidArgument) as refused:
            catalog.register_model("acme/less", files, found=listed(other))
        assert refused.value.details == (f"{lost} has the shape [16, 32]: the model has [32, 32]",)
        catalog.register_model("acme/whole", files, found=listed({**shapes, "mtp.w": (2,)}))
        by_itself = catalog.register_model("acme/less", files, found=listed(less), weight_map=False)
        # what is registered so is so
        assert catalog.register_model("acme/less", files, found=listed(less)) == by_itself
