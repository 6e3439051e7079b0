"""Are Megatron's models on CPU the real thing?

They compute what transformers computes, at any parallelism, and they learn what it learns. Everything that is
tested against these models rests on this.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from tests.support.forked import PRELOAD
from tests.support.megatron_ranks import RankError, run_ranks
from tests.support.reference import load_with_mbridge, tiny_config, tiny_model
from tests.support.scripts import start
from weighbridge_demo.megatron_cpu import Parallel, build_model, forward_logits, train_step

MODELS = [("llama", False), ("llama_bias", False), ("qwen2", True), ("qwen3", False), ("qwen3", True)]
TOLERANCE = 1e-4
STEPS = 3


def _batch(vocab_size: int) -> tuple[Tensor, Tensor]:
    """Input ids and labels, int64 `[4, 12]`."""
    tokens = torch.randint(vocab_size, (4, 13), generator=torch.Generator().manual_seed(7))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _rank_logits(
    rank: int,
    parallel: Parallel,
    config: PretrainedConfig,
    weights: Mapping[str, Tensor],
    padded_vocab_size: int | None,
) -> Tensor | None:
    del rank
    model = build_model(config, parallel, padded_vocab_size=padded_vocab_size)
    load_with_mbridge(model, weights, config)
    return forward_logits(model, _batch(config.vocab_size)[0], parallel)


def _build(rank: int, parallel: Parallel, config: PretrainedConfig) -> None:
    del rank
    build_model(config, parallel)


def _rank_losses(
    rank: int, parallel: Parallel, config: PretrainedConfig, weights: Mapping[str, Tensor]
) -> list[float | None]:
    model = build_model(config, parallel)
    load_with_mbridge(model, weights, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data_rank = rank // parallel.tp % parallel.dp
    ids, labels = (tensor.chunk(parallel.dp)[data_rank] for tensor in _batch(config.vocab_size))
    return [train_step(model, optimizer, ids, labels, parallel) for _ in range(STEPS)]


def _reference_losses(model: PreTrainedModel) -> list[float]:
    """What transformers and torch.optim make of the same batch, on one process."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    ids, labels = _batch(model.config.vocab_size)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids).logits.flatten(0, 1), labels.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("family", "tied"), MODELS)
@pytest.mark.parametrize(
    "parallel", [Parallel(), Parallel(tp=2, pp=2), Parallel(tp=4), Parallel(pp=4)], ids=str
)
def test_logits_equal_those_of_transformers(family: str, tied: bool, parallel: Parallel) -> None:
    config = tiny_config(family, tied=tied)
    model = tiny_model(config, seed=1)
    with torch.no_grad():
        expected = model(_batch(config.vocab_size)[0]).logits
    results = run_ranks(parallel, _rank_logits, parallel, config, model.state_dict(), None)
    last_stage = results[-parallel.tp :]
    assert all(result is None for result in results[: -parallel.tp])
    for logits in last_stage:
        torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)


def test_a_configuration_that_cannot_be_built_faithfully_is_refused() -> None:
    scaled = {"rope_type": "linear", "factor": 2.0}
    with pytest.raises(RankError, match=r"NotImplementedError: .*rope_scaling"):
        run_ranks(Parallel(), _build, Parallel(), tiny_config("llama", tied=False, rope_scaling=scaled))
    with pytest.raises(RankError, match="ValueError: num_hidden_layers=3 does not divide by pp=2"):
        run_ranks(
            Parallel(pp=2), _build, Parallel(pp=2), tiny_config("llama", tied=False, num_hidden_layers=3)
        )
    with pytest.raises(RankError, match="ValueError: this rank has joined a job of"):
        run_ranks(Parallel(tp=2), _build, Parallel(pp=2), tiny_config("llama", tied=False))


def test_padding_of_the_vocabulary_does_not_show_in_logits() -> None:
    config = tiny_config("qwen2", tied=True, vocab_size=125)
    model = tiny_model(config, seed=2)
    with torch.no_grad():
        expected = model(_batch(config.vocab_size)[0]).logits
    parallel = Parallel(tp=2, pp=2)
    results = run_ranks(parallel, _rank_logits, parallel, config, model.state_dict(), 136)
    for logits in results[-parallel.tp :]:
        torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("family", "tied"), MODELS)
@pytest.mark.parametrize("parallel", [Parallel(), Parallel(tp=2, pp=2), Parallel(tp=2, dp=2)], ids=str)
def test_training_takes_the_same_path_at_every_parallelism(
    family: str, tied: bool, parallel: Parallel
) -> None:
    config = tiny_config(family, tied=tied)
    model = tiny_model(config, seed=3)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = _reference_losses(model)
    results = run_ranks(parallel, _rank_losses, parallel, config, weights)
    assert expected[-1] < expected[0]
    for losses in results[: -parallel.tp * parallel.dp]:
        assert losses == [None] * STEPS
    for losses in results[-parallel.tp * parallel.dp :]:
        assert losses == pytest.approx(expected, abs=TOLERANCE)


def _do_nothing(rank: int) -> None:
    del rank


def _fail_on_rank_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank one has had enough")
    time.sleep(60)


def _die(rank: int) -> None:
    os._exit(3 + rank)


def _hang_on_rank_one(rank: int) -> None:
    if rank == 1:
        time.sleep(60)


def _beginning(rank: int) -> tuple[set[str], int]:
    """What this process has not imported yet, and the threads of the one that it is forked from."""
    del rank
    threads = len(os.listdir(f"/proc/{os.getppid()}/task"))
    return set(PRELOAD) - sys.modules.keys(), threads


_BEGIN = """
from tests.support.megatron_ranks import run_ranks
from tests.demo.test_megatron_on_cpu import Parallel, _beginning

[(missing, threads)] = run_ranks(Parallel(), _beginning)
print(sorted(missing), threads)
"""


def test_a_rank_has_imported_what_it_needs_and_no_thread_was_lost_in_the_fork() -> None:
    # in a process of its own: the server of this one may have been started by a demo, which asks for less
    with start(_BEGIN) as process:
        assert process.communicate(timeout=120)[0] == "[] 1\n"


def test_a_failing_rank_shows_its_own_traceback_and_ends_the_others() -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)rank 1 failed.*_fail_on_rank_one.*rank one has had enough"):
        run_ranks(Parallel(tp=2), _fail_on_rank_one)
    assert time.monotonic() - started < 30


def test_a_dying_rank_is_reported() -> None:
    with pytest.raises(RankError, match="rank 0 died with exit code 3"):
        run_ranks(Parallel(), _die)


def test_a_hanging_rank_shows_where_it_hangs() -> None:
    run_ranks(Parallel(), _do_nothing)  # so that no import of the server's counts against the time below
    with pytest.raises(RankError, match=r"(?s)not done after 4 s: ranks 1.*_hang_on_rank_one"):
        run_ranks(Parallel(tp=2), _hang_on_rank_one, timeout=4)
