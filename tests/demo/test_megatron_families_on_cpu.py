"""Are Megatron's mixtures of experts, latent attention, multi-token prediction and value heads the real thing?

They compute what transformers computes, at any parallelism. What is tested against these models rests on this.
Every job runs all families, for its start takes longer than they do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PretrainedConfig

from tests.support.megatron_ranks import RankError, run_ranks
from tests.support.reference import (
    MORE_TINY_FAMILIES,
    MtpReference,
    in_files,
    load_with_mbridge,
    tiny_config,
    tiny_model,
    tiny_value_model,
)
from weighbridge_demo.megatron_cpu import Parallel

TOLERANCE = 1e-4
VALUE_FAMILIES = ("llama", "qwen2", "qwen3")
PARALLELS = [
    Parallel(),
    Parallel(dp=2, etp=2),
    Parallel(tp=2, dp=2, ep=2),
    Parallel(pp=2, dp=2, ep=2),
    Parallel(tp=2, pp=2, ep=2, etp=1),
    Parallel(pp=2, vpp=2),
    Parallel(pp=4),
]


@dataclass(frozen=True)
class Case:
    """A model to build, its weights by Hugging Face names, and options of `build_family_model`."""

    config: PretrainedConfig
    weights: Mapping[str, Tensor]
    options: Mapping[str, Any] = field(default_factory=dict)


def _input_ids() -> Tensor:
    """int64 `[2, 12]`."""
    return torch.randint(125, (2, 12), generator=torch.Generator().manual_seed(7))


@cache
def _case(family: str, **overrides: Any) -> tuple[Case, list[Tensor]]:
    """A case, and what transformers makes of it: logits of the model and of each layer predicting further tokens."""
    config = tiny_config(family, tied=overrides.pop("tied", False), **overrides)
    model = tiny_model(config, seed=1)
    weights = in_files(model, model.state_dict())
    with torch.no_grad():
        expected = [model(_input_ids()).logits]
    if getattr(config, "num_nextn_predict_layers", 0):
        mtp = MtpReference(model, seed=2)
        weights |= mtp.tensors(model)
        expected += mtp.logits(model, _input_ids())
    return Case(config, weights), expected


def _all_cases() -> tuple[list[Case], list[list[Tensor]]]:
    pairs = [_case(family) for family in MORE_TINY_FAMILIES]
    return [case for case, _ in pairs], [expected for _, expected in pairs]


def _rank_logits(rank: int, parallel: Parallel, cases: Sequence[Case]) -> list[list[Tensor] | None]:
    from tests.support.megatron_families import build_family_model, family_logits

    found = []
    for case in cases:
        stages = [None] if parallel.vpp is None else range(parallel.vpp)
        chunks = [build_family_model(case.config, parallel, vp_stage=stage, **case.options) for stage in stages]
        for chunk in chunks:
            load_with_mbridge(chunk, case.weights, case.config)
        found.append(family_logits(chunks, _input_ids(), parallel))
    return found


def _check(parallel: Parallel, cases: Sequence[Case], expected: Sequence[Sequence[Tensor]]) -> None:
    results = run_ranks(parallel, _rank_logits, parallel, cases)
    on_last_stage = parallel.world_size // parallel.pp
    for found in results[:-on_last_stage]:
        assert found == [None] * len(cases)
    for found in results[-on_last_stage:]:
        for case, logits, reference in zip(cases, found, expected, strict=True):
            for one, other in zip(logits, reference, strict=True):
                torch.testing.assert_close(
                    one,
                    other,
                    rtol=0,
                    atol=TOLERANCE,
                    msg=lambda m, case=case: f"{case.config.model_type}: {m}",
                )


@pytest.mark.parametrize("parallel", PARALLELS, ids=str)
def test_logits_of_every_family_equal_those_of_transformers(parallel: Parallel) -> None:
    _check(parallel, *_all_cases())


def test_names_of_transformer_engine_change_nothing_but_keys() -> None:
    cases, expected = _all_cases()
    cases = [replace(case, options={"names": "te"}) for case in cases]
    _check(Parallel(tp=2, pp=2, ep=2, etp=1), cases, expected)


def test_stages_need_not_have_equally_many_layers() -> None:
    cases, expected = _all_cases()
    uneven = [replace(case, options={"num_layers_in_first_pipeline_stage": 1}) for case in cases]
    _check(Parallel(pp=2), uneven, expected)
    # Five stages of one each, the loss counting for one: the last stage has no layer but those of MTP.
    loss = [replace(case, options={"account_for_loss_in_pipeline_split": True}) for case in cases]
    _check(Parallel(pp=5), loss, expected)


def test_embeddings_may_be_tied() -> None:
    pairs = [_case(family, tied=True) for family in ("qwen3_moe", "deepseek_v3_yarn")]
    _check(Parallel(pp=2, dp=2, ep=2), [case for case, _ in pairs], [expected for _, expected in pairs])
    mtp, expected = _case("mimo", tied=True)
    _check(Parallel(tp=2), [mtp], [expected])


def test_padding_of_the_vocabulary_does_not_show_in_logits() -> None:
    pairs = [_case(family, vocab_size=125) for family in ("qwen3_moe", "deepseek_v3_mtp")]
    cases = [replace(case, options={"padded_vocab_size": 136}) for case, _ in pairs]
    _check(Parallel(tp=2, ep=2, etp=1), cases, [expected for _, expected in pairs])


def test_values_equal_those_of_transformers() -> None:
    cases, expected = [], []
    for family in VALUE_FAMILIES:
        config = tiny_config(family, tied=family == "qwen2")
        model = tiny_value_model(config, seed=3)
        without_bias = {name: tensor for name, tensor in model.state_dict().items() if name != "score.bias"}
        with torch.no_grad():
            values = model(_input_ids()).logits
        cases.append(Case(config, in_files(model, model.state_dict()), {"value_head": "weight_and_bias"}))
        cases.append(Case(config, without_bias, {"value_head": "weight"}))
        expected += [[values], [values - model.score.bias.detach()]]
    for parallel in (Parallel(), Parallel(tp=2, pp=2)):
        _check(parallel, cases, expected)


def _expert_bias_dtypes(rank: int, config: PretrainedConfig) -> set[torch.dtype]:
    from tests.support.megatron_families import build_family_model

    model = build_family_model(config, Parallel(), dtype=torch.bfloat16)
    assert all(parameter.dtype is torch.bfloat16 for parameter in model.parameters())
    return {entry.dtype for key, entry in model.sharded_state_dict().items() if key.endswith(".expert_bias")}


def test_expert_biases_stay_float32_in_a_bfloat16_model() -> None:
    for family in ("deepseek_v3_mtp", "glm4_moe"):
        found = run_ranks(Parallel(), _expert_bias_dtypes, tiny_config(family, tied=False))
        assert found == [{torch.float32}]


def _expert_keys(rank: int, parallel: Parallel, config: PretrainedConfig) -> list[dict[str, tuple[int, ...]]]:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    from tests.support.megatron_families import build_family_model

    found = []
    for grouped in (False, True):
        state = build_family_model(config, parallel, moe_grouped_gemm=grouped).sharded_state_dict()
        apply_factories(state)
        found.append(
            {entry.key: tuple(entry.global_shape) for entry in nested_values(state) if isinstance(entry, ShardedTensor)}
        )
    return found


def test_legacy_grouped_experts_have_the_keys_and_shapes_of_single_ones() -> None:
    parallel = Parallel(tp=2, dp=2, ep=2)
    for family in ("mixtral", "deepseek_v3"):
        for single, grouped in run_ranks(parallel, _expert_keys, parallel, tiny_config(family, tied=False)):
            assert grouped == single


def _replicas_with_context_parallelism(rank: int, parallel: Parallel, config: PretrainedConfig) -> int:
    from tests.support.megatron_families import build_family_model

    model = build_family_model(config, parallel)
    state = model.sharded_state_dict()
    return int(state["embedding.word_embeddings.weight"].replica_id[-1])


def test_context_parallel_ranks_are_replicas() -> None:
    parallel = Parallel(cp=2, ep=2)
    found = run_ranks(parallel, _replicas_with_context_parallelism, parallel, tiny_config("qwen3_moe", tied=False))
    assert sorted(found) == [0, 1]


def _build(rank: int, config: PretrainedConfig, parallel: Parallel) -> None:
    from tests.support.megatron_families import build_family_model

    build_family_model(config, parallel)


@pytest.mark.parametrize(
    ("family", "tied", "overrides", "parallel", "reason"),
    [
        ("qwen3_moe", False, {"attention_bias": True}, Parallel(), "attention_bias"),
        ("deepseek_v3", False, {"rope_interleave": False}, Parallel(), "rope_interleave"),
        ("deepseek_v3", False, {"num_experts_per_tok": 2}, Parallel(), "twice topk_group"),
        ("mimo", True, {}, Parallel(pp=2), "tied"),
        ("mixtral", False, {"sliding_window": 8}, Parallel(), "sliding_window"),
    ],
)
def test_a_configuration_that_cannot_be_built_faithfully_is_refused(
    family: str, tied: bool, overrides: dict[str, Any], parallel: Parallel, reason: str
) -> None:
    with pytest.raises(RankError, match=f"NotImplementedError: .*{reason}"):
        run_ranks(parallel, _build, tiny_config(family, tied=tied, **overrides), parallel)
