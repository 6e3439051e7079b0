"""Processes of a small distributed job on one machine: started quickly, and ended for certain.

Ranks are processes forked from a server that has imported all that they run, torch, megatron-core and transformers
among it, so a job costs a fraction of a second instead of several seconds a rank. The server starts no threads and
makes no channels, neither of which survives a fork; gRPC starts none when it is imported. It is one per process that
runs jobs, and ends with it.
"""

from __future__ import annotations

import faulthandler
import io
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch

    from weighbridge_demo.megatron_cpu import Parallel

PRELOAD = (
    "torch",
    "torch.distributed",
    "megatron.core.dist_checkpointing",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
    "transformers.models.llama.modeling_llama",
    "weighbridge_demo.megatron_cpu",
    "weighbridge_demo.tp_engine",
    "weighbridge_demo.trainer_ranks",
)
"""Modules that the server imports before it forks."""
_AT_FIRST, _AT_LAST = "weighbridge_demo.imports_begin", "weighbridge_demo.imports_done"
"""Imported before and after everything else."""

# BLAS and OpenMP would make pools of threads. megatron-core warns of everything that a CPU machine lacks, and has small
# functions compiled where they are defined, for which torch imports its compiler: `_AT_LAST` lets ranks compile.
_SERVER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "TORCHDYNAMO_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_GRACE_SECONDS = 10.0
"""Seconds after the job's timeout at which a rank ends itself, in case no parent process is left to end it."""

Membership = Callable[[int, str], AbstractContextManager[None]]
"""Joins a job's process groups, given the rank and the path of a file for torch's rendezvous, and leaves them."""


class RankError(RuntimeError):
    """A rank raised, died or did not finish in time; the message holds its traceback."""


@dataclass(frozen=True)
class Job:
    """Processes that work together, each of which runs `fn(rank, *args)`.

    Attributes:
        size: number of processes.
        membership: joins their process groups.
        fn: a function at module level; it, its arguments and its results are pickled.
        args: further arguments, the same for all ranks.
        name: name of the job in errors.
    """

    size: int
    membership: Membership
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    name: str = ""


@dataclass(frozen=True)
class _Rank:
    """One running rank; its process and the end of the pipe where its result will appear."""

    job: int
    number: int
    label: str
    process: ForkServerProcess
    results: connection.Connection
    trace_path: Path


@contextmanager
def _megatron(parallel: Parallel, rank: int, store_path: str) -> Iterator[None]:
    from weighbridge_demo.megatron_cpu import init_rank, patch_for_cpu, shutdown

    patch_for_cpu()
    init_rank(parallel, rank, store_path)
    yield
    # Not after an error: other ranks are elsewhere then, and leaving waits for them.
    shutdown()


@contextmanager
def _gloo(size: int, rank: int, store_path: str) -> Iterator[None]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store_path}", rank=rank, world_size=size)
    dist.barrier()  # or one that leaves early breaks connections that others are still making
    yield
    dist.destroy_process_group()


def megatron_job(parallel: Parallel, fn: Callable[..., Any], *args: Any, name: str = "") -> Job:
    """A Megatron job on CPU: its ranks have Megatron's process groups."""
    return Job(parallel.world_size, partial(_megatron, parallel), fn, args, name)


def gloo_job(size: int, fn: Callable[..., Any], *args: Any, name: str = "") -> Job:
    """A job with nothing but torch.distributed's default group, over gloo."""
    return Job(size, partial(_gloo, size), fn, args, name)


def run_jobs(jobs: Sequence[Job], *, timeout: float, preload: Sequence[str] = PRELOAD) -> list[list[Any]]:
    """Run jobs side by side.

    Args:
        jobs: jobs to run.
        timeout: seconds for all of it; a process's first jobs also wait for the server's imports.
        preload: modules that the server imports, if this process has no server yet.

    Returns:
        For each job the results in the order of ranks.

    Raises:
        RankError: a rank raised, died, or was not done in time. All ranks of all jobs are ended by then.
    """
    start_server(preload)
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks: list[_Rank] = []
        try:
            for index, job in enumerate(jobs):
                work = _pickled((job.membership, job.fn, job.args))
                for number in range(job.size):
                    results, sender = context.Pipe(duplex=False)
                    label = f"{number} of {job.name}" if job.name else str(number)
                    trace_path = Path(folder, f"trace-{index}-{number}")
                    store_path = str(Path(folder, f"store-{index}"))
                    process = context.Process(
                        target=_run_rank,
                        args=(sender, str(trace_path), number, store_path, work, timeout + _GRACE_SECONDS),
                        name=f"rank-{number}",
                        daemon=True,
                    )
                    ranks.append(_Rank(index, number, label, process, results, trace_path))
                    process.start()
                    # Ours must be closed for the rank's death to be seen as the end of the pipe.
                    sender.close()
            found = _collect(ranks, timeout)
        finally:
            for rank in ranks:
                if rank.process.is_alive():
                    rank.process.kill()
                if rank.process.pid is not None:
                    rank.process.join()
                rank.results.close()
    return [[found[index, number] for number in range(job.size)] for index, job in enumerate(jobs)]


def run_ranks(
    parallel: Parallel,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 120,
    preload: Sequence[str] = PRELOAD,
) -> list[Any]:
    """Run `fn(rank, *args)` on every rank of a Megatron job on CPU; as `run_jobs` with one `megatron_job`.

    Returns:
        The results, in the order of ranks.

    Raises:
        RankError: a rank raised, died, or was not done in time. All ranks are ended by then.
    """
    return run_jobs([megatron_job(parallel, fn, *args)], timeout=timeout, preload=preload)[0]


class _Pickler(pickle.Pickler):
    """Pickler of tensors on CPU by their bytes: torch's own way, an archive for each, takes several times as long.

    multiprocessing's would pass them as shared memory of a process that is about to end.
    """

    def reducer_override(self, value: object) -> Any:
        import torch

        if (
            type(value) is not torch.Tensor
            or value.requires_grad
            or value.layout is not torch.strided
            or not value.is_cpu
        ):
            return NotImplemented
        return _tensor, (value.contiguous().view(-1).view(torch.uint8).numpy(), value.dtype, value.shape)


def _tensor(content: np.ndarray[Any, Any], dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    import torch

    return torch.from_numpy(content).view(dtype).view(shape)


def _pickled(value: object) -> bytes:
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def start_server(preload: Sequence[str] = PRELOAD) -> None:
    """Start the process that ranks are forked from, if this process has none yet; does not wait for its imports."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([_AT_FIRST, *preload, _AT_LAST])
    before = {name: os.environ.get(name) for name in _SERVER_ENVIRONMENT}
    _set_environment(_SERVER_ENVIRONMENT)
    try:
        forkserver.ensure_running()
    finally:
        _set_environment(before)


def _set_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _collect(ranks: list[_Rank], timeout: float) -> dict[tuple[int, int], Any]:
    """Wait for every rank's result; the first failure is raised, because later ones mostly follow from it."""
    deadline = time.monotonic() + timeout
    waiting = {rank.results: rank for rank in ranks}
    results: dict[tuple[int, int], Any] = {}
    while waiting:
        ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(_describe_hang(list(waiting.values()), timeout))
        for pipe in ready:
            assert isinstance(pipe, connection.Connection)
            rank = waiting.pop(pipe)
            try:
                succeeded, value = pickle.loads(pipe.recv_bytes())  # noqa: S301 (from our own child)
            except EOFError:
                rank.process.join(5)
                raise RankError(f"rank {rank.label} died with exit code {rank.process.exitcode}") from None
            if not succeeded:
                raise RankError(f"rank {rank.label} failed:\n{value}")
            results[rank.job, rank.number] = value
    return results


def _describe_hang(ranks: list[_Rank], timeout: float) -> str:
    """Ask ranks that are still running where they are."""
    for rank in ranks:
        if rank.process.is_alive():
            os.kill(rank.process.pid or 0, signal.SIGUSR1)
    time.sleep(0.5)
    lines = [f"not done after {timeout:g} s: ranks {', '.join(rank.label for rank in ranks)}"]
    for rank in ranks:
        trace = rank.trace_path.read_text() if rank.trace_path.exists() else "has not started"
        lines.append(f"rank {rank.label}:\n{trace}")
    return "\n".join(lines)


def _run_rank(
    results: connection.Connection, trace_path: str, rank: int, store_path: str, work: bytes, seconds: float
) -> None:
    """The life of one rank's process."""
    with open(trace_path, "w") as trace:
        faulthandler.register(signal.SIGUSR1, file=trace)
        faulthandler.dump_traceback_later(seconds, exit=True, file=trace)
        try:
            membership, fn, args = pickle.loads(work)  # noqa: S301 (from our own parent)
            with membership(rank, store_path):
                message = _pickled((True, fn(rank, *args)))
        except BaseException:
            message = pickle.dumps((False, traceback.format_exc()))
        results.send_bytes(message)
        faulthandler.cancel_dump_traceback_later()
        faulthandler.unregister(signal.SIGUSR1)
