"""Mixtures of experts, latent attention, multi-token prediction, value heads: from Hugging Face to Megatron and back?

As in `test_round_trip`, but with every family that Megatron-core can build on CPU, and every way to cut one: a folder
is imported, real ranks restore from it and compute what transformers computes, push what they hold, which is then the
folder bit for bit, change every weight, and push again. Every job runs many models, for its start takes longer than
they do; the form of Megatron's keys changes from model to model and from job to job, so that each meets each.

transformers neither computes nor saves layers of multi-token prediction: these are
`tests.support.reference.MtpReference`'s, in folders written by hand.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PretrainedConfig

from tests.support.megatron_ranks import run_ranks
from tests.support.published_families import NEMOTRON
from tests.support.reference import (
    MtpReference,
    in_files,
    make_random,
    tiny_config,
    tiny_model,
    tiny_value_model,
)
from tests.support.services import FamilyService, family_service
from weighbridge import EngineClient, TrainerClient
from weighbridge._core import dtypes
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Layout, TensorSpec
from weighbridge._formats.megatron_state import sharded_tensors
from weighbridge_demo.megatron_cpu import Parallel
from weighbridge_service.models.bridges import bridge_for
from weighbridge_service.models.megatron_layouts import all_ranks
from weighbridge_service.models.model_tensors import ModelTensors, tensors_found

TOLERANCE = 1e-4
FACTOR = -2
"""The factor by which ranks multiply every weight before the second push; exact in every dtype."""

Source = tuple[PretrainedConfig, dict[str, Tensor], list[Tensor]]
"""A config, weights by their official names, and logits of the model and of each layer predicting further tokens."""


def input_ids() -> Tensor:
    """int64 `[2, 12]`."""
    return torch.randint(120, (2, 12), generator=torch.Generator().manual_seed(7))


def language_model(family: str, *, tied: bool = False, **overrides: Any) -> Source:
    config = tiny_config(family, tied=tied, **overrides)
    model = tiny_model(config, seed=1)
    state = in_files(model, model.state_dict())
    state = {name: t for name, t in state.items() if not (tied and name == "lm_head.weight")}
    with torch.no_grad():
        logits = [model(input_ids()).logits]
    if getattr(config, "num_nextn_predict_layers", 0):
        mtp = MtpReference(model, seed=2)
        state |= mtp.tensors(model)
        logits += mtp.logits(model, input_ids())
    return config, state, logits


def token_values(family: str, *, tied: bool = False) -> Source:
    """A critic as verl saves it: `score.weight` and `score.bias`."""
    model = tiny_value_model(tiny_config(family, tied=tied), seed=3)
    model.config.architectures = [type(model).__name__]
    with torch.no_grad():
        return model.config, in_files(model, model.state_dict()), [model(input_ids()).logits]


def sequence_values(family: str) -> Source:
    """A reward model: `score.weight` alone, and transformers would read the value of the last token only."""
    config = tiny_config(family, tied=False, num_labels=1)
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").float().eval()
    make_random(model, seed=4)
    model.config.architectures = [type(model).__name__]
    with torch.no_grad():
        return model.config, in_files(model, model.state_dict()), [model.score(model.model(input_ids())[0])]


MODELS: dict[str, Callable[[], Source]] = {
    "mixtral": lambda: language_model("mixtral"),
    "qwen2_moe": lambda: language_model("qwen2_moe"),
    "qwen3_moe": lambda: language_model("qwen3_moe"),
    "qwen3_moe_tied": lambda: language_model("qwen3_moe", tied=True),
    "qwen3_moe_sparse": lambda: language_model("qwen3_moe_sparse"),
    "glm4_moe": lambda: language_model("glm4_moe"),
    "glm4_moe_mtp": lambda: language_model("glm4_moe_mtp"),
    "deepseek_v3": lambda: language_model("deepseek_v3"),
    "deepseek_v3_plain_q": lambda: language_model("deepseek_v3_plain_q"),
    "deepseek_v3_mtp1": lambda: language_model("deepseek_v3_mtp", num_nextn_predict_layers=1),
    "deepseek_v3_mtp2": lambda: language_model("deepseek_v3_mtp"),
    "deepseek_v3_mtp_tied": lambda: language_model("deepseek_v3_mtp", tied=True),
    "kimi_k2": lambda: language_model("deepseek_v3", n_group=1, topk_group=1),
    "gpt_oss": lambda: language_model("gpt_oss"),
    "mimo": lambda: language_model("mimo"),
    "mimo_tied": lambda: language_model("mimo", tied=True),
    "llama_values": lambda: token_values("llama"),
    "qwen2_values_tied": lambda: token_values("qwen2", tied=True),
    "qwen3_rewards": lambda: sequence_values("qwen3"),
    "ernie4_5_moe": lambda: language_model("ernie4_5_moe"),
    "ernie4_5_moe_tied": lambda: language_model("ernie4_5_moe", tied=True),
    "deepseek_v32": lambda: language_model("deepseek_v32"),
    "deepseek_v32_mtp": lambda: language_model("deepseek_v32_mtp"),
    "minimax_m2": lambda: language_model("minimax_m2"),
    "minimax_m2_tied": lambda: language_model("minimax_m2", tied=True),
    "qwen3_next": lambda: language_model("qwen3_next"),
    "qwen3_next_tied": lambda: language_model("qwen3_next", tied=True),
}
SAVED_AS = {"kimi_k2": "kimi_k2"}
"""The model type in config.json, where the model is made by another family's code."""
VALUE_HEADS = {
    "llama_values": "weight_and_bias",
    "qwen2_values_tied": "weight_and_bias",
    "qwen3_rewards": "weight",
}
DENSE = (*VALUE_HEADS, "mimo", "mimo_tied")
ALL = tuple(MODELS)
# megatron-core 0.16 makes no sharded state dict of stages with tied embeddings and prediction
STAGED = tuple(name for name in ALL if name not in ("mimo_tied", "deepseek_v3_mtp_tied"))
PREDICTING = ("glm4_moe_mtp", "deepseek_v3_mtp1", "deepseek_v3_mtp2", "deepseek_v32_mtp")
# how megatron-core names what it holds: layers stacked, one key a layer, and the halves of SwiGLU apart
KEYS: tuple[dict[str, Any], ...] = (
    {},
    {"non_homogeneous_layers": True},
    {"singleton_local_shards": True},
)


@dataclass(frozen=True)
class Job:
    """A training job: how it is cut, what it runs, and options of `build_family_model`."""

    parallel: Parallel
    models: Sequence[str] = ALL
    options: Mapping[str, Any] = field(default_factory=dict)
    computes: bool = True
    keys: Sequence[dict[str, Any]] = KEYS


JOBS = {
    "tp1": Job(Parallel()),
    "dp2ep2": Job(Parallel(dp=2, ep=2), tuple(name for name in ALL if name not in DENSE)),
    "dp2etp2": Job(
        Parallel(dp=2, etp=2), ("mixtral", "qwen2_moe", "qwen3_moe_sparse", "glm4_moe", "deepseek_v3_mtp1")
    ),
    "tp2ep2etp1-padded": Job(Parallel(tp=2, ep=2, etp=1), options={"padded_vocab_size": 136}),
    "tp2dp2ep2": Job(Parallel(tp=2, dp=2, ep=2), ("qwen2_moe", "qwen3_moe_tied", "deepseek_v3_mtp2")),
    "pp2dp2ep2": Job(Parallel(pp=2, dp=2, ep=2), STAGED),
    "tp2pp2ep2etp1": Job(
        Parallel(tp=2, pp=2, ep=2, etp=1), ("mixtral", "glm4_moe_mtp", "qwen2_values_tied", "mimo")
    ),
    "pp2vpp2": Job(Parallel(pp=2, vpp=2), STAGED),
    "pp2-uneven": Job(Parallel(pp=2), STAGED, {"num_layers_in_first_pipeline_stage": 1}),
    # five stages of one layer each, the loss counting for one: the last has no layer but those of prediction
    "pp5-loss": Job(Parallel(pp=5), (*PREDICTING, "qwen3_moe"), {"account_for_loss_in_pipeline_split": True}),
    # Megatron's experts in one tensor have a sharded state dict, and run on CUDA only
    "tp2dp2ep2-grouped": Job(
        Parallel(tp=2, dp=2, ep=2), ("mixtral", "qwen3_moe", "deepseek_v3"), {"moe_grouped_gemm": True}, False
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One model in one job, as a rank needs to know it."""

    name: str
    imported: int
    config: PretrainedConfig
    metadata: Mapping[str, Any]
    options: Mapping[str, Any]
    computes: bool


@dataclass(frozen=True)
class Imported:
    """A model's name in the service, its imported version, and what it was made from."""

    name: str
    number: int
    config: PretrainedConfig
    weights: dict[str, Tensor]
    logits: list[Tensor]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FamilyService]:
    with family_service(tmp_path_factory.mktemp("store")) as running:
        yield running


@pytest.fixture(scope="module")
def models(service: FamilyService, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Imported]:
    """Gives a model by its key, imported when it is first asked for."""
    found: dict[str, Imported] = {}

    def get(key: str) -> Imported:
        if key not in found:
            config, weights, logits = MODELS[key]()
            folder = tmp_path_factory.mktemp(key)
            save_folder(folder, config, weights, SAVED_AS.get(key))
            found[key] = Imported(
                f"tests/{key}", import_folder(service, f"tests/{key}", folder), config, weights, logits
            )
        return found[key]

    return get


def save_folder(
    folder: Path, config: PretrainedConfig, weights: Mapping[str, Tensor], model_type: str | None = None
) -> None:
    # copies that prediction layers have share memory with the model's own, which safetensors does not write
    save_file({name: t.clone() for name, t in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    fields = {**config.to_dict(), "model_type": model_type or config.model_type}
    (folder / "config.json").write_text(json.dumps(fields))


def import_folder(service: FamilyService, name: str, folder: Path) -> int:
    with TrainerClient(service.address) as trainer:
        trainer.register_model(name, folder)
        return trainer.push_folder(name, folder).wait(timeout=60).number


def _rank(
    rank: int, address: str, run: str, parallel: Parallel, cases: Sequence[Case]
) -> list[tuple[list[Tensor] | None, int, int]]:
    """Restore each model as a trainer does, compute, push, change every weight, and push again."""
    from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

    from tests.support.megatron_families import build_family_model, family_logits

    found = []
    with TrainerClient(address, run=run) as trainer:
        for case in cases:
            stages = [None] if parallel.vpp is None else range(parallel.vpp)
            chunks = [build_family_model(case.config, parallel, vp_stage=stage, **case.options) for stage in stages]
            with torch.no_grad():
                for tensor in weights_of(chunks):
                    tensor.fill_(torch.nan)  # what is not restored shows

            metadata = ensure_metadata_has_dp_cp_group(dict(case.metadata))
            shards = {f"model{i}": c.sharded_state_dict(metadata=metadata) for i, c in enumerate(chunks)}
            trainer.restore(case.name, shards, version=case.imported)
            assert not any(tensor.isnan().any() for tensor in weights_of(chunks))
            logits = family_logits(chunks, input_ids(), parallel) if case.computes else None
            numbers = []
            for step in (1, 2):
                handle = trainer.push(case.name, shards, step=step, rank=rank, world_size=parallel.world_size)
                with torch.no_grad():
                    for tensor in weights_of(chunks):
                        tensor.mul_(FACTOR)  # the shards have been copied out: only the next push sees it
                numbers.append(handle.wait(timeout=60).number)
            found.append((logits, *numbers))
    return found


def weights_of(chunks: Sequence[Any]) -> Iterator[Tensor]:
    for chunk in chunks:
        yield from chunk.parameters()
        yield from (buffer for name, buffer in chunk.named_buffers() if name.endswith(".expert_bias"))


@pytest.mark.parametrize("job_name", JOBS)
def test_weights_go_to_megatron_and_back_bit_for_bit(
    service: FamilyService, models: Callable[[str], Imported], job_name: str
) -> None:
    job = JOBS[job_name]
    originals = [models(key) for key in job.models]
    cases = []
    for key, original in zip(job.models, originals, strict=True):
        turn = ALL.index(key) + list(JOBS).index(job_name)
        options = {
            **job.options,
            "names": ("local", "te")[turn % 2],
            "value_head": VALUE_HEADS.get(key, "none"),
        }
        cases.append(
            Case(original.name, original.number, original.config, job.keys[turn % len(job.keys)], options, job.computes)
        )  # fmt: skip
    results = run_ranks(job.parallel, _rank, service.address, job_name, job.parallel, cases)

    on_last_stage = job.parallel.world_size // job.parallel.pp
    for index, original in enumerate(originals):
        found = [of_rank[index] for of_rank in results]
        logits = [each for each, *_ in found if each is not None]
        assert len(logits) == (on_last_stage if job.computes else 0)
        for each in logits:
            for one, other in zip(each, original.logits, strict=True):
                assert (one - other).abs().max() < TOLERANCE, original.name
        ((same, changed),) = {tuple(numbers) for _, *numbers in found}
        assert_holds(service, original.name, same, original.weights)
        assert_holds(service, original.name, changed, {n: multiplied(n, t) for n, t in original.weights.items()})


def multiplied(name: str, weight: Tensor) -> Tensor:
    """A weight of the files after ranks have multiplied their shards by `FACTOR`."""
    if name.endswith(".linear_attn.norm.weight"):  # they hold it less one
        return (weight - 1) * FACTOR + 1
    return weight * FACTOR


def assert_holds(service: FamilyService, name: str, number: int, expected: Mapping[str, Tensor]) -> None:
    """Engines pull these tensors, safetensors' own loader reads them from the version's folder, and no others."""
    with EngineClient(service.address) as engine:
        assert_same(dict(engine.pull(name, number)), expected)
    folder = service.store / "models" / name / "versions" / f"{number:012d}"
    read: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        read |= load_file(file)
    assert_same(read, expected)


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


def _rank_with_whole_down_projections(rank: int, address: str, case: Case, parallel: Parallel) -> int:
    """Restores and pushes as a rank whose layers are Transformer Engine's: the halves are put together here."""
    import torch.distributed as dist
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from tests.support.megatron_families import build_family_model

    model = build_family_model(case.config, parallel, **case.options)
    shards = model.sharded_state_dict()
    with TrainerClient(address, run="whole-down-projections") as trainer:
        trainer.restore(case.name, shards, version=case.imported)
        cut = [name for name in shards if name.endswith(("q_down_proj.weight", "kv_down_proj.weight"))]
        assert len(cut) == 2 * 6
        wholes = {}
        for name in cut:
            parts = [torch.empty_like(shards[name].data) for _ in range(parallel.tp)]
            dist.all_gather(parts, shards[name].data.detach().contiguous())
            wholes[name] = torch.cat(parts)
            key, empty = shards[name].key, torch.full_like(wholes[name], torch.nan)
            shards[name] = ShardedTensor.from_rank_offsets(key, empty, replica_id=(0, rank, 0))
        trainer.restore(case.name, shards, version=case.imported)
        assert all(torch.equal(shards[name].data, whole) for name, whole in wholes.items())
        with torch.no_grad():
            for tensor in (*weights_of([model]), *(shards[name].data for name in cut)):
                tensor.mul_(FACTOR)
        handle = trainer.push(case.name, shards, step=1, rank=rank, world_size=parallel.world_size)
        return handle.wait(timeout=60).number


def test_down_projections_of_latent_attention_may_be_whole_on_every_rank(
    service: FamilyService, models: Callable[[str], Imported]
) -> None:
    """As Transformer Engine's layer spec has them, where the local one cuts them by tensor parallelism."""
    original, parallel = models("deepseek_v3_mtp2"), Parallel(tp=2)
    case = Case(original.name, original.number, original.config, {}, {"names": "te"}, computes=False)
    (number,) = set(run_ranks(parallel, _rank_with_whole_down_projections, service.address, case, parallel))
    assert_holds(service, original.name, number, {n: t * FACTOR for n, t in original.weights.items()})


Holding = set[tuple[str, tuple[int, ...], Box, bool]]


def _holdings(rank: int, parallel: Parallel, cases: Sequence[Case]) -> list[Holding]:
    from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

    from tests.support.megatron_families import build_family_model

    found = []
    for case in cases:
        model = build_family_model(case.config, parallel, **case.options)
        metadata = ensure_metadata_has_dp_cp_group(dict(case.metadata))
        found.append(holding(sharded_tensors(model.sharded_state_dict(metadata=metadata)).layout))
    return found


def holding(layout: Layout) -> Holding:
    """Each shard's tensor, its global shape, its box, and whether it is the main replica."""
    return {
        (shard.tensor, layout.tensors[shard.tensor].shape, shard.box, shard.main)
        for shard in (placement.shard for placement in layout.placements)
        # Transformer Engine has these whole on every rank, the local layer spec cuts them
        if not shard.tensor.endswith(("linear_q_down_proj.weight", "linear_kv_down_proj.weight"))
    }


@pytest.mark.parametrize("parallel", [Parallel(tp=2, ep=2, etp=1), Parallel(tp=2, pp=2, dp=2, ep=2)], ids=str)
def test_what_ranks_are_said_to_hold_is_what_megatron_says(
    models: Callable[[str], Imported], parallel: Parallel
) -> None:
    keys = [key for key in ALL if parallel.pp == 1 or key in STAGED]
    if parallel.expert_tp > 1:
        keys.remove("gpt_oss")  # Megatron-core does not cut experts that have biases
    cases = [
        Case(key, 0, models(key).config, KEYS[1], {"names": "te", "value_head": VALUE_HEADS.get(key, "none")}, False)
        for key in keys
    ]  # fmt: skip
    results = run_ranks(parallel, _holdings, parallel, cases)
    for index, key in enumerate(keys):
        model = models(key)
        config = {**model.config.to_dict(), "model_type": SAVED_AS.get(key, model.config.model_type)}
        bridge = bridge_for(json.dumps(config).encode())
        specs = [TensorSpec(n, dtypes.from_torch(t.dtype), tuple(t.shape)) for n, t in model.weights.items()]
        tensors = tensors_found(bridge, config, specs).specs(bridge)
        sizes = {"tp": parallel.tp, "pp": parallel.pp, "ep": parallel.ep, "etp": parallel.expert_tp}
        said = all_ranks(bridge, tensors, parallel.world_size, **sizes)
        for rank, of_rank in enumerate(results):
            assert holding(said[rank]) == of_rank[index], f"{key}, rank {rank}"


def _hybrid_holding(rank: int, parallel: Parallel) -> Holding:
    from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

    from tests.support.megatron_hybrid import build_hybrid_model

    model = build_hybrid_model(NEMOTRON, parallel)
    shards = model.sharded_state_dict(metadata=ensure_metadata_has_dp_cp_group(None))
    return holding(sharded_tensors(shards).layout)


@pytest.mark.parametrize("parallel", [Parallel(tp=2, ep=2, etp=1), Parallel(tp=2, pp=2, dp=2, ep=2)], ids=str)
def test_what_ranks_of_a_hybrid_model_are_said_to_hold_is_what_megatron_says(parallel: Parallel) -> None:
    """Sections of its projections have keys of their own."""
    config = {**NEMOTRON, "model_type": "nemotron_h"}
    bridge = bridge_for(json.dumps(config).encode())
    sizes = {"tp": parallel.tp, "pp": parallel.pp, "ep": parallel.ep, "etp": parallel.expert_tp}
    specs = ModelTensors(dtypes.parse("fp32")).specs(bridge)
    said = all_ranks(bridge, specs, parallel.world_size, **sizes)
    for rank, held in enumerate(run_ranks(parallel, _hybrid_holding, parallel)):
        assert holding(said[rank]) == held, f"rank {rank}"


@pytest.mark.parametrize("family", ["deepseek_v3_mtp", "glm4_moe_mtp"])
def test_expert_biases_stay_float32_among_bfloat16_weights(service: FamilyService, tmp_path: Path, family: str) -> None:
    """As DeepSeek and GLM publish them, and as Megatron-core keeps them."""
    config, exact, _ = language_model(family)
    config.torch_dtype = torch.bfloat16
    biases = [name for name in exact if name.endswith("e_score_correction_bias")]
    assert len(biases) == 5  # three layers of the decoder, two of prediction
    weights = {name: t if name in biases else t.bfloat16() for name, t in exact.items()}
    save_folder(tmp_path, config, weights)
    name = f"tests/{family}-bf16"
    imported = import_folder(service, name, tmp_path)
    with EngineClient(service.address) as engine:
        tensors = engine.pull(name, imported).layout.tensors
        assert engine.model(name).dtype == "BF16"
    assert {spec.dtype.name for key, spec in tensors.items() if key in biases} == {"F32"}
    assert {spec.dtype.name for key, spec in tensors.items() if key not in biases} == {"BF16"}

    parallel = Parallel(tp=2, ep=2, etp=1)
    case = Case(name, imported, config, {}, {"names": "te", "dtype": torch.bfloat16}, computes=False)
    results = run_ranks(parallel, _rank, service.address, "bf16", parallel, [case])
    ((same, changed),) = {tuple(numbers) for ((_, *numbers),) in results}
    assert_holds(service, name, same, weights)
    assert_holds(service, name, changed, {key: t * FACTOR for key, t in weights.items()})
