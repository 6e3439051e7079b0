"""Families that Megatron-core cannot build on CPU: do their shards, by the published conventions, come out right?

Gemma 3, Qwen2.5-VL and Llama 4 need Transformer Engine or attention that the local layer spec lacks, so no model is run
here. Instead this file writes down, tensor by tensor, what such a model's ranks hold, and makes the `ShardedTensor`s
with Megatron-core's own constructor. The conventions are:

- of megatron-core 0.16's `dist_checkpointing`: layers stacked under one key as a prepended axis where all are alike and
  one key a layer where not, experts a prepended axis, SwiGLU's halves cut each by itself, norms under the linear layer
  behind them as Transformer Engine has them, a tied output layer as a replica of the embedding;
- of mbridge 0.15.1's models for Gemma 3 and Qwen2.5-VL: `language_model.` and `vision_model.`, the latter cut like the
  former and all of it on the first stage;
- of Megatron-core's `GPTModel` for Llama 4's language model: fc1 and fc2 of an expert are transformers' matrices
  transposed. The vision tower stays as transformers has it, on every rank of the first stage;
- of Megatron-Bridge for the families of `tests.support.published_families`.

Nothing here is computed by Weighbridge or mbridge: query, key and value are interleaved by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support.held_tensors import (
    DENSE,
    EXPERTS,
    TEXT,
    VISION,
    Grid,
    Held,
    Weights,
    by_projection,
    ends,
    gate_up,
    interleaved,
    shards_of,
)
from tests.support.published_families import PUBLISHED
from tests.support.reference import make_random
from tests.support.services import FamilyService, family_service
from weighbridge import EngineClient, TrainerClient

# -- families ------------------------------------------------------------------------------------------------------------


def gemma3_text(weights: Weights) -> Iterator[Held]:
    """The language model alone has the names that it has inside of the others, without the prefix."""
    inside = {f"language_model.{name}": tensor for name, tensor in weights.items()}
    for held in gemma3_language(inside):
        yield replace(held, key=held.key.removeprefix("language_model."))


def gemma3_language(weights: Weights) -> Iterator[Held]:
    language = "language_model.model"
    yield from ends(
        weights, f"{language}.embed_tokens.weight", f"{language}.norm.weight", "language_model.lm_head.weight"
    )
    for layer in range(4):
        here, there = "language_model.decoder.layers.{}", f"{language}.layers.{layer}"
        of_layer = {
            "self_attention.linear_qkv.weight": (
                by_projection(weights, f"{there}.self_attn", "weight", 4),
                "rows",
            ),
            "self_attention.linear_proj.weight": (weights[f"{there}.self_attn.o_proj.weight"], "columns"),
            "self_attention.linear_qkv.layer_norm_weight": (
                weights[f"{there}.input_layernorm.weight"],
                "whole",
            ),
            "self_attention.q_layernorm.weight": (weights[f"{there}.self_attn.q_norm.weight"], "whole"),
            "self_attention.k_layernorm.weight": (weights[f"{there}.self_attn.k_norm.weight"], "whole"),
            "post_attention_layernorm.weight": (weights[f"{there}.post_attention_layernorm.weight"], "whole"),
            "mlp.linear_fc1.layer_norm_weight": (
                weights[f"{there}.pre_feedforward_layernorm.weight"],
                "whole",
            ),
            "mlp.linear_fc1.weight": (gate_up(weights, f"{there}.mlp"), "halves"),
            "mlp.linear_fc2.weight": (weights[f"{there}.mlp.down_proj.weight"], "columns"),
            "post_feedforward_layernorm.weight": (
                weights[f"{there}.post_feedforward_layernorm.weight"],
                "whole",
            ),
        }
        for name, (data, cut) in of_layer.items():
            yield Held(f"{here}.{name}", data, cut, layer=(layer, 4))


def gemma3(weights: Weights) -> Iterator[Held]:
    yield from gemma3_language(weights)
    tower = "vision_tower.vision_model"
    embeddings = f"{tower}.embeddings"
    for name, there in {
        "vision_model.position_embeddings.weight": f"{embeddings}.position_embedding.weight",
        "vision_model.conv1.weight": f"{embeddings}.patch_embedding.weight",
        "vision_model.conv1.bias": f"{embeddings}.patch_embedding.bias",
        "vision_model.ln_post.weight": f"{tower}.post_layernorm.weight",
        "vision_model.ln_post.bias": f"{tower}.post_layernorm.bias",
        "vision_projection.mm_input_projection.layer_norm_weight": "multi_modal_projector.mm_soft_emb_norm.weight",
    }.items():
        yield Held(name, weights[there], stage="first")
    projection = weights["multi_modal_projector.mm_input_projection_weight"].t()
    yield Held("vision_projection.mm_input_projection.weight", projection, "rows", stage="first")
    for block in range(2):
        here, there = "vision_model.decoder.layers.{}", f"{tower}.encoder.layers.{block}"
        attention, mlp = f"{there}.self_attn", f"{there}.mlp"
        of_block = {
            "self_attention.linear_qkv.weight": (by_projection(weights, attention, "weight", 4), "rows"),
            "self_attention.linear_qkv.bias": (by_projection(weights, attention, "bias", 4), "rows"),
            "self_attention.linear_proj.weight": (weights[f"{attention}.out_proj.weight"], "columns"),
            "self_attention.linear_proj.bias": (weights[f"{attention}.out_proj.bias"], "whole"),
            "self_attention.linear_qkv.layer_norm_weight": (weights[f"{there}.layer_norm1.weight"], "whole"),
            "self_attention.linear_qkv.layer_norm_bias": (weights[f"{there}.layer_norm1.bias"], "whole"),
            "mlp.linear_fc1.weight": (weights[f"{mlp}.fc1.weight"], "rows"),
            "mlp.linear_fc1.bias": (weights[f"{mlp}.fc1.bias"], "rows"),
            "mlp.linear_fc2.weight": (weights[f"{mlp}.fc2.weight"], "columns"),
            "mlp.linear_fc2.bias": (weights[f"{mlp}.fc2.bias"], "whole"),
            "mlp.linear_fc1.layer_norm_weight": (weights[f"{there}.layer_norm2.weight"], "whole"),
            "mlp.linear_fc1.layer_norm_bias": (weights[f"{there}.layer_norm2.bias"], "whole"),
        }
        for name, (data, cut) in of_block.items():
            yield Held(f"{here}.{name}", data, cut, layer=(block, 2), stage="first")


def qwen2_5_vl(weights: Weights) -> Iterator[Held]:
    yield from ends(weights, "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    for layer in range(4):
        here, there = "language_model.decoder.layers.{}", f"model.layers.{layer}"
        attention = f"{there}.self_attn"
        of_layer = {
            "self_attention.linear_qkv.weight": (by_projection(weights, attention, "weight", 4), "rows"),
            "self_attention.linear_qkv.bias": (by_projection(weights, attention, "bias", 4), "rows"),
            "self_attention.linear_proj.weight": (weights[f"{attention}.o_proj.weight"], "columns"),
            "self_attention.linear_qkv.layer_norm_weight": (
                weights[f"{there}.input_layernorm.weight"],
                "whole",
            ),
            "mlp.linear_fc1.layer_norm_weight": (
                weights[f"{there}.post_attention_layernorm.weight"],
                "whole",
            ),
            "mlp.linear_fc1.weight": (gate_up(weights, f"{there}.mlp"), "halves"),
            "mlp.linear_fc2.weight": (weights[f"{there}.mlp.down_proj.weight"], "columns"),
        }
        for name, (data, cut) in of_layer.items():
            yield Held(f"{here}.{name}", data, cut, layer=(layer, 4))
    for name, (there, cut) in {
        "patch_embed.proj.weight": ("visual.patch_embed.proj.weight", "whole"),
        "decoder.final_layernorm.weight": ("visual.merger.ln_q.weight", "whole"),
        "projection.encoder.linear_fc1.weight": ("visual.merger.mlp.0.weight", "rows"),
        "projection.encoder.linear_fc1.bias": ("visual.merger.mlp.0.bias", "rows"),
        "projection.encoder.linear_fc2.weight": ("visual.merger.mlp.2.weight", "columns"),
        "projection.encoder.linear_fc2.bias": ("visual.merger.mlp.2.bias", "whole"),
    }.items():
        yield Held(f"vision_model.{name}", weights[there], cut, stage="first")
    for block in range(2):
        here, there = "vision_model.decoder.layers.{}", f"visual.blocks.{block}"
        of_block = {
            "self_attention.linear_qkv.weight": (
                interleaved(*weights[f"{there}.attn.qkv.weight"].chunk(3), 4),
                "rows",
            ),
            "self_attention.linear_qkv.bias": (
                interleaved(*weights[f"{there}.attn.qkv.bias"].chunk(3), 4),
                "rows",
            ),
            "self_attention.linear_proj.weight": (weights[f"{there}.attn.proj.weight"], "columns"),
            "self_attention.linear_proj.bias": (weights[f"{there}.attn.proj.bias"], "whole"),
            "self_attention.linear_qkv.layer_norm_weight": (weights[f"{there}.norm1.weight"], "whole"),
            "mlp.linear_fc1.layer_norm_weight": (weights[f"{there}.norm2.weight"], "whole"),
            "mlp.linear_fc1.weight": (gate_up(weights, f"{there}.mlp"), "halves"),
            "mlp.linear_fc1.bias": (gate_up(weights, f"{there}.mlp", "bias"), "halves"),
            "mlp.linear_fc2.weight": (weights[f"{there}.mlp.down_proj.weight"], "columns"),
            "mlp.linear_fc2.bias": (weights[f"{there}.mlp.down_proj.bias"], "whole"),
        }
        for name, (data, cut) in of_block.items():
            yield Held(f"{here}.{name}", data, cut, layer=(block, 2), stage="first")


def llama4(weights: Weights) -> Iterator[Held]:
    prefix = "language_model."
    yield from llama4_text({n.removeprefix(prefix): t for n, t in weights.items() if n.startswith(prefix)}, prefix)
    for name, tensor in weights.items():
        if not name.startswith(prefix):
            yield Held(name, tensor, stage="first")


def llama4_text(weights: Weights, prefix: str = "") -> Iterator[Held]:
    yield from ends(weights, "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", prefix)
    with_experts = [f"model.layers.{layer}.feed_forward.router.weight" in weights for layer in range(4)]
    for layer in range(4):
        here, there = f"{prefix}decoder.layers.{{}}", f"model.layers.{layer}"
        mlp = f"{there}.feed_forward"
        common = Held("", torch.empty(0), layer=(layer, 4), stacked=all(with_experts))
        of_layer = {
            "self_attention.linear_qkv.weight": (
                by_projection(weights, f"{there}.self_attn", "weight", 4),
                "rows",
            ),
            "self_attention.linear_proj.weight": (weights[f"{there}.self_attn.o_proj.weight"], "columns"),
            "self_attention.linear_qkv.layer_norm_weight": (
                weights[f"{there}.input_layernorm.weight"],
                "whole",
            ),
        }
        norm = weights[f"{there}.post_attention_layernorm.weight"]
        if with_experts[layer]:
            of_layer |= {
                "pre_mlp_layernorm.weight": (norm, "whole"),
                "mlp.router.weight": (weights[f"{mlp}.router.weight"], "whole"),
                "mlp.shared_experts.linear_fc1.weight": (gate_up(weights, f"{mlp}.shared_expert"), "halves"),
                "mlp.shared_experts.linear_fc2.weight": (
                    weights[f"{mlp}.shared_expert.down_proj.weight"],
                    "columns",
                ),
            }
            experts = list(
                zip(weights[f"{mlp}.experts.gate_up_proj"], weights[f"{mlp}.experts.down_proj"], strict=True)
            )
            for expert, (fc1, fc2) in enumerate(experts):
                of_expert = replace(common, expert=(expert, len(experts)))
                key = f"{here}.mlp.experts.experts"
                yield replace(of_expert, key=f"{key}.linear_fc1.weight", data=fc1.t(), cut="halves")
                yield replace(of_expert, key=f"{key}.linear_fc2.weight", data=fc2.t(), cut="columns")
        else:
            of_layer |= {
                "mlp.linear_fc1.layer_norm_weight": (norm, "whole"),
                "mlp.linear_fc1.weight": (gate_up(weights, mlp), "halves"),
                "mlp.linear_fc2.weight": (weights[f"{mlp}.down_proj.weight"], "columns"),
            }
        for name, (data, cut) in of_layer.items():
            yield replace(common, key=f"{here}.{name}", data=data, cut=cut)


# -- tests ---------------------------------------------------------------------------------------------------------------


def gemma3_model(tied: bool) -> Any:
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4}
    pictures = {"image_size": 28, "patch_size": 14, "vision_use_head": False}
    text = {**TEXT, "head_dim": 16, "tie_word_embeddings": tied}
    vision = {**VISION, **heads, **pictures}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, tie_word_embeddings=tied)
    return transformers.Gemma3ForConditionalGeneration(config)


def gemma3_text_model(tied: bool) -> Any:
    text = {**TEXT, "head_dim": 16, "tie_word_embeddings": tied}
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**text))


def qwen2_5_vl_model(tied: bool) -> Any:
    vision = {**VISION, "depth": 2, "num_heads": 4, "out_hidden_size": 64}
    text = {**TEXT, "tie_word_embeddings": tied}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def llama4_text_config(every: int, tied: bool) -> dict[str, Any]:
    experts = {"num_local_experts": 8, "interleave_moe_layer_step": every, "intermediate_size_mlp": 80}
    return {**TEXT, **experts, "intermediate_size": 48, "head_dim": 16, "tie_word_embeddings": tied}


def llama4_text_model(every: int, tied: bool = False) -> Any:
    return transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**llama4_text_config(every, tied)))


def llama4_model(every: int, tied: bool = False) -> Any:
    sizes = dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 32)
    vision = {
        **VISION,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 28,
        "patch_size": 14,
        **sizes,
    }
    config = transformers.Llama4Config(
        text_config=llama4_text_config(every, tied), tie_word_embeddings=tied, vision_config=vision
    )
    return transformers.Llama4ForConditionalGeneration(config)


def saved(model: Any, folder: Path) -> Weights:
    """The weights of the folder that transformers writes."""
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    published = dict(weights)
    if any(name.startswith("vision_tower.embeddings.") for name in weights):
        # transformers 5 has not loaded this model, and so does not know the prefix that published files have
        published = {re.sub(r"^vision_tower\.", "vision_tower.vision_model.", n): t for n, t in weights.items()}
    for name, tensor in weights.items():
        if name.endswith(".experts.gate_up_proj") and tensor.shape[1] != TEXT["hidden_size"]:
            # nor which way round these have the experts
            down = name.replace("gate_up_proj", "down_proj")
            published |= {n: weights[n].transpose(1, 2).contiguous() for n in (name, down)}
    if published.keys() != weights.keys() or any(published[n] is not t for n, t in weights.items()):
        save_file(published, folder / "model.safetensors", {"format": "pt"})
    return published


MODELS: dict[str, tuple[Callable[[], Any], Callable[[Weights], Iterator[Held]], list[Grid]]] = {
    "gemma3": (lambda: gemma3_model(tied=True), gemma3, DENSE),
    "gemma3-untied": (lambda: gemma3_model(tied=False), gemma3, DENSE),
    "gemma3_text": (lambda: gemma3_text_model(tied=True), gemma3_text, DENSE),
    "gemma3_text-untied": (lambda: gemma3_text_model(tied=False), gemma3_text, DENSE),
    "qwen2_5_vl": (lambda: qwen2_5_vl_model(tied=False), qwen2_5_vl, DENSE),
    "qwen2_5_vl-tied": (lambda: qwen2_5_vl_model(tied=True), qwen2_5_vl, DENSE),
    "llama4_text": (lambda: llama4_text_model(every=1), llama4_text, EXPERTS),
    "llama4_text-interleaved": (lambda: llama4_text_model(every=2), llama4_text, EXPERTS),
    "llama4": (lambda: llama4_model(every=1), llama4, EXPERTS),
    "llama4-interleaved": (lambda: llama4_model(every=2), llama4, EXPERTS),
    **PUBLISHED,
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FamilyService]:
    with family_service(tmp_path_factory.mktemp("store")) as running:
        yield running


@pytest.mark.parametrize("key", MODELS)
def test_shards_by_the_published_conventions_become_the_folder_and_come_back(
    service: FamilyService, tmp_path: Path, key: str
) -> None:
    make, hold, grids = MODELS[key]
    model = make()
    make_random(model, seed=5)
    weights = saved(model, tmp_path)
    name = f"tests/{key}"
    with TrainerClient(service.address) as trainer:
        trainer.register_model(name, tmp_path)  # not its weights: all that is pulled has been pushed by ranks
    for case, grid in enumerate(grids):
        # other weights each time, so that nothing left over can pass for pushed
        expected = {n: t * 2.0**case for n, t in weights.items()}
        held = list(hold(expected))
        number = push_from_all(service.address, name, held, grid)
        with EngineClient(service.address) as engine:
            pulled = dict(engine.pull(name, number))
        assert pulled.keys() == expected.keys()
        for n, tensor in expected.items():
            assert torch.equal(pulled[n], tensor), f"{n} at {grid}"
        restore_on_all(service.address, name, held, grid, number)


def push_from_all(address: str, name: str, held: Sequence[Held], grid: Grid) -> int:
    def push(rank: int) -> int:
        with TrainerClient(address, run=str(grid)) as trainer:
            shards = shards_of(held, grid, rank)
            handle = trainer.push(name, shards, step=1, rank=rank, world_size=grid.world_size)
            return handle.wait(timeout=60).number

    with ThreadPoolExecutor(grid.world_size) as ranks:
        (number,) = set(ranks.map(push, range(grid.world_size)))
    return number


def restore_on_all(address: str, name: str, held: Sequence[Held], grid: Grid, number: int) -> None:
    with TrainerClient(address) as trainer:
        for rank in range(grid.world_size):
            expected = shards_of(held, grid, rank)
            found = shards_of(held, grid, rank)
            for shard in (shard for shards in found.values() for shard in shards):
                shard.data.fill_(torch.nan)
            trainer.restore(name, found, version=number)
            for key, shards in found.items():
                for one, other in zip(shards, expected[key], strict=True):
                    assert torch.equal(one.data, other.data), f"{key} on rank {rank} of {grid}"


@pytest.mark.parametrize("tied", [True, False])
def test_a_config_of_qwen2_5_vl_may_be_flat_as_published(service: FamilyService, tmp_path: Path, tied: bool) -> None:
    qwen2_5_vl_model(tied).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config")
    flat = {**text, **config, "tie_word_embeddings": tied}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    name = f"tests/flat-{tied}"
    with TrainerClient(service.address) as trainer:
        trainer.register_model(name, tmp_path)
        trainer.push_folder(name, tmp_path).wait(timeout=60)
    weights = load_file(tmp_path / "model.safetensors")
    number = push_from_all(service.address, name, list(qwen2_5_vl(weights)), Grid(tp=2))
    with EngineClient(service.address) as engine:
        pulled = dict(engine.pull(name, number))
    assert pulled.keys() == weights.keys()
    assert ("lm_head.weight" in pulled) is not tied
    assert all(torch.equal(pulled[n], tensor) for n, tensor in weights.items())


def test_the_conventions_leave_no_tensor_of_the_folder_out(tmp_path: Path) -> None:
    """Each held tensor once, in as many elements as the folder has."""
    for key, (make, hold, _) in MODELS.items():
        weights = saved(make(), tmp_path / key)
        held = [item for item in hold(weights) if not item.copy]
        assert sum(item.data.numel() for item in held) == sum(t.numel() for t in weights.values())
