"""One rank of `benchmarks.training_states`: trains a model under FSDP2, and saves its state in several ways, each step
or once.
"""

from __future__ import annotations

import math
import multiprocessing
import shutil
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.warm_copy import WarmCopy
from weighbridge import PushHandle, TrainerClient

MODEL = "bench/training"
LAYERS = 8
_STATE_BYTES = 12
"""Bytes of a parameter's state: itself and two moments, in fp32."""
_TOKENS = {"cpu": 256, "cuda": 8192}
"""Tokens of one pass: on a GPU so many that kernels run for much longer than the processor takes to launch them."""
_WAIT_SECONDS = 300.0
_GRACE_SECONDS = 1.1
"""A little more than the service's grace time."""

Seconds = dict[str, list[float]]
"""Seconds of each round that counts, by what was timed."""


def hidden_size(gigabytes: float) -> int:
    """Features of each layer of a model whose training state has about so many GB."""
    return 64 * round(math.sqrt(gigabytes * 1e9 / _STATE_BYTES / LAYERS) / 64)


def model_of(hidden: int) -> nn.Sequential:
    """The model, on the current default device."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(hidden, hidden, bias=False), nn.GELU()) for _ in range(LAYERS)))


def measure(
    rank: int,
    server: str,
    lane: str,
    folder: str,
    gigabytes: float,
    step_seconds: float,
    steps: int,
    warm_up: int,
    rounds: int,
    threads: int,
    device: str,
) -> Seconds:
    """Seconds of a training step while nothing is saved, and while each step is, in several ways; and of saves and
    restores by themselves.

    ``plain``, ``until``, ``held_step``, ``dcp_async`` and ``megatron_async`` are of a step on the average of ``steps``
    that follow each other; ``copy`` of torch's copy of the state's bytes into memory that it has touched, ``held`` of a
    push that returns once all is copied, ``durable`` until that is in the store, ``dcp_save`` and ``megatron_save`` of
    saves that wait, ``restore``, ``dcp_load`` and ``megatron_load`` of what brings it back.
    """
    torch.set_num_threads(threads)
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    found: Seconds = {}
    with TrainerClient(server, lane=lane) as client:
        of_rank = _Rank(client, Path(folder), gigabytes, step_seconds, steps, device, rank)
        for number in range(warm_up + rounds):
            for name, seconds in of_rank.round():
                if number >= warm_up:
                    found.setdefault(name, []).append(seconds)
        of_rank.close()
    return found


class _Rank:
    """One rank: its model, and the operations that all ranks run at the same time."""

    def __init__(
        self, client: TrainerClient, folder: Path, gigabytes: float, step_seconds: float, steps: int, device: str, rank: int
    ) -> None:  # fmt: skip
        self._client, self._folder, self._steps, self._device, self._rank = (
            client,
            folder,
            steps,
            device,
            rank,
        )
        self._numbers = count(1)
        hidden = hidden_size(gigabytes)
        with torch.device(device):
            self._module = model_of(hidden)
            self._batch = torch.randn(_TOKENS[device], hidden)
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        for layer in self._module:
            fully_shard(layer, mesh=mesh)
        fully_shard(self._module, mesh=mesh)
        self._optimizer = torch.optim.AdamW(self._module.parameters(), lr=1e-6, foreach=True)
        self._passes = 1
        self._step()
        took = min(self._timed(self._step) for _ in range(3))
        self._passes = self._agreed(max(round(step_seconds / took), 1))
        local = [(torch.float32, tuple(tensor.shape)) for tensor in self._state()]
        self._copy = WarmCopy(local, device)
        self._megatron = _MegatronCalls()
        # DCP's thread communicates while the next step does
        self._writers = dist.new_group(backend="gloo")

    def close(self) -> None:
        """End the processes that write for Megatron-core."""
        self._megatron.close()

    def _agreed(self, passes: int) -> int:
        most = torch.tensor([passes], device=self._device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return int(most)

    def _state(self) -> list[Tensor]:
        """Local parts of parameters and moments."""
        moments = [value for state in self._optimizer.state.values() for value in state.values() if value.ndim]
        return [_local(each) for each in (*self._module.parameters(), *moments)]

    def _step(self) -> None:
        self._optimizer.zero_grad()
        for _ in range(self._passes):
            self._module(self._batch).square().mean().backward()
        self._optimizer.step()

    def round(self) -> Iterator[tuple[str, float]]:
        """Everything once; names and seconds."""
        megatron = self._megatron
        yield "plain", self._each_step(lambda: None)
        handles: list[PushHandle] = []
        yield "until", self._each_step(lambda: handles.append(self._push(until="optimizer_step")))
        self._wait(handles)
        yield "held_step", self._each_step(lambda: handles.append(self._push()))
        self._wait(handles)
        saves: list[Any] = []
        yield "dcp_async", self._each_step(lambda: self._save_async(saves))
        saves.pop().result()
        if self._device == "cuda":  # Megatron-core synchronizes with one in each save
            yield (
                "megatron_async",
                self._each_step(lambda: megatron.save_async(self._sharded(), self._new("megatron"))),
            )
            megatron.wait()
        yield "copy", self._timed(lambda: self._copy.run(self._state()))
        started = time.monotonic()
        handle = self._push()
        yield "held", time.monotonic() - started
        assert handle.training is not None
        handle.training.wait(timeout=_WAIT_SECONDS)
        yield "durable", time.monotonic() - started
        self._wait([handle])
        checkpoint = self._new("dcp")
        yield (
            "dcp_save",
            self._timed(lambda: state_dict_saver.save(self._dcp_state(), checkpoint_id=checkpoint)),
        )
        yield "restore", self._timed(self._restore)
        yield "dcp_load", self._timed(lambda: self._load(checkpoint))
        if self._device == "cuda":
            folder = self._new("megatron")
            yield "megatron_save", self._timed(lambda: megatron.save(self._sharded(), folder))
            yield "megatron_load", self._timed(lambda: self._load_megatron(folder))

    def _each_step(self, save: Callable[[], None]) -> float:
        def steps() -> None:
            for _ in range(self._steps):
                self._step()
                save()
            self._step()  # and up to here the last save may reach

        return self._timed(steps) / (self._steps + 1)

    def _timed(self, action: Callable[[], Any]) -> float:
        """Seconds of the slowest rank."""
        self._synchronize()
        started = time.monotonic()
        action()
        self._synchronize()
        return time.monotonic() - started

    def _synchronize(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    # --- Weighbridge

    def _push(self, **how: Any) -> PushHandle:
        step = next(self._numbers)
        return self._client.push_state_dict(MODEL, self._module, step=step, optimizer=self._optimizer, **how)

    def _restore(self) -> None:
        self._client.restore_state_dict(MODEL, self._module, optimizer=self._optimizer)

    def _wait(self, handles: list[PushHandle]) -> None:
        """Wait for pushes, and leave the disk two versions at most."""
        for handle in handles:
            for each in (handle, handle.training):
                if each is not None:
                    each.wait(timeout=_WAIT_SECONDS)
        handles.clear()
        dist.barrier()
        for _ in range(2 if self._rank == 0 else 0):
            for name in (MODEL, f"{MODEL}:training"):
                self._client.collect(name)
            time.sleep(_GRACE_SECONDS)
        dist.barrier()

    # --- torch

    def _dcp_state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._module, self._optimizer)
        return {"model": model, "optimizer": optimizer}

    def _save_async(self, saves: list[Any]) -> None:
        if saves:
            saves.pop().result()
        saves.append(
            state_dict_saver.async_save(self._dcp_state(), checkpoint_id=self._new("dcp"), process_group=self._writers)
        )

    def _load(self, checkpoint: Path) -> None:
        state = self._dcp_state()
        state_dict_loader.load(state, checkpoint_id=checkpoint)
        set_state_dict(
            self._module,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    # --- Megatron-core

    def _sharded(self) -> dict[str, Any]:
        from megatron.core.dist_checkpointing import ShardedTensor

        offsets = ((0, self._rank, dist.get_world_size()),)
        return {
            str(index): ShardedTensor.from_rank_offsets(str(index), tensor, *offsets)
            for index, tensor in enumerate(self._state())
        }

    def _load_megatron(self, checkpoint: Path) -> None:
        from megatron.core import dist_checkpointing

        loaded = dist_checkpointing.load(self._sharded(), str(checkpoint))
        for index, tensor in enumerate(self._state()):
            tensor.copy_(loaded[str(index)])

    def _new(self, kind: str) -> Path:
        """A new folder for a checkpoint. Of the earlier ones, only the last is kept."""
        number = next(self._numbers)
        there = sorted(self._folder.glob(f"{kind}-*"))
        if self._rank == 0:
            for each in there[:-1]:
                shutil.rmtree(each)
        dist.barrier()
        folder = self._folder / f"{kind}-{number:06d}"
        if self._rank == 0:
            folder.mkdir()
        dist.barrier()
        return folder


class _MegatronCalls:
    """Megatron-core's saves."""

    def __init__(self) -> None:
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

        # ranks are daemons, which may have no children, and Megatron-core writes in some
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        self._queue = AsyncCallsQueue(persistent=True)

    def save(self, sharded: dict[str, Any], folder: Path) -> None:
        """Save, and return once all ranks have written."""
        from megatron.core import dist_checkpointing

        dist_checkpointing.save(sharded, str(folder))

    def save_async(self, sharded: dict[str, Any], folder: Path) -> None:
        """Begin to save, once the save before has ended."""
        from megatron.core import dist_checkpointing

        self.wait()
        request = dist_checkpointing.save(sharded, str(folder), async_sharded_save=True)
        self._queue.schedule_async_request(request)

    def wait(self) -> None:
        self._queue.maybe_finalize_async_calls(blocking=True)

    def close(self) -> None:
        self._queue.close()
        for child in multiprocessing.active_children():  # the server of a queue, which Megatron-core leaves
            child.terminate()
            child.join()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()
