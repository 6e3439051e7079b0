"""How does a test run a function on all ranks of a small Megatron job?

Ranks are processes forked from a server that has torch, megatron-core, mbridge and transformers imported
already, so a job costs a fraction of a second instead of several seconds a rank. The server imports no grpc
and starts no threads, neither of which survives a fork. It is one per test process, so every pytest-xdist
worker has its own.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from weighbridge.demo.megatron_cpu import Parallel, init_rank, patch_for_cpu, shutdown

# Not weighbridge itself, whose package may come to import grpc.
_PRELOAD = [
    "torch",
    "torch.distributed",
    "megatron.core.dist_checkpointing",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
    "mbridge",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
]
# BLAS and OpenMP would make pools of threads. megatron-core warns of everything that a CPU machine lacks.
_SERVER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "TOKENIZERS_PARALLELISM": "false",
}


class RankError(RuntimeError):
    """A rank raised, died or did not finish in time; the message holds its traceback."""


@dataclass(frozen=True)
class _Rank:
    """One running rank; its process and the end of the pipe where its result will appear."""

    number: int
    process: ForkServerProcess
    results: connection.Connection
    trace_path: Path


def run_ranks(parallel: Parallel, fn: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
    """Run `fn(rank, *args)` on every rank of a Megatron job on CPU, process groups initialised.

    Args:
        parallel: the shape of the job.
        fn: a function at module level; it, its arguments and its results are pickled.
        timeout: seconds for the whole job; a test process's first job also waits for the server's imports.

    Returns:
        The results, in the order of ranks.

    Raises:
        RankError: a rank raised, died, or was not done in time. All ranks are ended by then.
    """
    _start_server()
    context = multiprocessing.get_context("forkserver")
    # Plain pickle: multiprocessing's own would pass tensors as shared memory of a process about to end.
    work = pickle.dumps((fn, args))
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks: list[_Rank] = []
        try:
            for number in range(parallel.world_size):
                results, sender = context.Pipe(duplex=False)
                trace_path = Path(folder, f"trace-{number}")
                process = context.Process(
                    target=_run_rank,
                    args=(sender, str(trace_path), parallel, number, str(Path(folder, "store")), work),
                    name=f"rank-{number}",
                    daemon=True,
                )
                ranks.append(_Rank(number, process, results, trace_path))
                process.start()
                # Ours must be closed for the rank's death to be seen as the end of the pipe.
                sender.close()
            return _collect(ranks, timeout)
        finally:
            for rank in ranks:
                if rank.process.is_alive():
                    rank.process.kill()
                rank.process.join()
                rank.results.close()


def _start_server() -> None:
    """Start the process that ranks are forked from, if this process has none yet."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOAD)
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


def _collect(ranks: list[_Rank], timeout: float) -> list[Any]:
    """Wait for every rank's result; the first failure is raised, because later ones mostly follow from it."""
    deadline = time.monotonic() + timeout
    waiting = {rank.results: rank for rank in ranks}
    results: dict[int, Any] = {}
    while waiting:
        ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(_describe_hang(list(waiting.values()), timeout))
        for pipe in ready:
            assert isinstance(pipe, connection.Connection)
            rank = waiting.pop(pipe)
            try:
                succeeded, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                rank.process.join(5)
                code = rank.process.exitcode
                raise RankError(f"rank {rank.number} died with exit code {code}") from None
            if not succeeded:
                raise RankError(f"rank {rank.number} failed:\n{value}")
            results[rank.number] = value
    return [results[rank.number] for rank in ranks]


def _describe_hang(ranks: list[_Rank], timeout: float) -> str:
    """Ask ranks that are still running where they are."""
    for rank in ranks:
        if rank.process.is_alive():
            os.kill(rank.process.pid or 0, signal.SIGUSR1)
    time.sleep(0.5)
    lines = [f"not done after {timeout:g} s: ranks {', '.join(str(rank.number) for rank in ranks)}"]
    for rank in ranks:
        trace = rank.trace_path.read_text() if rank.trace_path.exists() else "has not started"
        lines.append(f"rank {rank.number}:\n{trace}")
    return "\n".join(lines)


def _run_rank(
    results: connection.Connection,
    trace_path: str,
    parallel: Parallel,
    rank: int,
    store_path: str,
    work: bytes,
) -> None:
    """The life of one rank's process."""
    with open(trace_path, "w") as trace:
        faulthandler.register(signal.SIGUSR1, file=trace)
        try:
            patch_for_cpu()
            init_rank(parallel, rank, store_path)
            fn, args = pickle.loads(work)
            message = pickle.dumps((True, fn(rank, *args)))
            shutdown()
        except BaseException:
            message = pickle.dumps((False, traceback.format_exc()))
        results.send_bytes(message)
        faulthandler.unregister(signal.SIGUSR1)
