"""Does each rank of an engine get what engines hold, whatever the parallelism? Compared with cuts made by hand.

The layouts are asked of the service's own function with models that transformers makes, and once more of a service.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from torch import Tensor

from tests.raw_clients import RawClient, mapped_files
from tests.reference import tiny_config, tiny_model, tiny_value_model
from tests.services import RunningService, running_service
from tests.test_family_conventions import gemma3_model, llama4_model, qwen2_5_vl_model
from weighbridge import (
    Boxes,
    EngineClient,
    ExpertParallel,
    FullTensors,
    TensorParallel,
    TrainerClient,
    dtypes,
    wire,
)
from weighbridge.cli import commands
from weighbridge.cli.rank_files import lay_out_rank_file, write_rank_file
from weighbridge.errors import InvalidArgument
from weighbridge.layouts import Layout, TensorSpec
from weighbridge.safetensors_files import lay_out_files
from weighbridge.slices import LayoutRequest
from weighbridge.v1 import weight_service_pb2
from weighbridge_service.bridges import Bridge, bridge_for
from weighbridge_service.casting import Casting
from weighbridge_service.engine_layouts import EngineLayouts, padding_of
from weighbridge_service.planning import make_plan
from weighbridge_service.relations import identity_links
from weighbridge_service.transfers import Transfer

MODEL = "tests/engine"
DTYPES = ["fp32", "fp16", "bf16", "fp64"]


def real_bridge(config: Any) -> Bridge:
    return bridge_for(config.to_json_string(use_diff=False).encode())


class PlainBridge:
    """A model without a plan."""

    model_type = "plain"
    experts = 0
    megatron: Mapping[str, Any] = {}

    def __init__(self, num_layers: int = 2, vocab_size: int = 64, heads: tuple[int, int] = (8, 8)) -> None:
        self.num_layers = num_layers
        self.vocab_size = vocab_size
        self.heads = heads

    def parallel_plan(self) -> Mapping[str, str]:
        return {}

    def head_counts(self) -> tuple[int, int]:
        return self.heads


def weights_of(config: Any) -> dict[str, Tensor]:
    state = dict(tiny_model(config, seed=1).state_dict())
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


def specs_of(state: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    return {n: TensorSpec(n, dtypes.from_torch(t.dtype), tuple(t.shape)) for n, t in state.items()}


class Source:
    """A state dict as the files of a version, and what plans read from it."""

    def __init__(self, bridge: Any, state: Mapping[str, Tensor]) -> None:
        self.bridge = bridge
        self.state = state
        self.specs = specs_of(state)
        self.files = lay_out_files(list(self.specs.values()))
        self.buffers = {name: np.zeros(n, np.uint8) for name, n in self.files.file_sizes.items()}
        for p in self.files.layout.placements:
            raw = state[p.shard.tensor].contiguous().reshape(-1).view(torch.uint8).numpy()
            self.buffers[p.buffer][p.offset : p.offset + p.nbytes] = raw

    def layout(self, request: LayoutRequest) -> Layout:
        return EngineLayouts(self.bridge, self.specs).layout(request)

    def transfer(self, layout: Layout) -> Transfer:
        links = identity_links(self.specs[name] for name in layout.tensors)
        source = self.files.layout
        plan = make_plan(source, layout, links, padding=padding_of(source, layout))
        return Transfer(plan, scatter=False)

    def slices(self, request: LayoutRequest) -> list[tuple[str, Tensor]]:
        layout = self.layout(request)
        stream = bytearray(self.transfer(layout).gather(0, layout.nbytes, mapped_files(self.buffers)))
        return [
            (
                p.shard.tensor,
                torch.frombuffer(
                    stream,
                    dtype=layout.tensors[p.shard.tensor].dtype.torch,
                    count=p.shard.box.volume,
                    offset=p.offset,
                ).reshape(p.shard.box.extent),
            )
            for p in layout.placements
        ]

    def rank(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        found = self.slices(TensorParallel(*args, **kwargs))
        assert len(dict(found)) == len(found)
        return dict(found)


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def moe_config(family: str, **overrides: Any) -> Any:
    from transformers import DeepseekV3Config, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig

    fields: dict[str, Any] = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "vocab_size": 64,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    match family:
        case "mixtral":
            return MixtralConfig(**{**fields, "num_local_experts": 8, **overrides})
        case "qwen2_moe":
            return Qwen2MoeConfig(
                **{**fields, "num_experts": 8, "shared_expert_intermediate_size": 24, **overrides}
            )
        case "qwen3_moe":
            return Qwen3MoeConfig(**{**fields, "num_experts": 8, "head_dim": 16, **overrides})
        case "deepseek_v3":
            latent = {
                "num_key_value_heads": 8,
                "n_routed_experts": 8,
                "n_group": 2,
                "topk_group": 1,
                "num_experts_per_tok": 2,
                "q_lora_rank": 12,
                "kv_lora_rank": 16,
                "qk_nope_head_dim": 8,
                "qk_rope_head_dim": 4,
                "v_head_dim": 6,
                "first_k_dense_replace": 1,
            }
            return DeepseekV3Config(**{**fields, **latent, **overrides})
    raise ValueError(family)


ROWS = ("q_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "w1", "w3", "lm_head")
COLUMNS = ("o_proj", "down_proj", "w2")


def by_hand(
    state: Mapping[str, Tensor],
    kv_heads: int,
    size: int,
    rank: int,
    experts: tuple[int, int, int, int] | None = None,
    count: int = 8,
) -> dict[str, Tensor]:
    """What vLLM's loaders keep of a state dict, written down once more."""
    expected = {}
    for name, whole in state.items():
        parts, part = size, rank
        of_expert = re.search(r"\.experts\.(\d+)\.", name)
        if of_expert and experts is not None:
            ep_size, ep_rank, parts, part = experts
            mine = torch.arange(count).chunk(ep_size)[ep_rank].tolist()
            if int(of_expert[1]) not in mine:
                continue
        module = name.split(".")[-2]
        if module in ROWS:
            whole = whole.chunk(parts, dim=0)[part]
        elif module in ("k_proj", "v_proj"):
            heads = whole.chunk(kv_heads, dim=0)
            each = max(kv_heads // parts, 1)
            first = part * kv_heads // parts
            whole = torch.cat(heads[first : first + each])
        elif module in COLUMNS and whole.dim() == 2:
            whole = whole.chunk(parts, dim=1)[part]
        expected[name] = whole
    return expected


# -- cuts ----------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_experts_that_are_not_spread_are_cut_like_everything_else(family: str, size: int) -> None:
    config = moe_config(family)
    source = Source(real_bridge(config), weights_of(config))
    for rank in range(size):
        same(source.rank(size, rank), by_hand(source.state, 4, size, rank))


@pytest.mark.parametrize("q_lora_rank", [12, None])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_latent_attention_and_shared_experts_are_cut_as_engines_do(
    q_lora_rank: int | None, size: int
) -> None:
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


# -- stages --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [[0, 4], [0, 2, 4], [0, 1, 2, 3, 4], [0, 3, 4]])
@pytest.mark.parametrize(
    ("family", "tied"),
    [("qwen2", False), ("qwen2", True), ("deepseek_v3_mtp", False), ("mimo", False), ("qwen2_5_vl", True)],
)
def test_the_stages_of_a_pipeline_hold_every_tensor_once(family: str, tied: bool, cuts: list[int]) -> None:
    config = qwen2_5_vl_model(tied).config if family == "qwen2_5_vl" else tiny_config(family, tied=tied)
    bridge = real_bridge(config)
    generator = torch.Generator().manual_seed(3)
    state = {name: torch.randn(shape, generator=generator) for name, shape in bridge.hugging_face.items()}
    source = Source(bridge, state)
    cuts = [cut * bridge.num_layers // 4 for cut in cuts]
    pairs = [(a, b) for a, b in itertools.pairwise(cuts) if a < b]
    stages = [source.rank(2, 1, layers=pair) for pair in pairs]
    whole = source.rank(2, 1)
    assert whole.keys() == state.keys()
    last = len(stages) - 1
    for name, tensor in whole.items():
        layer = re.match(r"model\.(language_model\.)?layers\.(\d+)\.", name)
        if layer and int(layer[2]) < bridge.num_layers:
            where = [i for i, (a, b) in enumerate(pairs) if a <= int(layer[2]) < b]
        elif (
            layer or "mtp" in name or name.startswith(("model.norm", "model.language_model.norm", "lm_head"))
        ):
            where = [last]
        elif name.endswith("embed_tokens.weight") and tied:
            where = sorted({0, last})
        else:
            where = [0]
        assert [i for i, stage in enumerate(stages) if name in stage] == where, name
        assert all(torch.equal(stages[i][name], tensor) for i in where), name


def test_the_output_head_of_a_value_model_is_on_the_last_stage_and_its_embedding_only_on_the_first() -> None:
    model = tiny_value_model(tiny_config("qwen2", tied=True), seed=3)
    config = {**model.config.to_dict(), "architectures": ["Qwen2ForTokenClassification"]}
    source = Source(bridge_for(json.dumps(config).encode()), dict(model.state_dict()))
    first, last = (source.rank(1, 0, layers=layers) for layers in ((0, 2), (2, 4)))
    assert "model.embed_tokens.weight" in first.keys() - last.keys()
    assert {"model.norm.weight", "score.weight", "score.bias"} <= last.keys() - first.keys()


@pytest.mark.parametrize("make", [gemma3_model, qwen2_5_vl_model, partial(llama4_model, 1)])
def test_the_language_model_of_one_with_images_is_cut_and_its_vision_tower_is_not(make: Any) -> None:
    bridge = real_bridge(make(tied=False).config)
    generator = torch.Generator().manual_seed(3)
    state = {name: torch.randn(shape, generator=generator) for name, shape in bridge.hugging_face.items()}
    source = Source(bridge, state)
    for rank in range(2):
        found = dict(source.slices(TensorParallel(2, rank)))
        for name, tensor in state.items():
            axis = None
            if "vision" not in name and not name.startswith("visual."):
                if re.search(r"\.(q|k|v|gate|up)_proj\.(weight|bias)$", name):
                    axis = 0
                elif re.search(r"\.(o|down)_proj\.weight$", name):
                    axis = 1
            if axis is not None:
                assert torch.equal(found[name], tensor.chunk(2, dim=axis)[rank]), name
            elif "norm" in name or "vision" in name or name.startswith("visual."):
                assert torch.equal(found[name], tensor), name


def test_a_family_whose_plan_cuts_nothing_is_refused_instead_of_giving_every_rank_everything() -> None:
    source = Source(PlainBridge(), {"transformer.h.0.attn.q.weight": torch.randn(8, 8)})
    assert source.rank(1, 0).keys() == {"transformer.h.0.attn.q.weight"}
    with pytest.raises(InvalidArgument, match=r"nothing of a plain model (.|\n)* parallel_plan"):
        source.rank(2, 0)


# -- vocabulary ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("vocabulary", "multiple"), [(128, 64), (130, 64), (131, 8), (5, 64), (130, 2)])
@pytest.mark.parametrize("size", [1, 2, 8])
def test_a_padded_vocabulary_is_zero_where_there_are_no_words(
    tied: bool, vocabulary: int, multiple: int, size: int
) -> None:
    config = tiny_config("llama", tied=tied, vocab_size=vocabulary)
    source = Source(real_bridge(config), weights_of(config))
    padded = math.ceil(vocabulary / multiple) * multiple
    if padded % size:
        with pytest.raises(InvalidArgument, match=r"embed_tokens\.weight.*cut into 8"):
            source.rank(size, 0, vocab_multiple=multiple)
        return
    for rank in range(size):
        found = source.rank(size, rank, vocab_multiple=multiple)
        # the output layer of a vocabulary that does not divide by the size cannot be cut by hand; it is set below
        output = {} if tied else {"lm_head.weight": torch.zeros(size)}
        expected = by_hand(source.state | output, 4, size, rank)
        for name in ("model.embed_tokens.weight", *(() if tied else ("lm_head.weight",))):
            whole = torch.cat([source.state[name], torch.zeros(padded - vocabulary, 64)])
            expected[name] = whole.chunk(size)[rank]
            layout = source.layout(TensorParallel(size, rank, vocab_multiple=multiple))
            assert layout.tensors[name].shape == (padded, 64)
        same(found, expected)


def test_a_vocabulary_that_does_not_divide_is_refused_with_what_to_do() -> None:
    config = tiny_config("llama", tied=False, vocab_size=130)
    source = Source(real_bridge(config), weights_of(config))
    with pytest.raises(InvalidArgument, match=r"lm_head\.weight[\s\S]*vocab_multiple"):
        source.rank(4, 0)


# -- casts ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", DTYPES)
def test_a_cast_stream_is_what_torch_casts_and_can_begin_at_any_byte(target: str) -> None:
    state = {
        f"t{i}.{name}": (torch.randn(3 + i, 7) * 10.0 ** (i - 3)).to(dtypes.parse(name).torch)
        for i in range(4)
        for name in (*DTYPES, "i64", "bool")
    }
    special = [0.0, -0.0, torch.inf, -torch.inf, 1e-45, 65519.9, 65520.0, 3.3895e38, 1.00390625, 1.01171875]
    state["special"] = torch.tensor(special, dtype=torch.float64)
    state["scalar"] = torch.tensor(1.5)
    source = Source(PlainBridge(), state)
    layout = source.layout(FullTensors())
    casting = Casting(layout, dtypes.parse(target))
    gather = partial(source.transfer(layout).gather, files=mapped_files(source.buffers))
    expected = b"".join(
        (tensor.to(dtypes.parse(target).torch) if tensor.is_floating_point() else tensor)
        .reshape(-1)
        .view(torch.uint8)
        .numpy()
        .tobytes()
        for tensor in state.values()
    )
    assert casting.layout.nbytes == len(expected)
    assert bytes(casting.gather(gather, 0, len(expected))) == expected
    chance = random.Random(1)
    for _ in range(300):
        start = chance.randrange(len(expected))
        length = chance.choice([1, 2, 3, 5, 17, 100, 1000])
        stop = min(start + length, len(expected))
        assert bytes(casting.gather(gather, start, stop - start)) == expected[start:stop]


@pytest.mark.parametrize("target", ["i64", "bool", "fp8_e4m3", "u8"])
def test_weights_are_cast_to_floating_point_only(target: str) -> None:
    source = Source(PlainBridge(), {"a": torch.randn(3)})
    with pytest.raises(InvalidArgument, match="cannot be cast"):
        Casting(source.layout(FullTensors()), dtypes.parse(target))


def test_fp8_is_not_cast_without_its_scales() -> None:
    source = Source(
        PlainBridge(), {"a.weight": torch.randn(4, 4).to(torch.float8_e4m3fn), "b": torch.randn(3)}
    )
    with pytest.raises(InvalidArgument, match=r"a\.weight.*cannot be cast"):
        Casting(source.layout(FullTensors()), dtypes.parse("bf16"))
    assert Casting(source.layout(FullTensors(("b",))), dtypes.parse("bf16")).layout.nbytes == 6


# -- requests that do not fit --------------------------------------------------------------------------------------------

BAD: dict[str, tuple[TensorParallel, str]] = {
    "rank": (TensorParallel(2, 2), "rank 2 of 2"),
    "negative rank": (TensorParallel(2, -1), "rank -1 of 2"),
    "no ranks": (TensorParallel(0, 0), "rank 0 of 0"),
    "huge": (TensorParallel(2**40, 0), "does not exist"),
    "expert rank": (TensorParallel(2, 0, experts=ExpertParallel(4, 4)), "expert-parallel rank 4 of 4"),
    "rank in an expert": (TensorParallel(2, 0, experts=ExpertParallel(4, 0, 2, 2)), "expert-tensor-parallel"),
    "no ranks in an expert": (TensorParallel(2, 0, experts=ExpertParallel(4, 0, 0, 0)), "rank 0 of 0"),
    "experts": (TensorParallel(2, 0, experts=ExpertParallel(3, 0)), r"experts: 8 experts.*3 ranks"),
    "more ranks than experts": (TensorParallel(2, 0, experts=ExpertParallel(16, 0)), "8 experts"),
    "inside experts": (TensorParallel(2, 0, experts=ExpertParallel(1, 0, 32, 0)), r"experts\.0\.w1"),
    "heads": (TensorParallel(16, 0), r"q_proj.*8 attention heads"),
    "no layers": (TensorParallel(2, 0, layers=(1, 1)), "layers 1:1"),
    "layers out of order": (TensorParallel(2, 0, layers=(2, 1)), "layers 2:1"),
    "negative layers": (TensorParallel(2, 0, layers=(-1, 1)), "layers -1:1"),
    "layers that are not there": (TensorParallel(2, 0, layers=(0, 3)), "the model has 2"),
    "multiple of 0": (TensorParallel(2, 0, vocab_multiple=0), "multiple of 0"),
    "negative multiple": (TensorParallel(2, 0, vocab_multiple=-64), "multiple of -64"),
    "huge multiple": (TensorParallel(2, 0, vocab_multiple=2**31), "multiple of 2147483648"),
}


@pytest.fixture(scope="module")
def mixtral() -> Source:
    config = moe_config("mixtral")
    return Source(real_bridge(config), weights_of(config))


@pytest.mark.parametrize("what", BAD)
def test_a_request_that_does_not_fit_is_refused(mixtral: Source, what: str) -> None:
    request, says = BAD[what]
    with pytest.raises(InvalidArgument, match=says):
        mixtral.layout(request)


def test_a_model_without_experts_cannot_spread_them() -> None:
    config = tiny_config("llama", tied=True)
    with pytest.raises(InvalidArgument, match="no experts"):
        Source(real_bridge(config), weights_of(config)).rank(2, 0, experts=ExpertParallel(2, 0))


@pytest.mark.parametrize(
    "request_",
    [
        TensorParallel(4, 3),
        TensorParallel(1, 0, experts=ExpertParallel(8, 7)),
        TensorParallel(8, 1, experts=ExpertParallel(8, 7, 4, 3), layers=(0, 61), vocab_multiple=64),
        TensorParallel(8, 1, layers=(7, 8)),
        FullTensors(("a", "b")),
        Boxes((("a", (0, 2**40), (1, 1)), ("b", (), ()))),
    ],
)
def test_a_request_comes_over_the_wire_as_it_was_made(request_: LayoutRequest) -> None:
    message = wire.request_to_proto(request_).SerializeToString()
    assert wire.request_from_proto(weight_service_pb2.LayoutRequest.FromString(message)) == request_


# -- from a service ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    with running_service(tmp_path_factory.mktemp("store")) as running:
        yield running


@pytest.fixture(scope="module")
def state(service: RunningService, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The weights of version 1."""
    config = tiny_config("qwen3", tied=False, hidden_size=256, intermediate_size=512, vocab_size=1002)
    folder = tmp_path_factory.mktemp("hf")
    model = tiny_model(config, seed=3)
    model.save_pretrained(folder)
    with TrainerClient(service.address) as trainer:
        trainer.register_model(MODEL, folder)
        trainer.push_folder(MODEL, folder).wait(timeout=60)
    return dict(model.state_dict())


@pytest.fixture
def engine(service: RunningService, state: dict[str, Tensor]) -> Iterator[EngineClient]:
    with EngineClient(service.address) as client:
        yield client


def test_a_rank_of_an_engine_pulls_its_stage_with_the_vocabulary_padded(
    engine: EngineClient, state: dict[str, Tensor]
) -> None:
    size = 4
    cut = [by_hand(state | {"lm_head.weight": torch.zeros(4)}, 4, size, rank) for rank in range(size)]
    names: list[str] = []
    for first, end in ((0, 2), (2, 4)):
        for rank in range(size):
            found = dict(
                engine.pull(MODEL, 1, TensorParallel(size, rank, layers=(first, end), vocab_multiple=64))
            )
            for name, tensor in found.items():
                if name in ("model.embed_tokens.weight", "lm_head.weight"):
                    whole = torch.cat([state[name], torch.zeros(22, 256)])
                    assert torch.equal(tensor, whole.chunk(size)[rank]), name
                else:
                    assert torch.equal(tensor, cut[rank][name]), name
        names += found
    assert sorted(names) == sorted(state)


@pytest.mark.slow
def test_a_hundred_thousand_boxes_come_in_one_pull(engine: EngineClient, state: dict[str, Tensor]) -> None:
    chance = random.Random(5)
    names = list(state)
    boxes: list[tuple[str, Sequence[int], Sequence[int]]] = []
    for _ in range(100_000):
        name = chance.choice(names)
        offset = [chance.randrange(n) for n in state[name].shape]
        extent = [chance.randint(1, min(9, n - o)) for n, o in zip(state[name].shape, offset, strict=True)]
        boxes.append((name, offset, extent))
    for dtype, count in ((None, len(boxes)), (torch.bfloat16, len(boxes) // 10)):
        pull = engine.pull(MODEL, 1, Boxes(boxes[:count]), dtype=str(dtype) if dtype else None)
        for (got, tensor), (name, offset, extent) in zip(pull, boxes[:count], strict=True):
            wanted = state[name][tuple(slice(o, o + n) for o, n in zip(offset, extent, strict=True))]
            assert got == name
            assert torch.equal(tensor, wanted.to(dtype) if dtype else wanted)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp64", "torch.bfloat16", "fp32"])
def test_a_pull_in_another_dtype_is_what_torch_casts(
    engine: EngineClient, state: dict[str, Tensor], dtype: str
) -> None:
    pull = engine.pull(MODEL, 1, dtype=dtype)
    found = dict(pull)
    assert pull.nbytes == sum(tensor.nbytes for tensor in found.values())
    same(found, {name: tensor.to(dtypes.parse(dtype).torch) for name, tensor in state.items()})


def test_a_cast_pull_resumes_in_the_middle_of_an_element(
    engine: EngineClient, state: dict[str, Tensor]
) -> None:
    request = TensorParallel(2, 1, vocab_multiple=64)
    layout = wire.request_to_proto(request)
    whole = b"".join(map(bytes, engine.pull(MODEL, 1, request, dtype="bf16").stream()))
    chance = random.Random(2)
    for offset in [
        1,
        2,
        1048575,
        1048577,
        len(whole) - 1,
        len(whole),
        *(chance.randrange(len(whole)) for _ in range(5)),
    ]:
        message = weight_service_pb2.PullRequest(
            model=MODEL, version="1", layout=layout, dtype="bf16", offset=offset
        )
        assert b"".join(piece.data for piece in _pulled(engine, message)) == whole[offset:]
    beyond = weight_service_pb2.PullRequest(
        model=MODEL, version="1", layout=layout, dtype="bf16", offset=len(whole) + 1
    )
    with pytest.raises(InvalidArgument, match="cannot begin"):
        _pulled(engine, beyond)


def _pulled(
    engine: EngineClient, message: weight_service_pb2.PullRequest
) -> list[weight_service_pb2.PullResponse]:
    """What a message is answered with, as any client of the contract gets it."""
    with RawClient(engine.server) as raw:
        found: list[weight_service_pb2.PullResponse] = raw.call(raw.weights.Pull, message)
        return found


@pytest.mark.parametrize(
    ("layout", "dtype", "says"),
    [
        (FullTensors(), "float7", "no dtype known"),
        (FullTensors(), "x" * 10_000, "no dtype known"),
        (FullTensors(), "i32", "cannot be cast"),
        (TensorParallel(4, 0), None, "vocab_multiple"),
        (TensorParallel(2, 0, layers=(0, 5)), None, "the model has 4"),
        (TensorParallel(2, 0, experts=ExpertParallel(2, 0)), None, "no experts"),
        (TensorParallel(3, 0, vocab_multiple=64), None, "embed_tokens"),
    ],
)
def test_the_service_refuses_what_does_not_fit(
    engine: EngineClient, layout: LayoutRequest, dtype: str | None, says: str
) -> None:
    with pytest.raises(InvalidArgument, match=says) as caught:
        engine.pull(MODEL, 1, layout, dtype=dtype)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "fields",
    [
        {"rank": 1},
        {"layers": {"first": 4, "end": 2}},
        {"layers": {"first": 0, "end": 2**32 - 1}},
        {"layers": {}},
        {"vocab_multiple": 0},
        {"vocab_multiple": 2**32 - 1},
        {"experts": {}},
        {"experts": {"size": 2**32 - 1, "rank": 1}},
        {"experts": {"size": 1, "tp_size": 0}},
    ],
    ids=str,
)
def test_a_message_that_no_client_of_ours_sends_is_refused_too(
    engine: EngineClient, fields: dict[str, Any]
) -> None:
    parts = weight_service_pb2.TensorParallel(**{"size": 1, **fields})
    layout = weight_service_pb2.LayoutRequest(tensor_parallel=parts)
    with pytest.raises(InvalidArgument):
        _pulled(engine, weight_service_pb2.PullRequest(model=MODEL, version="1", layout=layout))


def test_the_command_line_writes_the_file_of_a_stage(
    service: RunningService, state: dict[str, Tensor], tmp_path: Path
) -> None:
    args = [
        "pull",
        f"{MODEL}@1",
        "--out",
        str(tmp_path),
        "--server",
        service.address,
        "--json",
        "--layers",
        "2:4",
    ]
    args += ["--tp-size", "2", "--tp-rank", "1", "--vocab-multiple", "64", "--dtype", "bf16"]
    result = CliRunner().invoke(commands, args)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["files"] == ["model-tp1-of-2-layers2-4.safetensors", "config.json"]
    with safe_open(tmp_path / "model-tp1-of-2-layers2-4.safetensors", "pt") as file:
        about = file.metadata()
        assert (about["layers"], about["vocab_multiple"], about["cast_to"]) == ("2:4", "64", "bf16")
        head = torch.cat([state["lm_head.weight"], torch.zeros(22, 256)])[512:]
        assert torch.equal(file.get_tensor("lm_head.weight"), head.to(torch.bfloat16))
        assert {name.split(".")[2] for name in file.keys() if ".layers." in name} == {"2", "3"}  # noqa: SIM118
        assert json.loads(about["shards"])["lm_head.weight"] == {
            "shape": [1024, 256],
            "boxes": [{"offset": [512, 0], "extent": [512, 256]}],
        }


def test_the_command_line_writes_a_whole_folder_in_another_dtype(
    service: RunningService, state: dict[str, Tensor], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    args = ["pull", f"{MODEL}@1", "--out", str(out), "--server", service.address, "--dtype", "bf16"]
    result = CliRunner().invoke(commands, args)
    assert result.exit_code == 0, result.output
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype="auto").state_dict()
    same(loaded, {name: tensor.to(torch.bfloat16) for name, tensor in state.items()})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--layers", "4"], "like 0:16"),
        (["--layers", "-1:2"], "like 0:16"),
        (["--ep-size", "2"], "--ep-rank is missing"),
        (["--etp-rank", "0"], "--etp-size is missing"),
        (["--vocab-multiple", "0"], "--vocab-multiple"),
    ],
)
def test_the_command_line_says_how_parts_are_written(options: list[str], says: str) -> None:
    result = CliRunner().invoke(commands, ["pull", "a/b@1", "--out", "x", *options])
    assert result.exit_code == 2
    assert says in " ".join(result.stderr.split())
