"""Peers: the ways of others to get a trainer's weights into files, and files into memory.

One function for each peer, told where from and where to. Only the function is timed: what it imports and what it needs
once in its process has been there before, because it has run on a tiny model. Nothing is flushed to disk by peers,
where Weighbridge says "durable" only of what is.
"""

from __future__ import annotations

import os
import queue
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import models, processes, raw_grpc
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import TensorSpec
from weighbridge._transport import rpc

if TYPE_CHECKING:
    import grpc
    from torch import Tensor

HF, DCP, CONSOLIDATED, MEGATRON, CONVERTED, COPY, HUB = (
    "hf", "dcp", "consolidated", "megatron", "converted", "copy", "hub",
)  # fmt: skip
"""Folders that peers write and read, by name."""


@dataclass
class Work:
    """One model in memory, and a folder for what is made of it.

    Attributes:
        model: folder of the model, as `models.write_model` makes it.
        folder: folder in which the folders above are made.
        hub: URL of a service that has the model durable; empty if there is none.
        stack: closed when the work is over.
    """

    model: Path
    folder: Path
    hub: str = ""
    stack: ExitStack = field(default_factory=ExitStack)

    @cached_property
    def specs(self) -> list[TensorSpec]:
        """Tensors in Hugging Face's space."""
        return models.read_specs(self.model / "specs.json")

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self.specs)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Whole tensors with Hugging Face's names: what most peers can only begin with."""
        return models.RandomBits(spec.nbytes for spec in self.specs).of_specs(self.specs)

    @cached_property
    def room(self) -> dict[str, Tensor]:
        """Existing tensors to load into, with all their pages allocated."""
        import torch

        return {spec.name: torch.ones(spec.shape, dtype=spec.dtype.torch) for spec in self.specs}

    @cached_property
    def sharded(self) -> dict[str, Any]:
        """The same model as Megatron-core's sharded state dict of a single rank."""
        from megatron.core.dist_checkpointing.mapping import ShardedTensor

        from weighbridge._core.megatron_rank import MegatronRank
        from weighbridge_service.models.bridges import bridge_for
        from weighbridge_service.models.megatron_layouts import megatron_layout

        bridge = bridge_for((self.model / "config.json").read_bytes())
        layout = megatron_layout(bridge, {spec.name: spec for spec in self.specs}, MegatronRank())
        held = models.RandomBits(p.nbytes for p in layout.placements).of_layout(layout)
        shards = {}
        for index, (placement, tensor) in enumerate(zip(layout.placements, held, strict=True)):
            name, box, _ = placement.shard
            fragments = _fragments(box, layout.tensors[name].shape)
            shards[f"{index}"] = ShardedTensor.from_rank_offsets(name, tensor, *fragments)
        return shards

    @cached_property
    def raw(self) -> tuple[grpc.Channel, list[bytes]]:
        """A connection to a server of bare grpcio, and messages for it."""
        server = self.stack.enter_context(processes.raw_grpc_server())
        return rpc.open_channel(server), raw_grpc.ring()

    def path(self, name: str) -> Path:
        """One of the folders."""
        return self.folder / name


def _fragments(box: Box, shape: Sequence[int]) -> list[tuple[int, int, int]]:
    """Axis, index and number of pieces of each axis that a box is a piece of, all pieces being alike."""
    axes = zip(box.offset, box.extent, shape, strict=True)
    return [
        (axis, offset // extent, whole // extent)
        for axis, (offset, extent, whole) in enumerate(axes)
        if extent != whole
    ]


@dataclass(frozen=True)
class Peer:
    """One way of moving weights.

    Attributes:
        name: name in tables.
        begins: input: ``shards`` of a trainer, whole ``tensors`` in memory, or ``files``.
        ends: output: ``hf files``, other ``files``, ``memory``, or ``nothing``.
        run: function that runs it.
        reads: the folder that another peer leaves for it, or none.
        writes: the folder that it leaves, or none.
        prepare: makes what is in memory before the clock runs.
    """

    name: str
    begins: str
    ends: str
    run: Callable[[Work], None]
    reads: str = ""
    writes: str = ""
    prepare: Callable[[Work], object] = lambda _work: None


def _tensors(work: Work) -> object:
    return work.tensors


def _room(work: Work) -> object:
    return work.room


def _connect(work: Work) -> object:
    channel, ring = work.raw
    return raw_grpc.push(channel, ring, sum(map(len, ring)))


def push_raw(work: Work) -> None:
    """As many bytes through bare grpcio, to a server that forgets them."""
    channel, ring = work.raw
    raw_grpc.push(channel, ring, work.nbytes)


def save_safetensors(work: Work) -> None:
    """safetensors' ``save_file`` of tensors that are whole and renamed already."""
    from safetensors.torch import save_file

    folder = work.path(HF)
    folder.mkdir()
    save_file(work.tensors, folder / "model.safetensors", {"format": "pt"})


def load_safetensors(work: Work) -> None:
    """safetensors' ``load_file``, and a copy of each tensor: it maps the file and reads nothing yet."""
    from safetensors.torch import load_file

    for name, tensor in load_file(work.path(HF) / "model.safetensors").items():
        work.room[name].copy_(tensor)


def stream_runai(work: Work) -> None:
    """runai-model-streamer, and a copy of each tensor out of its buffer."""
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(work.path(HF) / "model.safetensors"))
        for name, tensor in streamer.get_tensors():
            work.room[name].copy_(tensor)


def copy_files(work: Work) -> None:
    """``cp -r`` of files that are in the page cache."""
    processes.run("cp", "-r", str(work.path(HF)), str(work.path(COPY)))


def save_dcp(work: Work) -> None:
    """torch.distributed.checkpoint's own format."""
    from torch.distributed.checkpoint.state_dict_saver import save

    save(dict(work.tensors), checkpoint_id=work.path(DCP), no_dist=True)


def load_dcp(work: Work) -> None:
    """torch.distributed.checkpoint's own format, into tensors that are there."""
    from torch.distributed.checkpoint.state_dict_loader import load

    load(dict(work.room), checkpoint_id=work.path(DCP), no_dist=True)


def save_dcp_hf(work: Work) -> None:
    """torch.distributed.checkpoint's Hugging Face writer: sharded files, which it then consolidates."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(
        str(work.path(CONSOLIDATED)),
        fqn_to_index_mapping=dict.fromkeys(work.tensors, 1),
        save_distributed=True,
        enable_consolidation=True,
        thread_count=len(os.sched_getaffinity(0)),
        thread_count_consolidation=len(os.sched_getaffinity(0)),
    )
    save(dict(work.tensors), storage_writer=writer, no_dist=True)


def _join_megatron(work: Work) -> object:
    """One rank on CPU; its writers report through a queue of this process, as a server process for it would not
    start.
    """
    import torch
    import torch.distributed as dist
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from weighbridge_demo.megatron_cpu import Parallel, init_rank, patch_for_cpu

    if not dist.is_initialized():
        threads = torch.get_num_threads()
        patch_for_cpu()
        init_rank(Parallel(), 0, str(work.folder / "rendezvous"))
        torch.set_num_threads(threads)
        filesystem_async._results_queue = queue.Queue()
    return work.sharded


def save_megatron(work: Work) -> None:
    """Megatron-core's ``dist_checkpointing.save``."""
    from megatron.core import dist_checkpointing

    work.path(MEGATRON).mkdir()
    dist_checkpointing.save({"model": work.sharded}, str(work.path(MEGATRON)))


def save_megatron_and_convert(work: Work) -> None:
    """The same, and then the conversion to a Hugging Face folder that ``weighbridge convert`` does."""
    from weighbridge_service.converting.conversions import ConvertOptions
    from weighbridge_service.converting.convert import convert_folder

    save_megatron(work)
    convert_folder(work.path(MEGATRON), work.path(CONVERTED), ConvertOptions(config=work.model), restart=True)
    shutil.rmtree(work.path(MEGATRON))


def download_hub(work: Work) -> None:
    """huggingface_hub's ``snapshot_download`` from the service."""
    from huggingface_hub import snapshot_download

    from benchmarks.client_process import MODEL

    snapshot_download(MODEL, endpoint=work.hub, local_dir=work.path(HUB), cache_dir=work.folder / "cache")


PEERS = (
    Peer("raw grpcio", "tensors", "nothing", push_raw, prepare=_connect),
    Peer("safetensors save_file", "tensors", "hf files", save_safetensors, writes=HF, prepare=_tensors),
    Peer("cp -r", "files", "hf files", copy_files, reads=HF, writes=COPY),
    Peer("safetensors load_file", "files", "memory", load_safetensors, reads=HF, prepare=_room),
    Peer("runai-model-streamer", "files", "memory", stream_runai, reads=HF, prepare=_room),
    Peer("DCP save", "tensors", "files", save_dcp, writes=DCP, prepare=_tensors),
    Peer("DCP load", "files", "memory", load_dcp, reads=DCP, prepare=_room),
    Peer("DCP HF writer", "tensors", "hf files", save_dcp_hf, writes=CONSOLIDATED, prepare=_tensors),
    Peer("Megatron save", "shards", "files", save_megatron, writes=MEGATRON, prepare=_join_megatron),
    Peer(
        "Megatron save, convert", "shards", "hf files", save_megatron_and_convert, writes=CONVERTED,
        prepare=_join_megatron,
    ),
)  # fmt: skip
HUB_PEER = Peer("huggingface_hub download", "files", "hf files", download_hub, writes=HUB)
"""Needs the service; runs while ours does."""
BY_NAME: Mapping[str, Peer] = {peer.name: peer for peer in (*PEERS, HUB_PEER)}
