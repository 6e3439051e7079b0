"""Cuts of a model: the shards that each of N trainer ranks holds, and the slices that each of N engines asks for.

- ``contiguous``: every tensor is cut along its rows, so that a shard is one run of bytes of a file.
- ``columns``: every matrix is cut along its columns, so that each of its rows is spread over the ranks.
- ``stages``: of trainers on two nodes, in Megatron-core's names: tensor parallelism on each node, one pipeline stage on
  each.
- ``megatron``: tensor parallelism as Megatron-core and engines have it, in their own names: some matrices by rows, some
  by columns, query, key and value interleaved, norms replicated.

With the first two, what engine r asks for are the shards of trainer rank r, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weighbridge import Boxes, TensorParallel, TrainerClient
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Layout, Shard, TensorSpec
from weighbridge._core.megatron_rank import MegatronRank
from weighbridge._core.slices import LayoutRequest
from weighbridge._core.tensor_spaces import TensorSpace

CUTS = ("contiguous", "columns", "megatron")
NODES = 2
"""Halves of the ranks, neighbours together, that a trainer on several nodes is cut for."""


def trainer_shards(
    cut: str, trainer: TrainerClient, model: str, specs: Iterable[TensorSpec], clients: int, rank: int
) -> tuple[Layout, TensorSpace]:
    """Shards that one trainer rank holds, and the space of their names.

    Args:
        cut: one of `CUTS`, or ``stages``.
        trainer: a client of the service, where the model is registered.
        model: ``namespace/name``.
        specs: the model's tensors in Hugging Face's space.
        clients: number of ranks.
        rank: number of the rank, from 0.
    """
    if cut in ("megatron", "stages"):
        stages = NODES if cut == "stages" else 1
        tensor_parallel = clients // stages
        at = MegatronRank(tp=(rank % tensor_parallel, tensor_parallel), pp=(rank // tensor_parallel, stages))
        return trainer.describe_shards(model, at), TensorSpace.MEGATRON
    specs = list(specs)
    return Layout.stream(specs, shards(cut, specs, clients, rank)), TensorSpace.HUGGING_FACE


def engine_slices(cut: str, specs: Iterable[TensorSpec], clients: int, rank: int) -> LayoutRequest:
    """Slices that one engine rank requests; arguments as for `trainer_shards`."""
    if cut == "megatron":
        return TensorParallel(clients, rank)
    found = shards(cut, list(specs), clients, rank)
    return Boxes([(shard.tensor, shard.box.offset, shard.box.extent) for shard in found])


def shards(cut: str, specs: Sequence[TensorSpec], clients: int, rank: int) -> list[Shard]:
    """A rank's boxes of whole tensors that are cut along one axis.

    A single rank holds the columns in two halves: with one piece there would be no cut.
    """
    pieces = max(clients, 2) if cut == "columns" else clients
    found = []
    for spec in specs:
        axis = len(spec.shape) - 1 if cut == "columns" else 0
        for piece in range(rank, pieces, clients):
            begin, end = (spec.shape[axis] * n // pieces for n in (piece, piece + 1))
            if begin < end:
                offset, extent = [0] * len(spec.shape), list(spec.shape)
                offset[axis], extent[axis] = begin, end - begin
                found.append(Shard(spec.name, Box(tuple(offset), tuple(extent))))
    return found
