"""HF -> service -> Megatron ranks -> push -> HF: is every bit where it belongs, at every parallelism?

The ranks change every weight before they push, so that nothing left over in a reused image could pass for pushed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from tests.megatron_ranks import run_ranks
from tests.reference import tiny_config, tiny_model
from tests.services import RunningService, running_service
from weighbridge import EngineClient, TensorParallel, TrainerClient
from weighbridge.demo.megatron_cpu import Parallel, build_model, forward_logits

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
CASES = [
    pytest.param(
        family, tied, parallel, KEYS[number % len(KEYS)], number % 2 == 1, lane,
        id=f"{family}-{'tied' if tied else 'untied'}-tp{parallel.tp}pp{parallel.pp}dp{parallel.dp}-"
        f"{next(iter(KEYS[number % len(KEYS)] or ['stacked']))}{'-padded' if number % 2 else ''}-{lane}",
    )
    for number, ((family, tied), parallel) in enumerate(itertools.product(FAMILIES, PARALLELS))
    # in turn over cuts and keys, and the other way round for the next family
    for lane in [LANES[(number // 3 + number // len(PARALLELS)) % 2]]
]  # fmt: skip
TOLERANCE = 1e-4
PADDED_VOCABULARY = 144


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("store")
    with running_service(folder, local_socket=str(folder / "lane.sock")) as running:
        yield running


@pytest.fixture(scope="module")
def models(service: RunningService, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Any]:
    """Every family's model, imported once: its name, its transformers model, and the imported version."""
    found = {}
    trainer = TrainerClient(service.address)
    for family, tied in FAMILIES:
        config = tiny_config(family, tied=tied)
        model = tiny_model(config, seed=len(found))
        folder = tmp_path_factory.mktemp(family)
        model.save_pretrained(folder)
        name = f"tests/{family}-{'tied' if tied else 'untied'}"
        trainer.register_model(name, folder)
        version = trainer.push_folder(name, folder).wait(timeout=60)
        found[family, tied] = (name, model, version.number)
    return found


def _batch(vocab_size: int) -> Tensor:
    return torch.randint(vocab_size, (2, 9), generator=torch.Generator().manual_seed(3))


def _rank(
    rank: int,
    address: str,
    name: str,
    imported: int,
    config: PretrainedConfig,
    parallel: Parallel,
    metadata: dict[str, Any] | None,
    padded: int | None,
    lane: str,
    run: str,
) -> tuple[Tensor | None, int, int]:
    """What a trainer does: restore, compute, change every weight, push."""
    model = build_model(config, parallel, padded_vocab_size=padded)
    shards = model.sharded_state_dict(metadata=metadata)
    with TrainerClient(address, run=run, lane=lane) as trainer:
        trainer.restore(name, shards, version=imported)
        logits = forward_logits(model, _batch(config.vocab_size), parallel)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.neg_()
        handle = trainer.push(name, shards, step=1, rank=rank, world_size=parallel.world_size)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()  # the shards have been copied out: this must not be seen
        return logits, handle.wait(timeout=60).number, handle.stream_bytes


@pytest.mark.parametrize(("family", "tied", "parallel", "metadata", "pad", "lane"), CASES)
def test_weights_go_to_megatron_and_back_bit_for_bit(
    service: RunningService,
    models: dict[tuple[str, bool], Any],
    family: str,
    tied: bool,
    parallel: Parallel,
    metadata: dict[str, Any] | None,
    pad: bool,
    lane: str,
    request: pytest.FixtureRequest,
) -> None:
    name, original, imported = models[family, tied]
    padded = PADDED_VOCABULARY if pad else None
    results = run_ranks(
        parallel,
        _rank,
        service.address,
        name,
        imported,
        original.config,
        parallel,
        metadata,
        padded,
        lane,
        request.node.name,
    )

    with torch.no_grad():
        expected = original(_batch(original.config.vocab_size)).logits.float()
    logits = [logits for logits, _, _ in results if logits is not None]
    assert len(logits) == parallel.tp * parallel.dp
    for found in logits:
        assert (found - expected).abs().max() < TOLERANCE

    numbers = {number for _, number, _ in results}
    assert len(numbers) == 1
    number = numbers.pop()
    _assert_negated(service, name, number, original, lane)

    whole = sum(t.numel() * t.element_size() for t in _weights(original).values())
    hidden, itemsize = original.config.hidden_size, 4
    padding = (
        (PADDED_VOCABULARY - original.config.vocab_size) * hidden * itemsize * (1 if tied else 2)
        if pad
        else 0
    )
    assert (
        sum(pushed for _, _, pushed in results) == whole + padding
    )  # each parameter once, whatever the replicas


def _weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The state dict, each tied tensor once, as save_pretrained writes it."""
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


def _assert_negated(
    service: RunningService, name: str, number: int, original: PreTrainedModel, lane: str
) -> None:
    expected = {key: -tensor for key, tensor in _weights(original).items()}
    with EngineClient(service.address, lane=lane) as engine:
        pulled = dict(engine.pull(name, number))
    assert pulled.keys() == expected.keys()
    for key, tensor in pulled.items():
        assert torch.equal(tensor, expected[key]), key
    folder = Path(service.service.config.store) / "models" / name / "versions" / f"{number:012d}"
    loaded = _weights(AutoModelForCausalLM.from_pretrained(folder))
    for key, tensor in loaded.items():
        assert torch.equal(tensor, expected[key]), key


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_tensor_parallel_slices_are_those_of_the_models_own_plan(
    service: RunningService, models: dict[tuple[str, bool], Any], family: str, tied: bool, size: int
) -> None:
    """Eight heads, four key-value heads: at eight ranks each key-value head is on two of them."""
    name, original, imported = models[family, tied]
    state = _weights(original)
    with EngineClient(service.address) as engine:
        ranks = [dict(engine.pull(name, imported, TensorParallel(size, rank))) for rank in range(size)]
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
