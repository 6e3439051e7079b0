"""One rank of `benchmarks.torch_trainers`: holds a model as DTensors in two dtypes and as Megatron's shards, and pushes
each in turn.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardPlacement

from benchmarks import cuts, models
from benchmarks.warm_copy import WarmCopy
from weighbridge import PushHandle, TrainerClient
from weighbridge._core.layouts import TensorSpec
from weighbridge._core.resources import VersionState
from weighbridge._formats import push_sources
from weighbridge._formats.push_sources import StagingPool, TensorSource

MODEL = "bench/torch"
_WAIT_SECONDS = 300.0
_GRACE_SECONDS = 1.1
"""A little more than the service's grace time."""

Seconds = dict[str, list[float]]
"""Seconds of each round that counts, by what was timed."""


def measure(
    rank: int,
    server: str,
    specs_path: str,
    lane: str,
    warm_up: int,
    rounds: int,
    threads: int,
    device: str = "cpu",
) -> Seconds:
    """Seconds that pushes hold this rank, next to torch's copies of as many bytes into memory that has been touched
    before.

    ``copy`` and ``cast_copy`` are torch's copies, of bf16 tensors and of fp32 tensors to bf16. The other names are
    times until a push returns: ``megatron`` of tensor-parallel shards in Megatron's names, ``state_dict`` of DTensors
    cut by rows as FSDP2 cuts them, ``counted`` and ``uncounted`` of these once more with and without the count of their
    non-finite elements, ``cast`` of these in fp32, cast on the way, and ``gathered`` of whole tensors that pass by, of
    which each rank copies its share. ``*_ready`` are times until the version is ready.
    """
    torch.set_num_threads(threads)
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    found: Seconds = {}
    with TrainerClient(server, lane=lane) as client:
        rank_of = _Rank(client, models.read_specs(Path(specs_path)), mesh, rank, device)
        for number in range(warm_up + rounds):
            for name, seconds in rank_of.round():
                if number >= warm_up:
                    found.setdefault(name, []).append(seconds)
    return found


class _Rank:
    """One rank: its tensors, and the operations that all ranks run at the same time."""

    def __init__(
        self, client: TrainerClient, specs: Sequence[TensorSpec], mesh: DeviceMesh, rank: int, device: str
    ) -> None:
        self._client, self._rank, self._ranks = client, rank, mesh.size()
        self._steps = count(1)
        self._staging = StagingPool()
        self._layout, self._space = cuts.trainer_shards("megatron", client, MODEL, specs, self._ranks, rank)
        rows = {spec.name: _local_shape(spec, self._ranks, rank) for spec in specs}
        sizes = (4 * torch.Size(shape).numel() for shape in rows.values())
        bits = models.RandomBits(sizes, seed=rank, device=device)
        self._shards = bits.of_layout(self._layout)
        self._local = {
            dtype: bits.tensors([(dtype, shape) for shape in rows.values()])
            for dtype in (torch.bfloat16, torch.float32)
        }
        self._state = {
            dtype: {spec.name: _dtensor(tensor, mesh, spec) for spec, tensor in zip(specs, local, strict=True)}
            for dtype, local in self._local.items()
        }
        self._whole = dict(zip(rows, bits.tensors([(torch.bfloat16, spec.shape) for spec in specs]), strict=True))
        self._copy = WarmCopy([(torch.bfloat16, shape) for shape in rows.values()], device)

    def round(self) -> Iterator[tuple[str, float]]:
        """Everything once; names and seconds."""
        yield "copy", _timed(lambda: self._copy.run(self._local[torch.bfloat16]))
        yield from self._push("megatron", self._push_shards)
        yield from self._push("state_dict", lambda step: self._push_state(torch.bfloat16, step))
        # once more, for the same plan as what it is compared with: that of another layout has to be asked for
        yield from self._push("counted", lambda step: self._push_state(torch.bfloat16, step))
        with _without_counts():
            yield from self._push("uncounted", lambda step: self._push_state(torch.bfloat16, step))
        yield from self._push("gathered", self._push_gathered)
        yield "cast_copy", _timed(lambda: self._copy.run(self._local[torch.float32]))
        yield from self._push("cast", lambda step: self._push_state(torch.float32, step))

    def _push(self, name: str, push: Callable[[int], PushHandle]) -> Iterator[tuple[str, float]]:
        step = next(self._steps)
        dist.barrier()
        started = time.monotonic()
        handle = push(step)
        yield name, time.monotonic() - started
        handle.wait(VersionState.READY, timeout=_WAIT_SECONDS)
        yield f"{name}_ready", time.monotonic() - started
        handle.wait(timeout=_WAIT_SECONDS)
        dist.barrier()
        if self._rank == 0:  # the disk is to hold two versions at most
            self._client.collect(MODEL)
            time.sleep(_GRACE_SECONDS)
            self._client.collect(MODEL)
        dist.barrier()

    def _push_shards(self, step: int) -> PushHandle:
        shards = TensorSource(self._staging, self._layout, self._shards)
        return self._client.push_shards(
            MODEL, self._layout, self._space, shards, step=step, rank=self._rank, world_size=self._ranks
        )

    def _push_gathered(self, step: int) -> PushHandle:
        return self._client.push_gathered(MODEL, self._whole.items(), step=step)

    def _push_state(self, dtype: torch.dtype, step: int) -> PushHandle:
        return self._client.push_state_dict(MODEL, self._state[dtype], step=step)


@contextlib.contextmanager
def _without_counts() -> Iterator[None]:
    """Ranks say that everything is finite, which is so."""
    with mock.patch.object(push_sources, "encodings_of", lambda stream: [None] * len(stream.placements)):
        yield


def _timed(work: Callable[[], None]) -> float:
    dist.barrier()
    started = time.monotonic()
    work()
    return time.monotonic() - started


def _local_shape(spec: TensorSpec, ranks: int, rank: int) -> tuple[int, ...]:
    """The rows of a tensor that torch's ``Shard(0)`` gives to a rank."""
    rows = -(-spec.shape[0] // ranks)
    begin, end = (min(rows * number, spec.shape[0]) for number in (rank, rank + 1))
    return (end - begin, *spec.shape[1:])


def _dtensor(local: Tensor, mesh: DeviceMesh, spec: TensorSpec) -> DTensor:
    shape = torch.Size(spec.shape)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [ShardPlacement(0)], run_check=False, shape=shape, stride=stride)
