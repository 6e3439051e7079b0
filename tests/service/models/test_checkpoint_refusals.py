"""Is a checkpoint that is incomplete or contradicts itself refused by name, with nothing dropped in silence?

Twice: when a folder is registered and pushed, and when ranks declare what they hold. No rank runs here: what ranks of a
job would declare is `all_ranks`'s answer, spoilt in one place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.service.families.test_conventions import (
    gemma3_model,
    llama4_model,
    llama4_text_model,
    qwen2_5_vl_model,
)
from tests.support.forked import forked_python
from tests.support.reference import MtpReference, in_files, skip_if_saved_otherwise, tiny_config, tiny_model
from tests.support.services import RunningService, running_service
from weighbridge import EngineClient, TrainerClient
from weighbridge._core import dtypes
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Layout, Shard, TensorSpec
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._formats.push_sources import StagingPool, TensorSource
from weighbridge.errors import InvalidArgument, LayoutError, NotFound, WeighbridgeError
from weighbridge_service.models.bridges import bridge_for
from weighbridge_service.models.megatron_layouts import all_ranks
from weighbridge_service.models.model_tensors import tensors_found

LAYERS, EXPERTS = 4, 8
_numbers = count()


@dataclass(frozen=True)
class Folder:
    """A model's files, to be spoilt and written."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]

    def write(self, path: Path) -> Path:
        path.mkdir(parents=True, exist_ok=True)
        save_file({n: t.clone() for n, t in self.tensors.items()}, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(self.config))
        return path

    def without(self, *names: str) -> Folder:
        assert all(name in self.tensors for name in names)
        return replace(self, tensors={n: t for n, t in self.tensors.items() if n not in names})

    def having(self, name: str, tensor: Tensor) -> Folder:
        return replace(self, tensors={**self.tensors, name: tensor})

    def configured(self, **fields: Any) -> Folder:
        return replace(self, config={**self.config, **fields})


def folder_of(family: str, **overrides: Any) -> Folder:
    config = tiny_config(family, tied=overrides.pop("tied", False), **overrides)
    model = tiny_model(config, seed=1)
    tensors = in_files(model, model.state_dict())
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    if getattr(config, "num_nextn_predict_layers", 0):
        tensors |= MtpReference(model, seed=2).tensors(model)
    return Folder({**config.to_dict(), "model_type": config.model_type}, tensors)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    with running_service(tmp_path_factory.mktemp("store")) as running:
        yield running


@pytest.fixture(scope="module")
def trainer(service: RunningService) -> Iterator[TrainerClient]:
    with TrainerClient(service.address) as client:
        yield client


@pytest.fixture(scope="module")
def folders() -> Mapping[str, Folder]:
    names = ("mixtral", "qwen3_moe", "glm4_moe_mtp", "deepseek_v3_mtp", "mimo")
    return {name: folder_of(name) for name in names}


# -- folders -------------------------------------------------------------------------------------------------------------

DEEPSEEK_EXPERT = "model.layers.2.mlp.experts.5.gate_proj.weight"
MTP_TENSORS = {
    "deepseek_v3_mtp": ["model.layers.4.", "model.layers.5."],
    "glm4_moe_mtp": ["model.layers.4.", "model.layers.5."],
    "mimo": ["model.mtp_layers."],
}


def test_a_folder_without_an_expert_is_refused(
    trainer: TrainerClient, folders: Mapping[str, Folder], tmp_path: Path
) -> None:
    for family, expert in {
        "mixtral": "model.layers.1.block_sparse_moe.experts.3.",
        "qwen3_moe": "model.layers.3.mlp.experts.0.",
        "deepseek_v3_mtp": "model.layers.2.mlp.experts.7.",
    }.items():
        folder = folders[family]
        whole = [name for name in folder.tensors if name.startswith(expert)]
        assert len(whole) == 3
        for number, names in enumerate([whole[:1], whole]):
            path = folder.without(*names).write(tmp_path / f"{family}-{number}")
            refused(trainer, path, *(f"{name} is missing" for name in names))


SPOILT: dict[str, tuple[Callable[[Folder], Folder], list[str]]] = {
    "unknown tensor": (
        lambda f: f.having("model.layers.1.mlp.experts.8.up_proj.weight", torch.zeros(48, 64)),
        ["model.layers.1.mlp.experts.8.up_proj.weight F32[48, 64] is not a tensor of this deepseek_v3 model"],
    ),
    "further layer": (
        lambda f: f.having("model.layers.6.input_layernorm.weight", torch.zeros(64)),
        ["model.layers.6.input_layernorm.weight F32[64] is not a tensor"],
    ),
    "wrong shape": (
        lambda f: f.having(DEEPSEEK_EXPERT, torch.zeros(64, 48)),
        [f"{DEEPSEEK_EXPERT} F32[64, 48] has the wrong shape: config.json says [48, 64]"],
    ),
    "expert bias of another length": (
        lambda f: f.having("model.layers.1.mlp.gate.e_score_correction_bias", torch.zeros(7)),
        ["model.layers.1.mlp.gate.e_score_correction_bias F32[7] has the wrong shape"],
    ),
    "config with fewer experts": (
        lambda f: f.configured(n_routed_experts=4),
        [
            "experts.4.gate_proj.weight F32[48, 64] is not a tensor",
            "gate.weight F32[8, 64] has the wrong shape",
        ],
    ),
    "config with more experts": (
        lambda f: f.configured(n_routed_experts=16),
        ["model.layers.1.mlp.experts.8.gate_proj.weight is missing"],
    ),
    "config of more width": (
        lambda f: f.configured(hidden_size=128),
        ["model.embed_tokens.weight F32[128, 64] has the wrong shape: config.json says [128, 128]"],
    ),
    "config with another rank of the query": (
        lambda f: f.configured(q_lora_rank=None),
        ["model.layers.0.self_attn.q_proj.weight is missing", "q_a_proj.weight F32[24, 64] is not a tensor"],
    ),
    "config with more layers of prediction": (
        lambda f: f.configured(num_nextn_predict_layers=3),
        ["model.layers.6.eh_proj.weight is missing"],
    ),
    "config with fewer layers of prediction": (
        lambda f: f.configured(num_nextn_predict_layers=1),
        ["model.layers.5.eh_proj.weight F32[64, 128] is not a tensor"],
    ),
    "scale without weight": (
        lambda f: f.without(DEEPSEEK_EXPERT).having(f"{DEEPSEEK_EXPERT}_scale_inv", torch.ones(1, 1)),
        [f"{DEEPSEEK_EXPERT} is missing"],
    ),
    "scale of no tensor": (
        lambda f: f.having("model.layers.0.mlp.evil.weight_scale_inv", torch.ones(1, 1)),
        ["model.layers.0.mlp.evil.weight_scale_inv F32[1, 1] is not a tensor"],
    ),
    "scale of another shape": (
        lambda f: f.having(f"{DEEPSEEK_EXPERT}_scale_inv", torch.ones(2, 1)),
        [f"{DEEPSEEK_EXPERT}_scale_inv F32[2, 1] has the wrong shape: config.json says [1, 1]"],
    ),
    "quantised weight without scale": (
        lambda f: f.having(DEEPSEEK_EXPERT, f.tensors[DEEPSEEK_EXPERT].to(torch.float8_e4m3fn)).configured(
            quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}
        ),
        [f"{DEEPSEEK_EXPERT}_scale_inv is missing: {DEEPSEEK_EXPERT} is quantised"],
    ),
}


@pytest.mark.parametrize("what", SPOILT)
def test_a_folder_that_is_not_what_its_config_says_is_refused(
    trainer: TrainerClient, folders: Mapping[str, Folder], tmp_path: Path, what: str
) -> None:
    spoil, expected = SPOILT[what]
    refused(trainer, spoil(folders["deepseek_v3_mtp"]).write(tmp_path), *expected)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_an_output_layer_of_its_own_in_a_tied_model_is_refused_with_the_reason(
    trainer: TrainerClient, tmp_path: Path, family: str
) -> None:
    tied = folder_of(family, tied=True)
    both = tied.having("lm_head.weight", tied.tensors["model.embed_tokens.weight"] + 1)
    refused(trainer, both.write(tmp_path / "both"), "lm_head.weight", "config.json ties")
    untied = both.configured(tie_word_embeddings=False).write(tmp_path / "untied")
    assert trainer.register_model(f"tests/{family}-untied", untied).tensor_count == len(both.tensors)


@pytest.mark.parametrize("family", MTP_TENSORS)
def test_layers_of_prediction_are_there_whole_or_not_at_all(
    service: RunningService,
    trainer: TrainerClient,
    folders: Mapping[str, Folder],
    tmp_path: Path,
    family: str,
) -> None:
    folder = folders[family]
    of_prediction = [n for n in folder.tensors if n.startswith(tuple(MTP_TENSORS[family]))]
    one_missing = next(n for n in of_prediction if "mlp" in n)
    refused(trainer, folder.without(one_missing).write(tmp_path / "one"), f"{one_missing} is missing")
    one_left = folder.without(*(n for n in of_prediction if n != one_missing))
    refused(trainer, one_left.write(tmp_path / "left"), *(f"{n} is missing" for n in of_prediction[:3]))
    second = [n for n in of_prediction if n.startswith(("model.layers.5.", "model.mtp_layers.1."))]
    refused(trainer, folder.without(*second).write(tmp_path / "second"), f"{second[0]} is missing")
    copies = [n for n in of_prediction if n.endswith(("embed_tokens.weight", "shared_head.head.weight"))]
    assert len(copies) == (0 if family == "mimo" else 4)
    for copy in copies[:2]:
        refused(trainer, folder.without(copy).write(tmp_path / copy), f"{copy} is missing")

    none = folder.without(*of_prediction)
    path = none.write(tmp_path / "none")
    name = f"tests/{family}-without"
    trainer.register_model(name, path)
    number = trainer.push_folder(name, path).wait(timeout=60).number
    with EngineClient(service.address) as engine:
        assert_same(dict(engine.pull(name, number)), none.tensors)


def test_a_folder_is_compared_with_the_registered_model(
    trainer: TrainerClient, folders: Mapping[str, Folder], tmp_path: Path
) -> None:
    """Registered by a whole folder, or by one without layers of prediction, and pushed from another."""
    folder = folders["deepseek_v3_mtp"]
    of_prediction = [n for n in folder.tensors if n.startswith(("model.layers.4.", "model.layers.5."))]
    whole = folder.write(tmp_path / "whole")
    without = folder.without(*of_prediction).write(tmp_path / "without")
    trainer.register_model("tests/whole", whole)
    trainer.register_model("tests/without", without)
    less = folder.without(DEEPSEEK_EXPERT).write(tmp_path / "less")
    for model, path, expected in (
        ("tests/whole", less, f"{DEEPSEEK_EXPERT} F32[48, 64] is missing"),
        ("tests/whole", without, "model.layers.4.embed_tokens.weight F32[128, 64] is missing"),
        ("tests/without", whole, "model.layers.4.eh_proj.weight: the model has no such tensor"),
    ):
        with pytest.raises(LayoutError) as error:
            trainer.push_folder(model, path)
        assert_named(error.value, folder.tensors)
        if path == less:
            assert expected in str(error.value)
        with pytest.raises(NotFound):
            trainer.version(model, "live")


def refused(trainer: TrainerClient, path: Path, *expected: str) -> None:
    """Registration is refused by name, and nothing is registered."""
    name = f"tests/refused-{next(_numbers)}"
    with pytest.raises(InvalidArgument) as error:
        trainer.register_model(name, path)
    for text in expected:
        assert text in str(error.value), error.value
    with pytest.raises(NotFound):
        trainer.model(name)


def assert_named(error: WeighbridgeError, names: Mapping[str, Any]) -> None:
    assert error.details
    *lines, last = error.details
    assert all(line.split()[0].rstrip(":") in names for line in lines), error
    assert last.split()[0].rstrip(":") in names or re.fullmatch(r"and \d+ more", last), error


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


# -- ranks ---------------------------------------------------------------------------------------------------------------

Ranks = dict[int, Layout]
STAGE_1 = (2, 3)
"""Ranks of the second stage: there are two stages with two layers each."""


@pytest.fixture(scope="module")
def ranks(trainer: TrainerClient, folders: Mapping[str, Folder], tmp_path_factory: Any) -> Ranks:
    """The layouts of four ranks of the registered `tests/ranks`: TP 2, PP 2, EP 2."""
    folder = folders["deepseek_v3_mtp"]
    trainer.register_model("tests/ranks", folder.write(tmp_path_factory.mktemp("ranks")))
    config = json.dumps(folder.config).encode()
    bridge = bridge_for(config)
    found = [TensorSpec(n, dtypes.from_torch(t.dtype), tuple(t.shape)) for n, t in folder.tensors.items()]
    tensors = tensors_found(bridge, folder.config, found).specs(bridge)
    return all_ranks(bridge, tensors, 4, tp=2, pp=2, ep=2)


def shards_in(layout: Layout) -> list[Shard]:
    return [placement.shard for placement in layout.placements]


def changed(layout: Layout, edit: Callable[[Shard], Shard | None], *further: TensorSpec) -> Layout:
    """The layout with each shard edited, or taken out where there is None; further tensors are held whole."""
    kept = [shard for shard in map(edit, shards_in(layout)) if shard is not None]
    kept += [Shard(spec.name, Box.whole(spec.shape)) for spec in further]
    specs = {**layout.tensors, **{spec.name: spec for spec in further}}
    return Layout.stream([specs[name] for name in dict.fromkeys(s.tensor for s in kept)], kept)


def resized(layout: Layout, tensor: str, shape: tuple[int, ...]) -> Layout:
    """The layout with another global shape of one tensor."""
    specs = {n: replace(s, shape=shape) if n == tensor else s for n, s in layout.tensors.items()}
    kept = [s for s in shards_in(layout) if s.box.fits(specs[s.tensor].shape)]
    return Layout.stream([specs[name] for name in dict.fromkeys(s.tensor for s in kept)], kept)


def everywhere(ranks: Ranks, edit: Callable[[Shard], Shard | None]) -> Ranks:
    return {rank: changed(layout, edit) for rank, layout in ranks.items()}


def without(ranks: Ranks, *names: str) -> Ranks:
    """The ranks without tensors that are called, or begin, like this."""
    assert any(shard.tensor.startswith(names) for layout in ranks.values() for shard in shards_in(layout))
    return everywhere(ranks, lambda shard: None if shard.tensor.startswith(names) else shard)


def held_also(ranks: Ranks, rank: int, *specs: TensorSpec) -> Ranks:
    return {**ranks, rank: changed(ranks[rank], lambda shard: shard, *specs)}


def spec_of(name: str, *shape: int, dtype: str = "fp32") -> TensorSpec:
    return TensorSpec(name, dtypes.parse(dtype), shape)


FC1, FC2 = (f"decoder.layers.2.mlp.experts.experts.linear_fc{n}.weight" for n in (1, 2))
NORM = "decoder.layers.1.input_layernorm.weight"
BIAS = "decoder.layers.3.mlp.router.expert_bias"

DECLARED: dict[str, tuple[Callable[[Ranks], Ranks], list[str]]] = {
    # how ranks are spoilt, and what the error has to name
    "an expert is missing": (
        lambda r: everywhere(r, lambda s: None if s.tensor in (FC1, FC2) and s.box.offset[0] == 5 else s),
        [
            "model.layers.2.mlp.experts.5.gate_proj.weight F32[48, 64]: box [0:48, 0:64] has no source",
            "model.layers.2.mlp.experts.5.up_proj.weight F32[48, 64]: box [0:48, 0:64] has no source",
            "model.layers.2.mlp.experts.5.down_proj.weight F32[64, 48]: box [0:64, 0:48] has no source",
        ],
    ),
    "up projections of an expert are missing": (
        lambda r: everywhere(
            r, lambda s: None if s.tensor == FC1 and s.box.offset[0] == 5 and s.box.offset[1] >= 48 else s
        ),
        ["model.layers.2.mlp.experts.5.up_proj.weight F32[48, 64]: box [0:48, 0:64] has no source"],
    ),
    "all experts of a layer are missing": (
        lambda r: without(r, "decoder.layers.2.mlp.experts."),
        ["24 parts", "model.layers.2.mlp.experts.0.gate_proj.weight F32[48, 64]: box [0:48, 0:64] has no source"],
    ),
    "a rank brings less": (
        lambda r: {**r, 3: changed(r[3], lambda s: None if s.tensor.startswith("mtp") else s)},
        ["model.layers.4.", "has no source"],
    ),
    "a stage is missing": (
        lambda r: {rank: layout for rank, layout in r.items() if rank not in STAGE_1},
        ["model.layers.2.", "has no source"],
    ),
    "an expert bias is missing": (
        lambda r: without(r, BIAS),
        ["model.layers.3.mlp.gate.e_score_correction_bias F32[8]: box [0:8] has no source"],
    ),
    "one layer of prediction is missing": (
        lambda r: without(r, "mtp.layers.1."),
        ["model.layers.5.", "has no source"],
    ),
    "one tensor of prediction is missing": (
        lambda r: without(r, "mtp.layers.0.eh_proj.weight"),
        ["1 part of a tensor is not covered exactly once", "model.layers.4.eh_proj.weight F32[64, 128]: box [0:64, 0:128] has no source"],
    ),
    "all layers of prediction are missing": (
        lambda r: without(r, "mtp."),
        ["model.layers.4.", "has no source"],
    ),
    "the embedding is missing, and its copies": (
        lambda r: without(r, "embedding."),
        [
            f"{name}.weight F32[128, 64]: box [0:128, 0:64] has no source"
            for name in ("model.embed_tokens", "model.layers.4.embed_tokens", "model.layers.5.embed_tokens")
        ],
    ),
    "two stages hold one layer": (
        lambda r: held_also(r, 2, spec_of(NORM, 64)),
        [f"{NORM} F32[64]: box [0:64] is held by rank 0, 1, 2, 2 of them as main replica"],
    ),
    "a layer by itself and among stacked ones": (
        lambda r: held_also(r, 2, spec_of("decoder.layers.input_layernorm.weight", LAYERS, 64)),
        ["model.layers.0.input_layernorm.weight F32[64]: box [0:64] would be written twice"],
    ),
    "an expert by itself and among others": (
        lambda r: held_also(
            r, 2, spec_of("decoder.layers.2.mlp.experts.experts.5.linear_fc2.weight", 64, 48)
        ),
        ["model.layers.2.mlp.experts.5.down_proj.weight F32[64, 48]: box [0:64, 0:48] would be written twice"],
    ),
    "a norm by the names of two layer specs": (
        lambda r: held_also(r, 0, spec_of("decoder.layers.1.mlp.linear_fc1.layer_norm_weight", 64)),
        ["model.layers.1.post_attention_layernorm.weight F32[64]: box [0:64] would be written twice"],
    ),
    "an unknown key": (
        lambda r: held_also(r, 0, spec_of("decoder.layers.0.mlp.evil.weight", 3)),
        ["decoder.layers.0.mlp.evil.weight F32[3] is not a tensor of this deepseek_v3 model"],
    ),
    "an optimizer state": (
        lambda r: held_also(r, 0, spec_of("optimizer.state.exp_avg.decoder.final_layernorm.weight", 64)),
        ["optimizer.state.exp_avg.decoder.final_layernorm.weight F32[64] is not a tensor"],
    ),
    "a layer too many": (
        lambda r: held_also(r, 2, spec_of("decoder.layers.4.input_layernorm.weight", 64)),
        ["decoder.layers.4.input_layernorm.weight F32[64] is not a tensor"],
    ),
    "a layer of prediction too many": (
        lambda r: held_also(r, 2, spec_of("mtp.layers.2.enorm.weight", 64)),
        ["mtp.layers.2.enorm.weight F32[64] is not a tensor"],
    ),
    "experts where the model is dense": (
        lambda r: held_also(r, 0, spec_of("decoder.layers.0.mlp.router.weight", EXPERTS, 64)),
        ["decoder.layers.0.mlp.router.weight F32[8, 64] is not a tensor"],
    ),
    "fewer experts than the model has": (
        lambda r: {rank: resized(layout, FC2, (EXPERTS - 1, 64, 48)) for rank, layout in r.items()},
        [f"{FC2} F32[7, 64, 48] is not a tensor"],
    ),
    "more experts than the model has": (
        lambda r: {rank: resized(layout, FC2, (EXPERTS + 1, 64, 48)) for rank, layout in r.items()},
        [f"{FC2} F32[9, 64, 48] is not a tensor"],
    ),
    "fewer stacked layers than the model has": (
        lambda r: held_also(
            without(r, *(f"decoder.layers.{n}.input_layernorm." for n in range(LAYERS))),
            0,
            spec_of("decoder.layers.input_layernorm.weight", LAYERS - 1, 64),
        ),
        ["decoder.layers.input_layernorm.weight F32[3, 64] is not a tensor"],
    ),
    "stacked layers of which some are of another kind": (
        lambda r: held_also(r, 0, spec_of("decoder.layers.mlp.router.weight", LAYERS, EXPERTS, 64)),
        ["decoder.layers.mlp.router.weight F32[4, 8, 64] is not a tensor"],
    ),
    "half of a tensor that has no halves": (
        lambda r: held_also(r, 0, spec_of("decoder.layers.0.self_attention.linear_proj.weight_w", 32, 128)),
        ["decoder.layers.0.self_attention.linear_proj.weight_w F32[32, 128] is not a tensor"],
    ),
    "one half alone": (
        lambda r: held_also(
            without(r, "decoder.layers.0.mlp.linear_fc1.weight"),
            0,
            spec_of("decoder.layers.0.mlp.linear_fc1.weight_w", 96, 64),
        ),
        ["model.layers.0.mlp.up_proj.weight F32[96, 64]: box [0:96, 0:64] has no source"],
    ),
    "an expert bias in another dtype": (
        lambda r: held_also(without(r, BIAS), 2, spec_of(BIAS, EXPERTS, dtype="bf16")),
        [f"{BIAS} BF16[8] has the wrong dtype: the model is registered with F32 there"],
    ),
    "another shape": (
        lambda r: held_also(without(r, BIAS), 2, spec_of(BIAS, EXPERTS + 1)),
        [f"{BIAS} F32[9] has the wrong shape: the model's is [8]"],
    ),
}  # fmt: skip


def test_what_all_ranks_hold_is_taken(service: RunningService, trainer: TrainerClient, ranks: Ranks) -> None:
    """Or the refusals below would prove nothing."""
    errors = declare(service.address, "tests/ranks", ranks)
    assert errors == []


@pytest.mark.parametrize("what", DECLARED)
def test_ranks_that_do_not_hold_the_model_are_refused(
    service: RunningService, trainer: TrainerClient, ranks: Ranks, what: str
) -> None:
    spoil, expected = DECLARED[what]
    spoilt = spoil(ranks)
    before = {v.number for v in trainer.versions("tests/ranks")}
    errors = declare(service.address, "tests/ranks", spoilt)
    assert len(errors) == len(spoilt)
    told = [str(error) for error in errors if isinstance(error, LayoutError)]
    assert told
    for text in expected:
        assert all(text in each for each in told), told[0]
    assert {v.number for v in trainer.versions("tests/ranks")} == before


def test_layers_of_prediction_that_the_model_was_registered_without_are_refused(
    service: RunningService,
    trainer: TrainerClient,
    folders: Mapping[str, Folder],
    ranks: Ranks,
    tmp_path: Path,
) -> None:
    folder = folders["deepseek_v3_mtp"]
    of_prediction = [n for n in folder.tensors if n.startswith(("model.layers.4.", "model.layers.5."))]
    trainer.register_model("tests/plain", folder.without(*of_prediction).write(tmp_path))
    assert declare(service.address, "tests/plain", without(ranks, "mtp.")) == []
    errors = declare(service.address, "tests/plain", ranks)
    assert len(errors) == len(ranks)
    assert any("mtp.layers.0.enorm.weight F32[64] is not a tensor of this deepseek_v3" in str(e) for e in errors)


def declare(address: str, name: str, layouts: Ranks) -> list[WeighbridgeError]:
    """Push zeros with these layouts; the errors of the refused ranks."""
    run = f"run-{next(_numbers)}"

    def push(rank: int) -> WeighbridgeError | None:
        layout = layouts[rank]
        held = [
            torch.zeros(placement.shard.box.extent, dtype=layout.tensors[placement.shard.tensor].dtype.torch)
            for placement in layout.placements
        ]
        shards = TensorSource(StagingPool(), layout, held)
        with TrainerClient(address, run=run) as client:
            try:
                handle = client.push_shards(
                    name, layout, TensorSpace.MEGATRON, shards, step=1, rank=rank, world_size=len(layouts)
                )
                handle.wait(timeout=60)
            except WeighbridgeError as error:
                return error
        return None

    with ThreadPoolExecutor(len(layouts)) as pool:
        return [error for error in pool.map(push, sorted(layouts)) if error is not None]


# -- tied and untied -----------------------------------------------------------------------------------------------------

TEXT_FAMILIES = (
    *("llama", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v3", "mimo"),
    *("glm4_moe_mtp", "deepseek_v3_mtp"),
)


def tied_or_not(family: str, tied: bool, path: Path) -> dict[str, Tensor]:
    """A saved model and its tensors."""
    if family in TEXT_FAMILIES:
        folder_of(family, tied=tied).write(path)
    else:
        make: Callable[[], Any] = {
            "gemma3": lambda: gemma3_model(tied),
            "qwen2_5_vl": lambda: qwen2_5_vl_model(tied),
            "llama4_text": lambda: llama4_text_model(2, tied),
            "llama4": lambda: llama4_model(2, tied),
        }[family]
        make().save_pretrained(path)
    return load_file(path / "model.safetensors")


@pytest.mark.parametrize("family", [*TEXT_FAMILIES, "gemma3", "qwen2_5_vl", "llama4_text", "llama4"])
def test_a_tied_and_an_untied_model_of_one_family_live_side_by_side(
    service: RunningService, trainer: TrainerClient, tmp_path: Path, family: str
) -> None:
    skip_if_saved_otherwise(family)
    stored: dict[str, dict[str, Tensor]] = {}
    for tied in (False, True):
        path, name = tmp_path / str(tied), f"tests/{family}-{tied}"
        stored[name] = tied_or_not(family, tied, path)
        assert any("lm_head" in n for n in stored[name]) is not tied
        trainer.register_model(name, path)
        # a first push by shards: the map, too, must know whether there is an output layer
        config = json.loads((path / "config.json").read_text())
        bridge = bridge_for((path / "config.json").read_bytes())
        assert any(n.endswith("output_layer.weight") for n in bridge.megatron) is not tied
        found = [TensorSpec(n, dtypes.from_torch(t.dtype), tuple(t.shape)) for n, t in stored[name].items()]
        layouts = all_ranks(bridge, tensors_found(bridge, config, found).specs(bridge), 2, pp=2)
        assert declare(service.address, name, layouts) == []
    with EngineClient(service.address) as engine:
        for tied in (False, True):
            name = f"tests/{family}-{tied}"
            number = trainer.push_folder(name, tmp_path / str(tied)).wait(timeout=60).number
            assert_same(dict(engine.pull(name, number)), stored[name])


# -- a family of another package -----------------------------------------------------------------------------------------

OTHER_FAMILY = '''
"""A family that Weighbridge does not have: llama with its gated projections the other way round."""

from weighbridge_service.families.family import Family
from weighbridge_service.families.rules import WHOLE, GroupedQKV, Halves, Rule


class Upside(Family):
    transformers_type = "llama"

    def rules(self):
        here, there = "decoder.layers.{layer}", "model.layers.{layer}"
        qkv = tuple(f"{there}.self_attn.{p}_proj.weight" for p in "qkv")
        up_gate = (f"{there}.mlp.up_proj.weight", f"{there}.mlp.gate_proj.weight")
        norm, norm2 = f"{there}.input_layernorm.weight", f"{there}.post_attention_layernorm.weight"
        return [
            Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), WHOLE, vocabulary=True),
            Rule("decoder.final_layernorm.weight", ("model.norm.weight",), WHOLE),
            Rule("output_layer.weight", ("lm_head.weight",), WHOLE, vocabulary=True),
            Rule(f"{here}.self_attention.linear_qkv.weight", qkv, GroupedQKV(*self.head_counts())),
            Rule(f"{here}.self_attention.linear_proj.weight", (f"{there}.self_attn.o_proj.weight",), WHOLE),
            Rule(f"{here}.self_attention.linear_qkv.layer_norm_weight", (norm,), WHOLE),
            Rule(f"{here}.mlp.linear_fc1.layer_norm_weight", (norm2,), WHOLE),
            Rule(f"{here}.mlp.linear_fc1.weight", up_gate, Halves(), halves=True),
            Rule(f"{here}.mlp.linear_fc2.weight", (f"{there}.mlp.down_proj.weight",), WHOLE),
        ]
'''
OTHER_TRAINER = '''
"""Registers, pushes from one rank, and pulls."""

import sys
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from safetensors.torch import load_file

from tests.support.services import running_service
from weighbridge import EngineClient, TrainerClient
from weighbridge_service.families import model_types

folder = Path(sys.argv[1])
weights = load_file(folder / "model.safetensors")
assert "upside" in model_types() and "llama" in model_types()


def stacked(parts):
    for layer in range(4):
        yield torch.cat([weights[f"model.layers.{layer}.{part}.weight"] for part in parts])


def grouped():
    for layer in range(4):
        q, k, v = (weights[f"model.layers.{layer}.self_attn.{p}_proj.weight"].chunk(4) for p in "qkv")
        yield torch.cat([t for group in zip(q, k, v) for t in group])


held = {
    "embedding.word_embeddings.weight": weights["model.embed_tokens.weight"],
    "decoder.final_layernorm.weight": weights["model.norm.weight"],
    "output_layer.weight": weights["lm_head.weight"],
}
of_layers = {
    "self_attention.linear_qkv.weight": grouped(),
    "self_attention.linear_proj.weight": stacked(["self_attn.o_proj"]),
    "self_attention.linear_qkv.layer_norm_weight": stacked(["input_layernorm"]),
    "mlp.linear_fc1.layer_norm_weight": stacked(["post_attention_layernorm"]),
    "mlp.linear_fc1.weight": stacked(["mlp.up_proj", "mlp.gate_proj"]),
    "mlp.linear_fc2.weight": stacked(["mlp.down_proj"]),
}
for name, tensors in of_layers.items():
    held |= {f"decoder.layers.{layer}.{name}": tensor for layer, tensor in enumerate(tensors)}
shards = {key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in held.items()}

with running_service(folder / "store") as running:
    trainer, engine = TrainerClient(running.address), EngineClient(running.address)
    trainer.register_model("acme/upside", folder)
    trainer.push("acme/upside", shards, step=1, rank=0, world_size=1).wait(timeout=60)
    pulled = dict(engine.pull("acme/upside"))
    assert pulled.keys() == weights.keys()
    assert all(torch.equal(pulled[name], tensor) for name, tensor in weights.items())
    for shard in shards.values():
        shard.data.fill_(torch.nan)
    trainer.restore("acme/upside", shards)
    fc1 = shards["decoder.layers.1.mlp.linear_fc1.weight"].data
    assert torch.equal(fc1[:96], weights["model.layers.1.mlp.up_proj.weight"])
print("all of it came back")
'''


def test_a_package_beside_this_one_can_bring_a_family(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    info = packages / "upside-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: upside\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[weighbridge.families]\nupside = upside_family:Upside\n")
    (packages / "upside_family.py").write_text(OTHER_FAMILY)
    folder = folder_of("llama").configured(model_type="upside").write(tmp_path / "model")
    program = f"import sys; sys.path.insert(0, {str(packages)!r})\n{OTHER_TRAINER}"
    with forked_python("-c", program, str(folder)) as process:
        assert "all of it came back" in process.stdout.read()
        assert process.wait(60) == 0
