"""Is each tensor cut over an engine's ranks as engines cut it, whatever the parallelism? Compared with cuts made by
hand.

The layouts are asked of the service's own function, with models that transformers makes.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from tests.service.models.engine_models import (
    PlainBridge,
    Source,
    by_hand,
    moe_config,
    real_bridge,
    same,
    weights_of,
)
from tests.support.published_families import PUBLISHED
from tests.support.raw_clients import mapped_files
from tests.support.reference import in_files, make_random, tiny_config
from weighbridge import ExpertParallel, TensorParallel
from weighbridge._cli.rank_files import lay_out_rank_file, write_rank_file
from weighbridge.errors import InvalidArgument


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_key_value_heads_are_on_every_rank_that_needs_them(kv_heads: int, size: int) -> None:
    config = tiny_config("qwen3", tied=False, num_key_value_heads=kv_heads)
    source = Source(real_bridge(config), weights_of(config))
    for rank in range(size):
        same(source.rank(size, rank), by_hand(source.state, kv_heads, size, rank))


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize(
    ("size", "ep", "etp"),
    [(1, 1, 1), (2, 1, 1), (2, 4, 1), (4, 4, 1), (8, 8, 1), (4, 2, 2), (2, 1, 4), (8, 4, 2)],
)
def test_experts_are_spread_in_blocks_and_cut_inside(family: str, size: int, ep: int, etp: int) -> None:
    config = moe_config(family)
    source = Source(real_bridge(config), weights_of(config))
    held: dict[str, int] = {}
    for rank in range(max(size, ep * etp)):
        tp_rank, ep_rank, etp_rank = rank % size, rank // etp % ep, rank % etp
        found = source.rank(size, tp_rank, experts=ExpertParallel(ep, ep_rank, etp, etp_rank))
        same(found, by_hand(source.state, 4, size, tp_rank, (ep, ep_rank, etp, etp_rank)))
        for name in found:
            held[name] = held.get(name, 0) + 1
    assert held.keys() == source.state.keys()
    experts = [name for name in held if ".experts." in name]
    assert len(experts) == 2 * 8 * 3


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "ernie4_5_moe"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_experts_that_are_not_spread_are_cut_like_everything_else(family: str, size: int) -> None:
    config = moe_config(family)
    source = Source(real_bridge(config), weights_of(config))
    for rank in range(size):
        same(source.rank(size, rank), by_hand(source.state, 4, size, rank))


@pytest.mark.parametrize("q_lora_rank", [12, None])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_latent_attention_and_shared_experts_are_cut_as_engines_do(q_lora_rank: int | None, size: int) -> None:
    """transformers' plan says nothing of latent attention."""
    config = moe_config("deepseek_v3", q_lora_rank=q_lora_rank)
    source = Source(real_bridge(config), weights_of(config))
    for rank in range(size):
        found = source.rank(size, rank, experts=ExpertParallel(8, rank))
        same(found, by_hand(source.state, 8, size, rank, (8, rank, 1, 0)))
        layer = "model.layers.1."
        assert found[layer + "self_attn.kv_a_proj_with_mqa.weight"].shape == (20, 32)
        assert found[layer + "self_attn.kv_b_proj.weight"].shape == (8 * 14 // size, 16)
        assert found[layer + "self_attn.o_proj.weight"].shape == (32, 48 // size)
        assert found[layer + "mlp.gate.weight"].shape == (8, 32)
        assert found[layer + "mlp.gate.e_score_correction_bias"].shape == (8,)
        assert found[layer + "mlp.shared_experts.down_proj.weight"].shape[1] * size == 16


@pytest.mark.parametrize(("size", "ep"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_state_space_models_are_cut_section_by_section(size: int, ep: int) -> None:
    """As vLLM's loaders of Mamba 2 do it: gates, inputs, B, C and time steps each over the ranks; the rest of a hybrid
    model as usual.
    """
    model = PUBLISHED["nemotron_h"][0]()
    make_random(model, seed=3)
    bridge = real_bridge(model.config)
    weights = in_files(model, model.state_dict())
    state = {name: weights[name] for name in bridge.hugging_face}
    source = Source(bridge, state)
    mixer, heads, inner, states = "backbone.layers.0.mixer.", 8, 96, 24
    sections = {
        "in_proj.weight": [inner, inner, states, states, heads],
        "conv1d.weight": [inner, states, states],
        "conv1d.bias": [inner, states, states],
    }
    rows = re.compile(r"lm_head\.weight|.*\.mixer\.((A_log|D|dt_bias|norm\.weight)|([qkv]|.*up)_proj\.weight)")
    for rank in range(size):
        experts = ExpertParallel(ep, rank, 1, 0) if ep > 1 else None
        found: dict[str, list[Tensor]] = {}
        for name, part in source.slices(TensorParallel(size, rank, experts=experts)):
            found.setdefault(name, []).append(part)
        mine = range(8) if experts is None else range(rank * 4, rank * 4 + 4)
        of_expert = {name: int(n[1]) for name in state if (n := re.search(r"experts\.(\d+)\.", name))}
        assert found.keys() == {name for name in state if of_expert.get(name, mine[0]) in mine}
        for name, parts in found.items():
            whole, size_here = state[name], 1 if experts and name in of_expert else size
            wanted = [whole]
            if name.removeprefix(mixer) in sections and size > 1:
                wanted = [part.chunk(size)[rank] for part in whole.split(sections[name.removeprefix(mixer)])]
            elif rows.fullmatch(name) and size_here > 1:
                wanted = [whole.chunk(size)[rank]]
            elif name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")) and size_here > 1:
                wanted = [whole.chunk(size, dim=1)[rank]]
            assert len(parts) == len(wanted), name
            assert all(torch.equal(one, other) for one, other in zip(parts, wanted, strict=True)), name


@pytest.mark.parametrize(("size", "ep"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_gated_delta_nets_are_cut_by_their_heads(size: int, ep: int) -> None:
    """As vLLM's Qwen3-Next has them: channels of the convolution section by section, and the rest of the model as
    usual, what predicts further tokens included."""
    model = PUBLISHED["qwen3_next-predicting"][0]()
    make_random(model, seed=3)
    bridge = real_bridge(model.config)
    weights = in_files(model, model.state_dict())
    state = {name: weights[name] for name in bridge.hugging_face}
    source = Source(bridge, state)
    for rank in range(size):
        experts = (ep, rank, 1, 0) if ep > 1 else None
        wanted = by_hand(state, 4, size, rank, experts)
        for name in [name for name in wanted if ".linear_attn." in name]:
            whole, kind = state[name], name.split(".linear_attn.")[1]
            if kind == "conv1d.weight":
                wanted[name] = torch.cat([part.chunk(size)[rank] for part in whole.split([48, 48, 160])])
            elif kind == "out_proj.weight":
                wanted[name] = whole.chunk(size, dim=1)[rank]
            elif kind != "norm.weight":
                wanted[name] = whole.chunk(size)[rank]
        asked = TensorParallel(size, rank, experts=ExpertParallel(*experts) if experts else None)
        found: dict[str, Tensor] = {}
        for name, part in source.slices(asked):
            found[name] = torch.cat([found[name], part]) if name in found else part
        same(found, wanted)


@pytest.mark.parametrize("size", [2, 8])
def test_an_indexer_of_sparse_attention_is_whole_on_every_rank(size: int) -> None:
    """As vLLM's and SGLang's DeepSeek-V3.2 have it: every rank chooses the tokens that all heads attend to."""
    config = tiny_config("deepseek_v32", tied=False, num_hidden_layers=2)
    state = weights_of(config)
    source = Source(real_bridge(config), state)
    indexer = [name for name in state if ".self_attn.indexer." in name]
    assert len(indexer) == 2 * 5
    for rank in range(size):
        found = source.rank(size, rank, experts=ExpertParallel(8, rank))
        same(found, by_hand(state, 8, size, rank, (8, rank, 1, 0)))
        assert all(torch.equal(found[name], state[name]) for name in indexer)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_norms_over_all_heads_are_cut_like_the_projections_in_front_of_them(size: int) -> None:
    """As vLLM's and SGLang's MiniMax-M2 have them; of four key-value heads each is on every rank that needs it."""
    config = tiny_config("minimax_m2", tied=False, num_hidden_layers=2)
    state = weights_of(config)
    source = Source(real_bridge(config), state)
    for rank in range(size):
        wanted = by_hand(state, 4, size, rank)
        for layer in range(2):
            of_queries, of_keys = (f"model.layers.{layer}.self_attn.{part}_norm.weight" for part in "qk")
            wanted[of_queries] = state[of_queries].chunk(size)[rank]
            wanted[of_keys] = state[of_keys].chunk(min(size, 4))[rank * min(size, 4) // size]
        same(source.rank(size, rank), wanted)


@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 4)])
def test_stacked_experts_are_spread_and_cut_between_gate_and_up(tmp_path: Path, ep: int, etp: int) -> None:
    """[experts, hidden, gate and up], as llama4 has them."""
    prefix = "language_model.model.layers.0.feed_forward.experts."
    fused, down = torch.randn(8, 6, 16), torch.randn(8, 8, 6)
    source = Source(PlainBridge(), {prefix + "gate_up_proj": fused, prefix + "down_proj": down})
    for ep_rank in range(ep):
        for rank in range(etp):
            request = TensorParallel(etp, rank, experts=ExpertParallel(ep, ep_rank, etp, rank))
            gate, up = (half.chunk(etp, dim=2)[rank].chunk(ep)[ep_rank] for half in fused.chunk(2, dim=2))
            slices = source.slices(request)
            expected = [gate, up] if etp > 1 else [torch.cat([gate, up], dim=2)]
            expected.append(down.chunk(etp, dim=1)[rank].chunk(ep)[ep_rank])
            assert [name.removeprefix(prefix) for name, _ in slices] == [
                *["gate_up_proj"] * (len(expected) - 1),
                "down_proj",
            ]
            for (_, found), wanted in zip(slices, expected, strict=True):
                assert torch.equal(found, wanted)

            # in a file they are one tensor, as the rank's own parameter is
            layout = source.layout(request)
            stream = bytes(source.transfer(layout).gather(0, layout.nbytes, mapped_files(source.buffers)))
            path = tmp_path / f"{ep_rank}-{rank}.safetensors"
            pieces = [stream[i : i + 97] for i in range(0, len(stream), 97)]
            write_rank_file(path, lay_out_rank_file(layout, {}), layout, pieces, lambda _done, _total: None)
            with safe_open(path, "pt") as file:
                assert torch.equal(file.get_tensor(prefix + "gate_up_proj"), torch.cat([gate, up], dim=2))
                assert torch.equal(file.get_tensor(prefix + "down_proj"), expected[-1])


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe", "glm4v_moe"])
def test_a_language_model_is_cut_beside_a_tower_that_comes_whole(family: str) -> None:
    make, _, _ = PUBLISHED[family]
    bridge = real_bridge(make().config)
    state = {name: torch.randn(shape) for name, shape in bridge.hugging_face.items()}
    source = Source(bridge, state)
    cut = {name: whole for name, whole in state.items() if not name.startswith(("model.visual.", "lm_head."))}
    stacked = {name for name in state if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))}
    assert len(stacked) == (8 if family == "qwen3_vl_moe" else 0)
    for rank in range(2):
        found: dict[str, list[Tensor]] = {}
        for name, part in source.slices(TensorParallel(2, rank)):
            found.setdefault(name, []).append(part)
        wanted = {name: [part] for name, part in by_hand(cut, 4, 2, rank).items()}
        for name in stacked:
            gate_and_up = state[name].chunk(2, dim=2) if name.endswith("gate_up_proj") else ()
            halves = [half.chunk(2, dim=2)[rank] for half in gate_and_up]
            wanted[name] = halves or [state[name].chunk(2, dim=1)[rank]]
        for name, whole in state.items():
            for one, other in zip(found[name], wanted.get(name, [whole]), strict=True):
                assert torch.equal(one, other), name


@pytest.mark.parametrize(("size", "ep", "etp"), [(1, 1, 1), (2, 1, 2), (4, 1, 4), (2, 2, 1), (4, 2, 2)])
def test_experts_whose_gate_and_up_take_turns_are_cut_as_they_lie(size: int, ep: int, etp: int) -> None:
    """As vLLM's loader of gpt-oss does it; with biases, and an offset of the softmax for each head."""
    config = tiny_config("gpt_oss", tied=False, num_hidden_layers=2)
    state = weights_of(config)
    source = Source(real_bridge(config), state)
    # which axis is cut, and by what
    of_experts = {"gate_up_proj": 2, "gate_up_proj_bias": 1, "down_proj": 1, "down_proj_bias": None}
    rows, columns = re.compile(r".*\.(q|k|v)_proj\.\w+|.*\.sinks|lm_head\.weight"), ".o_proj.weight"
    for rank in range(size):
        ep_rank, etp_rank = divmod(rank, etp)
        found = source.rank(size, rank, experts=ExpertParallel(ep, ep_rank, etp, etp_rank))
        for name, whole in state.items():
            if ".experts." in name:
                axis = of_experts[name.rpartition(".")[2]]
                wanted = whole.chunk(ep)[ep_rank]
                wanted = wanted if axis is None else wanted.chunk(etp, dim=axis)[etp_rank]
            elif rows.fullmatch(name):
                wanted = whole.chunk(size)[rank]
            else:
                wanted = whole.chunk(size, dim=1)[rank] if name.endswith(columns) else whole
            assert torch.equal(found[name], wanted), name


def test_stacked_experts_that_are_not_spread_are_cut_by_the_tensor_parallel_size() -> None:
    prefix = "model.layers.0.feed_forward.experts."
    fused, down = torch.randn(4, 6, 16), torch.randn(4, 8, 6)
    source = Source(PlainBridge(), {prefix + "gate_up_proj": fused, prefix + "down_proj": down})
    for rank in range(4):
        gate, up, lower = (found for _, found in source.slices(TensorParallel(4, rank)))
        assert torch.equal(gate, fused[:, :, :8].chunk(4, dim=2)[rank])
        assert torch.equal(up, fused[:, :, 8:].chunk(4, dim=2)[rank])
        assert torch.equal(lower, down.chunk(4, dim=1)[rank])


def test_scales_of_fp8_weights_are_cut_in_blocks() -> None:
    name = "model.layers.0.mlp.experts.{}.{}_proj.weight"
    state: dict[str, Tensor] = {}
    for expert in range(2):
        for kind, shape in (("gate", (256, 200)), ("down", (200, 256))):
            state[name.format(expert, kind)] = torch.randn(shape).to(torch.float8_e4m3fn)
            blocks = tuple(math.ceil(n / 128) for n in shape)
            state[name.format(expert, kind) + "_scale_inv"] = torch.randn(blocks)
    source = Source(PlainBridge(), state)
    for expert in range(2):
        for rank in range(2):
            found = source.slices(TensorParallel(4, 3, experts=ExpertParallel(2, expert, 2, rank)))
            expected = {
                key: whole.view(torch.uint8 if whole.dtype == torch.float8_e4m3fn else whole.dtype).chunk(
                    2, dim=0 if "gate" in key else 1
                )[rank]
                for key, whole in state.items()
                if f"experts.{expert}." in key
            }
            assert [key for key, _ in found] == list(expected)
            for key, tensor in found:
                raw = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
                assert torch.equal(raw, expected[key]), key
    with pytest.raises(InvalidArgument, match=r"gate_proj\.weight_scale_inv.*block"):
        source.layout(TensorParallel(4, 0))


def test_value_heads_routers_and_what_the_plan_does_not_know_come_whole() -> None:
    config = moe_config("qwen2_moe", tie_word_embeddings=True)
    state = weights_of(config) | {"score.weight": torch.randn(4, 32), "model.more.weight": torch.randn(8, 8)}
    source = Source(real_bridge(config), state)
    for rank in range(4):
        found = source.rank(4, rank)
        for name in ("score.weight", "model.more.weight", "model.norm.weight", "model.embed_tokens.weight"):
            assert torch.equal(found[name], state[name])
        for name in ("gate.weight", "shared_expert_gate.weight"):
            assert torch.equal(found[f"model.layers.1.mlp.{name}"], state[f"model.layers.1.mlp.{name}"])
