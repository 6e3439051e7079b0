"""Are Megatron's models on CPU the real thing?

They compute what transformers computes, at any parallelism, and they learn what it learns. Everything that is
tested against these models rests on this. A job runs all of them, one after the other, for its start takes longer
than they do.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from tests.support.forked import PRELOAD, run_jobs
from tests.support.megatron_ranks import RankError, run_ranks
from tests.support.reference import load_with_mbridge, tiny_config, tiny_model
from weighbridge_demo.megatron_cpu import Parallel, build_model, forward_logits, train_step
from weighbridge_demo.ranks import Job, gloo_job

MODELS = [("llama", False), ("llama_bias", False), ("qwen2", True), ("qwen3", False), ("qwen3", True)]
TOLERANCE = 1e-4
STEPS = 3


def _batch(vocab_size: int) -> tuple[Tensor, Tensor]:
    """Input ids and labels, int64 `[4, 12]`."""
    tokens = torch.randint(vocab_size, (4, 13), generator=torch.Generator().manual_seed(7))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


Case = tuple[PretrainedConfig, Mapping[str, Tensor]]
"""A model to build, and its weights by Hugging Face names."""


def _models(seed: int) -> list[PreTrainedModel]:
    return [tiny_model(tiny_config(family, tied=tied), seed=seed) for family, tied in MODELS]


def _case(model: PreTrainedModel) -> Case:
    return model.config, {name: tensor.clone() for name, tensor in model.state_dict().items()}


def _rank_logits(
    rank: int, parallel: Parallel, cases: Sequence[Case], padded_vocab_size: int | None
) -> list[Tensor | None]:
    del rank
    found = []
    for config, weights in cases:
        model = build_model(config, parallel, padded_vocab_size=padded_vocab_size)
        load_with_mbridge(model, weights, config)
        found.append(forward_logits(model, _batch(config.vocab_size)[0], parallel))
    return found


def _build(rank: int, parallel: Parallel, config: PretrainedConfig) -> None:
    del rank
    build_model(config, parallel)


def _rank_losses(rank: int, parallel: Parallel, cases: Sequence[Case]) -> list[list[float | None]]:
    data_rank = rank // parallel.tp % parallel.dp
    found = []
    for config, weights in cases:
        model = build_model(config, parallel)
        load_with_mbridge(model, weights, config)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        ids, labels = (tensor.chunk(parallel.dp)[data_rank] for tensor in _batch(config.vocab_size))
        found.append([train_step(model, optimizer, ids, labels, parallel) for _ in range(STEPS)])
    return found


def _reference_losses(model: PreTrainedModel) -> list[float]:
    """The losses of transformers and torch.optim on the same batch, in one process."""
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


def _check_logits(parallel: Parallel, models: Sequence[PreTrainedModel], padded_vocab_size: int | None) -> None:
    cases = [_case(model) for model in models]
    results = run_ranks(parallel, _rank_logits, parallel, cases, padded_vocab_size)
    assert all(found == [None] * len(models) for found in results[: -parallel.tp])
    for index, model in enumerate(models):
        with torch.no_grad():
            expected = model(_batch(model.config.vocab_size)[0]).logits
        for found in results[-parallel.tp :]:
            torch.testing.assert_close(
                found[index],
                expected,
                rtol=0,
                atol=TOLERANCE,
                msg=lambda m, index=index: f"{MODELS[index]}: {m}",
            )


@pytest.mark.parametrize("parallel", [Parallel(), Parallel(tp=2, pp=2), Parallel(tp=4), Parallel(pp=4)], ids=str)
def test_logits_of_every_model_equal_those_of_transformers(parallel: Parallel) -> None:
    _check_logits(parallel, _models(seed=1), None)


def test_a_configuration_that_cannot_be_built_faithfully_is_refused() -> None:
    scaled = {"rope_type": "linear", "factor": 2.0}
    with pytest.raises(RankError, match=r"NotImplementedError: .*rope_scaling"):
        run_ranks(Parallel(), _build, Parallel(), tiny_config("llama", tied=False, rope_scaling=scaled))
    with pytest.raises(RankError, match="ValueError: num_hidden_layers=3 does not divide by pp=2"):
        run_ranks(Parallel(pp=2), _build, Parallel(pp=2), tiny_config("llama", tied=False, num_hidden_layers=3))
    with pytest.raises(RankError, match="ValueError: this rank has joined a job of"):
        run_ranks(Parallel(tp=2), _build, Parallel(pp=2), tiny_config("llama", tied=False))


def test_padding_of_the_vocabulary_does_not_show_in_logits() -> None:
    model = tiny_model(tiny_config("qwen2", tied=True, vocab_size=125), seed=2)
    _check_logits(Parallel(tp=2, pp=2), [model], 136)


@pytest.mark.parametrize("parallel", [Parallel(), Parallel(tp=2, pp=2), Parallel(tp=2, dp=2)], ids=str)
def test_training_of_every_model_takes_the_same_path_at_every_parallelism(parallel: Parallel) -> None:
    models = _models(seed=3)
    results = run_ranks(parallel, _rank_losses, parallel, [_case(model) for model in models])
    on_last_stage = parallel.tp * parallel.dp
    for index, model in enumerate(models):
        expected = _reference_losses(model)
        assert expected[-1] < expected[0], MODELS[index]
        for found in results[:-on_last_stage]:
            assert found[index] == [None] * STEPS, MODELS[index]
        for found in results[-on_last_stage:]:
            assert found[index] == pytest.approx(expected, abs=TOLERANCE), MODELS[index]


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
    """The preloaded modules that this process lacks, and the number of threads of its parent."""
    del rank
    threads = len(os.listdir(f"/proc/{os.getppid()}/task"))
    return set(PRELOAD) - sys.modules.keys(), threads


def test_a_rank_has_imported_what_it_needs_and_no_thread_was_lost_in_the_fork() -> None:
    # the first request for the fork server of this process has preloaded all that tests need
    assert run_ranks(Parallel(), _beginning) == [(set(), 1)]


@contextmanager
def _last_joins_late(joined: Path, rank: int, store_path: str) -> Iterator[None]:
    """Join a gloo job of two ranks; the second joins a while after the first, and marks that in a file."""
    join = dist.init_process_group

    def slowly(*args: Any, **settings: Any) -> None:
        join(*args, **settings)
        if rank == 1:
            time.sleep(0.5)
            joined.touch()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", slowly)
        with gloo_job(2, _exists).membership(rank, store_path):
            yield


def _exists(rank: int, path: Path) -> bool:
    del rank
    return path.exists()


def test_no_rank_begins_and_so_none_leaves_before_all_have_joined(tmp_path: Path) -> None:
    joined = tmp_path / "joined"
    job = Job(2, partial(_last_joins_late, joined), _exists, (joined,))
    assert run_jobs([job], timeout=120) == [[True, True]]


def _same(rank: int, values: list[Tensor]) -> list[Tensor]:
    del rank
    return values


def test_tensors_go_to_ranks_and_come_back_bit_for_bit() -> None:
    whole = torch.arange(24.0).view(2, 3, 4)
    sent = [
        *(whole, whole[1:, :, 2:], whole.permute(2, 0, 1), torch.tensor(-0.0), torch.empty(0, 3)),
        *(whole.bfloat16(), whole.to(torch.float8_e4m3fn), whole.to(torch.complex64), whole > 3, whole.int()),
        *(
            torch.full((2,), torch.nan),
            torch.nn.Parameter(whole),
            whole.clone().requires_grad_(),
            whole.to_sparse(),
        ),
    ]
    for received in run_ranks(Parallel(tp=2), _same, sent):
        for one, other in zip(received, sent, strict=True):
            assert (type(one), one.dtype, one.layout, one.requires_grad) == (
                *(type(other), other.dtype, other.layout, other.requires_grad),
            )
            same, expected = (
                (each.to_dense() if each.is_sparse else each).detach().contiguous() for each in (one, other)
            )
            assert same.shape == expected.shape
            assert torch.equal(same.view(-1).view(torch.uint8), expected.view(-1).view(torch.uint8))
            same.view(-1).view(torch.uint8).zero_()  # nothing of it is read-only


def test_a_failing_rank_shows_its_own_traceback_and_ends_the_others() -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)rank 1 failed.*_fail_on_rank_one.*rank one has had enough"):
        run_ranks(Parallel(tp=2), _fail_on_rank_one)
    assert time.monotonic() - started < 55, "not the minute that rank 0 sleeps"


def test_a_dying_rank_is_reported() -> None:
    with pytest.raises(RankError, match="rank 0 died with exit code 3"):
        run_ranks(Parallel(), _die)


def test_a_hanging_rank_shows_where_it_hangs() -> None:
    run_ranks(Parallel(), _do_nothing)  # so that the time below does not include imports of the fork server
    with pytest.raises(RankError, match=r"(?s)not done after 4 s: ranks 1.*_hang_on_rank_one"):
        run_ranks(Parallel(tp=2), _hang_on_rank_one, timeout=4)
