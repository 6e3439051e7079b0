"""HF -> service -> Megatron ranks -> push -> HF: is every bit where it belongs, at every parallelism?

The ranks change every weight before they push, so that nothing left over in a reused image could pass for pushed. A job
runs every family, one after the other, for its start takes longer than they do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from tests.support.megatron_ranks import run_ranks
from tests.support.reference import tiny_config, tiny_model
from tests.support.services import RunningService, running_service
from weighbridge import EngineClient, TensorParallel, TrainerClient
from weighbridge_demo.megatron_cpu import Parallel, build_model, forward_logits

FAMILIES = [
    ("llama", False),
    ("llama", True),
    ("llama_bias", False),
    ("qwen2", False),
    ("qwen2", True),
    ("qwen3", False),
    ("qwen3", True),
]
PARALLELS = [Parallel(tp, pp, dp) for tp, pp, dp in itertools.product((1, 2, 4), (1, 2), (1, 2))]
# how megatron-core names what it holds: layers stacked, one key a layer, and the halves of SwiGLU apart
KEYS: list[dict[str, Any] | None] = [None, {"non_homogeneous_layers": True}, {"singleton_local_shards": True}]
LANES = ["local", "grpc"]
TOLERANCE = 1e-4
PADDED_VOCABULARY = 144


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("store")
    with running_service(folder, local_socket=str(folder / "lane.sock")) as running:
        yield running


@dataclass(frozen=True)
class Imported:
    """A model's name in the service, its imported version, and the transformers model that it was made from."""

    name: str
    number: int
    model: PreTrainedModel


@pytest.fixture(scope="module")
def models(service: RunningService, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Imported]:
    """Every family's model."""
    found = {}
    with TrainerClient(service.address) as trainer:
        for family, tied in FAMILIES:
            model = tiny_model(tiny_config(family, tied=tied), seed=len(found))
            folder = tmp_path_factory.mktemp(family)
            model.save_pretrained(folder)
            name = f"tests/{family}-{'tied' if tied else 'untied'}"
            trainer.register_model(name, folder)
            number = trainer.push_folder(name, folder).wait(timeout=60).number
            found[family, tied] = Imported(name, number, model)
    return found


@dataclass(frozen=True)
class Case:
    """One model in one job, as a rank needs to know it."""

    name: str
    imported: int
    config: PretrainedConfig
    metadata: dict[str, Any] | None
    padded: int | None
    lane: str


def _cases(parallel: Parallel, models: Iterable[Imported]) -> list[Case]:
    """A job's models. Every three of family, sizes of the cut, keys, padding and lane meet in some job."""
    job = PARALLELS.index(parallel)
    return [
        Case(
            model.name,
            model.number,
            model.model.config,
            KEYS[(turn + job) % len(KEYS)],
            PADDED_VOCABULARY if (turn + job + job // 2) % 2 else None,
            LANES[(turn // 2 + job // 3) % len(LANES)],
        )
        for turn, model in enumerate(models)
    ]


def _batch(vocab_size: int) -> Tensor:
    return torch.randint(vocab_size, (2, 9), generator=torch.Generator().manual_seed(3))


def _rank(
    rank: int, address: str, run: str, parallel: Parallel, cases: Sequence[Case]
) -> list[tuple[Tensor | None, int, int]]:
    """Restore each model as a trainer does, compute, change every weight, and push."""
    found = []
    for case in cases:
        model = build_model(case.config, parallel, padded_vocab_size=case.padded)
        shards = model.sharded_state_dict(metadata=case.metadata)
        with TrainerClient(address, run=run, lane=case.lane) as trainer:
            trainer.restore(case.name, shards, version=case.imported)
            logits = forward_logits(model, _batch(case.config.vocab_size), parallel)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.neg_()
            handle = trainer.push(case.name, shards, step=1, rank=rank, world_size=parallel.world_size)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()  # the shards have been copied out: this must not be seen
            found.append((logits, handle.wait(timeout=60).number, handle.stream_bytes))
    return found


@pytest.mark.parametrize("parallel", PARALLELS, ids=lambda each: f"tp{each.tp}pp{each.pp}dp{each.dp}")
def test_weights_go_to_megatron_and_back_bit_for_bit(
    service: RunningService,
    models: dict[tuple[str, bool], Imported],
    parallel: Parallel,
    request: pytest.FixtureRequest,
) -> None:
    cases = _cases(parallel, models.values())
    results = run_ranks(parallel, _rank, service.address, request.node.name, parallel, cases)
    for index, (case, imported) in enumerate(zip(cases, models.values(), strict=True)):
        original = imported.model
        with torch.no_grad():
            expected = original(_batch(original.config.vocab_size)).logits.float()
        found = [of_rank[index] for of_rank in results]
        logits = [each for each, _, _ in found if each is not None]
        assert len(logits) == parallel.tp * parallel.dp
        for each in logits:
            assert (each - expected).abs().max() < TOLERANCE, case

        [number] = {number for _, number, _ in found}
        _assert_negated(service, case, number, original)

        whole = sum(t.numel() * t.element_size() for t in _weights(original).values())
        rows = 0 if case.padded is None else case.padded - original.config.vocab_size
        matrices = 1 if original.config.tie_word_embeddings else 2
        padding = rows * original.config.hidden_size * 4 * matrices
        # each parameter once, whatever the replicas
        assert sum(pushed for _, _, pushed in found) == whole + padding, case


def _weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The state dict, each tied tensor once, as save_pretrained writes it."""
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


def _assert_negated(service: RunningService, case: Case, number: int, original: PreTrainedModel) -> None:
    expected = {key: -tensor for key, tensor in _weights(original).items()}
    with EngineClient(service.address, lane=case.lane) as engine:
        pulled = dict(engine.pull(case.name, number))
    assert pulled.keys() == expected.keys()
    for key, tensor in pulled.items():
        assert torch.equal(tensor, expected[key]), (case, key)
    folder = Path(service.service.config.store) / "models" / case.name / "versions" / f"{number:012d}"
    loaded = _weights(AutoModelForCausalLM.from_pretrained(folder))
    assert loaded.keys() == expected.keys()
    for key, tensor in loaded.items():
        assert torch.equal(tensor, expected[key]), (case, key)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_tensor_parallel_slices_are_those_of_the_models_own_plan(
    service: RunningService, models: dict[tuple[str, bool], Imported], family: str, tied: bool, size: int
) -> None:
    """Eight heads, four key-value heads: at eight ranks each key-value head is on two of them."""
    imported = models[family, tied]
    original = imported.model
    state = _weights(original)
    with EngineClient(service.address) as engine:
        ranks = [dict(engine.pull(imported.name, imported.number, TensorParallel(size, rank))) for rank in range(size)]
    for key, whole in state.items():
        found = [rank[key] for rank in ranks]
        module = key.rpartition(".")[0].rpartition(".")[2]
        if module in ("q_proj", "gate_proj", "up_proj", "lm_head"):
            assert torch.equal(torch.cat(found), whole), key
        elif module in ("k_proj", "v_proj"):
            copies = max(size // original.config.num_key_value_heads, 1)
            assert torch.equal(torch.cat(found[::copies]), whole), key
            assert all(torch.equal(found[i], found[i - i % copies]) for i in range(size)), key
        elif module in ("o_proj", "down_proj") and whole.dim() == 2:
            assert torch.equal(torch.cat(found, dim=1), whole), key
        else:
            assert all(torch.equal(each, whole) for each in found), key
