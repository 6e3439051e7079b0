"""Does each rank of a real vLLM fetch exactly what it holds, and have the same bits as by vLLM's own loader, at once
and after updates?
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from tests.support.reference import tiny_config, tiny_model
from tests.support.services import RunningService, running_service
from tests.support.vllm_environment import HAS_KERNELS, PYTHON, environment, needs_vllm
from weighbridge import TrainerClient

pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

SECONDS = 1500
_SIZES = {"hidden_size": 256, "intermediate_size": 128, "head_dim": 32}
"""vLLM's attention on CPU wants heads of 32 at least."""
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "tied": False, **_SIZES},
    "llama_padded": {"family": "llama", "tied": False, **_SIZES, "vocab_size": 100},
    "qwen2_tied": {"family": "qwen2", "tied": True, **_SIZES},
    "qwen2_untied": {"family": "qwen2", "tied": False, **_SIZES},
    "qwen3": {"family": "qwen3", "tied": False, **_SIZES},
    "qwen3_moe": {"family": "qwen3_moe", "tied": False, **_SIZES},
    "mixtral": {"family": "mixtral", "tied": False, **_SIZES},
}
_UNMAPPED_SIZES = {
    "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 128, "vocab_size": 128,
    "max_position_embeddings": 64,
}  # fmt: skip
UNMAPPED: dict[str, dict[str, Any]] = {
    "opt": {**_UNMAPPED_SIZES, "ffn_dim": 128, "word_embed_proj_dim": 256},
    "gpt_neox": _UNMAPPED_SIZES,
    "olmo2": {**_UNMAPPED_SIZES, "num_key_value_heads": 4, "pad_token_id": 0},
    "starcoder2": {**_UNMAPPED_SIZES, "num_key_value_heads": 4},
}
MIXED = {
    "mamba2": {
        "hidden_size": 256, "num_hidden_layers": 2, "num_heads": 16, "head_dim": 32, "n_groups": 1, "state_size": 16, "vocab_size": 128,
        "tie_word_embeddings": False,
    }
}  # fmt: skip
"""Models of which a layer has both parameters that are copied and such as vLLM's loader computes."""
"""Model types without a weight map: fields of their configs."""
COMPUTED = {"gpt_neox": "attention.query_key_value."}
"""Names of tensors that the loader of some release reorders before it copies them: vLLM 0.31's does, 0.32 has no model
of its own for them.
"""
EXPERTS = ("qwen3_moe", "mixtral")
PROCESSES = ("update", "fail")
"""Jobs in which vLLM processes weights after loading."""

Job = dict[str, Any]


class Ranks:
    """Runs jobs of `tests.support.vllm_ranks` on two versions of each model."""

    def __init__(self, server: str, folders: Path) -> None:
        self._server = server
        self._folders = folders

    def run(self, tp: int, jobs: list[Job]) -> Iterator[tuple[Job, list[Any]]]:
        """For each job that can be done here, what each rank says."""
        jobs = [job for job in jobs if HAS_KERNELS or job["do"] not in PROCESSES or job["of"] not in EXPERTS]
        asked = {
            "tp": tp,
            "seconds": SECONDS,
            "work": str(self._folders),
            "jobs": [
                {
                    "server": self._server,
                    "model": f"tests/{job['of']}",
                    "folder": str(self._folders / f"{job['of']}-1"),
                    "folder2": str(self._folders / f"{job['of']}-2"),
                    **job,
                }
                for job in jobs
            ],
        }
        done = subprocess.run(
            [PYTHON, "-m", "tests.support.vllm_ranks"],
            input=json.dumps(asked),
            env={
                **environment(),
                "VLLM_LOGGING_LEVEL": "ERROR",
                "WEIGHBRIDGE_CACHE": str(self._folders / "cache"),
            },
            capture_output=True,
            text=True,
            timeout=SECONDS + 60,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        found: list[list[Any]] = json.loads(done.stdout.splitlines()[-1])  # vLLM's log goes there too
        return zip(jobs, found, strict=True)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    with running_service(tmp_path_factory.mktemp("store")) as running:
        yield running


@pytest.fixture(scope="module")
def ranks(service: RunningService, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folders = tmp_path_factory.mktemp("models")
    with TrainerClient(service.address) as trainer:
        configs = {name: tiny_config(**fields) for name, fields in MODELS.items()}
        configs |= {name: CONFIG_MAPPING[name](**fields) for name, fields in {**UNMAPPED, **MIXED}.items()}
        for name, config in configs.items():
            for number in (1, 2):
                folder = folders / f"{name}-{number}"
                tiny_model(config, seed=number).save_pretrained(folder)
                if number == 1:
                    trainer.register_model(f"tests/{name}", folder)
                trainer.push_folder(f"tests/{name}", folder, step=number).wait(timeout=60)
    return Ranks(service.address, folders)


def jobs_of(do: str, tp: int) -> list[Job]:
    """One for each model, and where there are experts, one more with experts spread over two ranks."""
    jobs = [{"do": do, "of": name} for name in (*MODELS, *UNMAPPED)]
    return jobs + [{"do": do, "of": name, "ep": True} for name in EXPERTS if tp == 2]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_rank_fetches_what_it_holds_and_has_the_bits_of_vllms_own_loader(ranks: Ranks, tp: int) -> None:
    jobs = jobs_of("load", tp)
    for job, said in ranks.run(tp, jobs):
        assert len(said) == tp
        for rank in said:
            assert rank["different"] == [], job
            assert all(COMPUTED.get(job["of"], "none") in name for name in rank["unrecorded"]), job
            most, least = 1.01 * rank["held"], 0 if rank["unrecorded"] else 0.99 * rank["held"]
            assert least <= rank["fetched"] <= most, job


@pytest.mark.parametrize("tp", [1, 2])
def test_updated_ranks_compute_as_if_they_had_been_loaded_anew(ranks: Ranks, tp: int) -> None:
    """Packed by vLLM's CPU kernels: linear layers out of sight, experts and the embedding where they lie."""
    jobs = jobs_of("update", tp)
    jobs += [{"do": "update", "of": "qwen2_tied", "dtype": "bfloat16"}]
    jobs += [{"do": "update", "of": "qwen3_moe", "dtype": "bfloat16"}]
    jobs += [{"do": "update", "of": name, "started_elsewhere": True} for name in ("qwen2_untied", "mixtral")]
    for job, said in ranks.run(tp, jobs):
        for rank in said:
            assert set(map(tuple, rank["different"].values())) == {()}, (job, rank)
            assert rank["moved"] == [], job  # a captured graph reads where it has always read
            assert rank["served"] == f"tests/{job['of']}@2"


@pytest.mark.parametrize("tp", [1, 2])
def test_layers_that_are_wrapped_for_lora_are_updated_as_others_are(ranks: Ranks, tp: int) -> None:
    jobs = [{"do": "update", "of": name, "wrapped": True} for name in ("llama", "qwen2_tied")]
    jobs += [{"do": "update", "of": "llama", "wrapped": True, "started_elsewhere": True}]
    jobs += [{"do": "update", "of": "llama", "wrapped": True, "as_loaded": True}]
    for job, said in ranks.run(tp, jobs):
        for rank in said:
            assert set(map(tuple, rank["different"].values())) == {()}, (job, rank)
            assert rank["moved"] == [], job
            assert rank["served"] == f"tests/{job['of']}@2"


def test_layers_that_compute_with_weights_as_loaded_are_filled_in_place(ranks: Ranks) -> None:
    jobs = [{"do": "update", "of": name, "as_loaded": True} for name in ("llama", "qwen2_tied", "qwen3_moe")]
    for job, [rank] in ranks.run(1, jobs):
        assert set(map(tuple, rank["different"].values())) == {()}, (job, rank)
        assert rank["moved"] == []
        anew = {name for name in rank["counts"] if "Linear" in name or "Embedding" in name}
        assert not anew, job
        # what vLLM packs for CPUs, as experts, keeps all of the model on its way of reloading
        assert rank["counts"].get("reloads", 0) == (job["of"] in EXPERTS)
        assert rank["counts"]["attention"] == rank["attention"] > 0


@pytest.mark.parametrize("tp", [1, 2])
def test_layers_that_are_quantized_while_they_load_are_quantized_before_the_pause(ranks: Ranks, tp: int) -> None:
    jobs: list[Job] = [{"do": "ahead", "of": name} for name in ("llama", "qwen2_tied")]
    jobs += [{"do": "ahead", "of": "llama", "as_loaded": True}]
    jobs += [{"do": "ahead", "of": "llama", "as_loaded": True, "special": {"1.mlp.down_proj": "Growing"}}]
    jobs += [{"do": "ahead", "of": "llama", "as_loaded": True, "special": {"2.mlp.down_proj": "Reducing"}}]
    jobs += [{"do": "ahead", "of": "llama", "share": 0.5}]
    for job, said in ranks.run(tp, jobs):
        for rank in said:
            assert set(map(tuple, rank["different"].values())) == {()}, (job, rank)
            assert rank["moved"] == []
            [reserved] = set(rank["room"])  # the same with a drafter, and when that is left again
            assert reserved > 0
            if "share" in job:
                assert all(0 < counts["replaced"] < 16 for counts in rank["counts"].values())
                assert any("fits into the reserved memory" in why for why in rank["left"].values())
                continue
            [special] = job.get("special", {"": ""}).values()
            why = {"Growing": "Growing.count", "Reducing": "it communicates with other ranks"}.get(special, "")
            assert why in rank["left"].get("RowParallelLinear", "")
            for counts in rank["counts"].values():
                assert counts["replaced"] >= 16 - bool(special)
                linear = {name: count for name, count in counts.items() if "Linear" in name}
                assert linear == ({"RowParallelLinear": 1} if special else {}), job
                if job.get("as_loaded"):
                    assert counts.get("reloads", 0) == bool(special)


def test_ranks_go_back_together_if_one_fails_in_the_middle(ranks: Ranks) -> None:
    jobs = [{"do": "fail", "of": name} for name in ("qwen2_tied", "mixtral")]
    jobs += [{"do": "fail", "of": "llama", "as_loaded": True}]
    for job, said in ranks.run(2, jobs):
        for rank in said:
            applied, prepared = rank["said"]
            assert "version 2 could not be applied; the engine is back at version 1" in applied
            assert "rank 1: RuntimeError: made up" in applied
            assert "version 1000 was not prepared, and the engine keeps version 1" in prepared
            assert (rank["served"], rank["different"]) == (f"tests/{job['of']}@1", [])


def test_sessions_of_vllms_own_worker_update_all_ranks_or_none_and_leave_the_model_whole_meanwhile(
    ranks: Ranks,
) -> None:
    [(_, said)] = ranks.run(2, [{"do": "session", "of": "llama"}])
    assert [rank["whole"] for rank in said] == [[True, True]] * 2
    assert [len(rank["said"]) for rank in said] == [0, 1]  # vLLM reads the answers up to the first refusal
    assert "version 1000" in said[1]["said"][0]
    for rank in said:
        assert (rank["served"], rank["different"]) == ("tests/llama@2", [])


def test_an_engine_that_has_renamed_its_layers_is_refused_before_anything_is_touched(ranks: Ranks) -> None:
    [(_, [said])] = ranks.run(1, [{"do": "wrap", "of": "llama"}])
    assert "1 parameter that receives weights is no longer in the model: model.layers.1.mlp.down_proj.weight" in said


def test_a_version_that_does_not_fit_the_engine_is_refused_by_what_differs(ranks: Ranks) -> None:
    jobs = [
        {"do": "refuse", "of": "llama"},
        {"do": "refuse", "of": "llama", "overrides": {"vocab_size": 256}},
        {"do": "refuse", "of": "qwen3_moe", "overrides": {"num_experts": 4}},
        {"do": "refuse", "of": "qwen3_moe", "overrides": {"num_experts": 16}},
        {"do": "refuse", "of": "llama", "without": "model.layers.1.mlp.up_proj.weight"},
        {"do": "refuse", "of": "mixtral", "without": "model.layers.2.block_sparse_moe.experts.3.w2.weight"},
        {"do": "refuse", "of": "llama", "without": "model.norm.weight"},
    ]
    [[fits], [vocabulary], [fewer], [more], [gate], [expert], [norm]] = [said for _, said in ranks.run(1, jobs)]
    assert fits == ""
    assert "vocab_size is 128, and 256 in the engine" in vocabulary
    assert "num_experts is 8, and 4 in the engine" in fewer
    assert "num_experts is 8, and 16 in the engine" in more
    assert "model.layers.1.mlp.gate_up_proj.weight: 32768 of 65536 elements" in gate
    assert "model.layers.2.block_sparse_moe.experts" in expert
    assert "model.norm.weight" in norm


def test_what_a_loader_makes_of_parameters_is_kept_while_it_is_recorded_and_made_anew_by_updates(
    ranks: Ranks,
) -> None:
    [(_, [rank])] = ranks.run(1, [{"do": "derived", "of": "llama"}])
    assert rank == {"kept": True, "right": [True, True]}


def test_a_layer_gets_what_is_copied_to_it_and_what_the_loader_computes(ranks: Ranks) -> None:
    jobs = [
        {"do": "update", "of": name, "started_elsewhere": elsewhere} for name in MIXED for elsewhere in (False, True)
    ]
    for job, [rank] in ranks.run(1, jobs):
        assert set(map(tuple, rank["different"].values())) == {()}, (job, rank)
        assert rank["moved"] == [], job
