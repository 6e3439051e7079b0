"""A client that sends exactly what a test says, and small models whose every byte is known."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import numpy as np
from transformers import PretrainedConfig

from tests.support.reference import tiny_config
from weighbridge._clients.engine import EngineClient
from weighbridge._core import dtypes
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Layout, Shard, TensorSpec
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._transport import rpc, wire
from weighbridge._transport.credentials import NONE, Credentials
from weighbridge._transport.request_parts import parts
from weighbridge.errors import DeadlineExceeded, Unavailable
from weighbridge.v1 import (
    checkpoint_service_pb2,
    checkpoint_service_pb2_grpc,
    model_service_pb2_grpc,
    weight_service_pb2_grpc,
)
from weighbridge_storage.memory.file_bytes import FileBytes, MappedBytes

pb = checkpoint_service_pb2
Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class TinyModel:
    """A Hugging Face folder, and its tensors as safetensors' own loader reads them."""

    folder: Path
    arrays: Arrays

    @property
    def files(self) -> dict[str, bytes]:
        """Files of the model's registration, by name."""
        return {"config.json": (self.folder / "config.json").read_bytes()}

    @property
    def specs(self) -> list[TensorSpec]:
        """All tensors, whole."""
        return [TensorSpec(name, dtypes.parse("fp32"), a.shape) for name, a in self.arrays.items()]


def tiny_folder(folder: Path, *, seed: int = 0, constant: float | None = None, hidden_size: int = 32) -> TinyModel:
    """Write a tied qwen3 model of about 100 kB (with the default size), random or filled with one number."""
    from safetensors.numpy import load_file, save_file

    folder.mkdir(parents=True)
    _tiny_config(hidden_size).save_pretrained(folder)
    generator = np.random.default_rng(seed)
    arrays = {}
    for name, shape in tiny_shapes(hidden_size).items():
        values = generator.standard_normal(shape, dtype=np.float32)
        arrays[name] = values if constant is None else np.full(shape, constant, np.float32)
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    return TinyModel(folder, load_file(folder / "model.safetensors"))


def tiny_config_json() -> bytes:
    """The config of `tiny_folder`'s model."""
    return str(_tiny_config(32).to_json_string()).encode()


def _tiny_config(hidden_size: int) -> PretrainedConfig:
    return tiny_config(
        "qwen3", tied=True, num_hidden_layers=2, hidden_size=hidden_size, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, intermediate_size=48,
    )  # fmt: skip


def tiny_shapes(hidden_size: int = 32) -> dict[str, tuple[int, ...]]:
    """Names and shapes of `tiny_folder`'s model, as transformers has them."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (128, hidden_size)}
    for layer in ("model.layers.0.", "model.layers.1."):
        shapes |= {
            layer + "self_attn.q_proj.weight": (32, hidden_size),
            layer + "self_attn.k_proj.weight": (16, hidden_size),
            layer + "self_attn.v_proj.weight": (16, hidden_size),
            layer + "self_attn.o_proj.weight": (hidden_size, 32),
            layer + "self_attn.q_norm.weight": (8,),
            layer + "self_attn.k_norm.weight": (8,),
            layer + "mlp.gate_proj.weight": (48, hidden_size),
            layer + "mlp.up_proj.weight": (48, hidden_size),
            layer + "mlp.down_proj.weight": (hidden_size, 48),
            layer + "input_layernorm.weight": (hidden_size,),
            layer + "post_attention_layernorm.weight": (hidden_size,),
        }
    return shapes | {"model.norm.weight": (hidden_size,)}


def whole_layout(arrays: Arrays) -> Layout:
    """One rank that holds everything."""
    return rows_layout(arrays, 0, 1)


def rows_layout(arrays: Arrays, rank: int, ranks: int) -> Layout:
    """Layout of one of several ranks that cut each tensor along its first axis.

    A tensor that does not divide is a replica on each rank.
    """
    shards = []
    for name, array in arrays.items():
        rows = array.shape[0] // ranks
        if array.shape[0] % ranks:
            shards.append(Shard(name, Box.whole(array.shape), main=rank == 0))
        else:
            tail = array.shape[1:]
            shards.append(Shard(name, Box((rank * rows, *(0 for _ in tail)), (rows, *tail))))
    return Layout.stream((TensorSpec(n, dtypes.parse("fp32"), a.shape) for n, a in arrays.items()), shards)


def stream_of(arrays: Arrays, layout: Layout, assigned: Iterable[int]) -> bytes:
    """The bytes that a rank pushes."""
    found = []
    for index in assigned:
        shard = layout.placements[index].shard
        box = tuple(slice(o, o + e) for o, e in zip(shard.box.offset, shard.box.extent, strict=True))
        found.append(arrays[shard.tensor][box].tobytes())
    return b"".join(found)


def cut(stream: bytes, size: int = 5_000) -> list[tuple[int, bytes]]:
    """A stream in pieces, of a size that divides neither tensors nor elements evenly."""
    return [(start, stream[start : start + size]) for start in range(0, len(stream), size)]


def mapped_files(arrays: Mapping[str, np.ndarray]) -> dict[str, FileBytes]:
    """Files that lie in this process's memory, by name."""
    return {name: MappedBytes(data) for name, data in arrays.items()}


class RawClient:
    """Calls as a trainer makes them, one by one.

    Raises the service's errors; tries again only where another replica has not begun.
    """

    def __init__(self, address: str, credentials: Credentials = NONE) -> None:
        self.address = address
        self._credentials = credentials
        self.client_id = str(uuid.uuid4())
        self.channel = rpc.open_channel(address, credentials)
        self.models = model_service_pb2_grpc.ModelServiceStub(self.channel)
        self.checkpoints = checkpoint_service_pb2_grpc.CheckpointServiceStub(self.channel)
        self.weights = weight_service_pb2_grpc.WeightServiceStub(self.channel)
        self.answers: dict[tuple[int, int], Any] = {}
        self._others: dict[str, grpc.Channel] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for channel in (self.channel, *self._others.values()):
            channel.close()

    def call(self, method: Any, request: Any, seconds: float = 20.0) -> Any:
        """Any call; of a stream, all responses."""
        with rpc.translated_errors(self.address):
            takes_parts = isinstance(method, grpc.StreamUnaryMultiCallable | grpc.StreamStreamMultiCallable)
            response = method(parts(request) if takes_parts else request, timeout=seconds)
            return list(response) if hasattr(response, "__next__") else response

    def open(
        self, model: str, *, ranks: int = 1, step: int = 1, request_id: str = "", run: str = "r", **said: Any
    ) -> int:
        """Open a version, of which other fields of the request say more; its number."""
        request = pb.OpenVersionRequest(
            model=model, step=step, run=run, ranks=ranks, client_id=self.client_id,
            request_id=request_id or str(uuid.uuid4()), **said,
        )  # fmt: skip
        return int(self.call(self.checkpoints.OpenVersion, request).version.number)

    def declare(
        self, model: str, number: int, layout: Layout, *, rank: int = 0, space: Any = TensorSpace.HUGGING_FACE,
        seconds: float = 20.0,
    ) -> list[int]:  # fmt: skip
        """Declare a layout; indexes of the shards to push. The answer is kept in ``answers``, by number and rank."""
        message = wire.layout_to_proto(layout, space)
        return self.declare_message(model, number, message, layout.digest, rank=rank, seconds=seconds)

    def declare_message(
        self, model: str, number: int, message: Any, digest: str, *, rank: int = 0, seconds: float = 20.0
    ) -> list[int]:
        """Declare whatever message; again as often as the service says, for so many seconds.

        Raises DeadlineExceeded, with the absent ranks.
        """
        request = pb.DeclareLayoutRequest(
            model=model, number=number, rank=rank, client_id=self.client_id, digest=digest, layout=message
        )
        deadline = time.monotonic() + seconds
        while True:
            left = max(deadline - time.monotonic(), 0.1)
            response = self.call(self.checkpoints.DeclareLayout, request, left)
            if not response.retry_after_ms:
                self.answers[number, rank] = response
                return list(response.assigned)
            if time.monotonic() >= deadline:
                raise DeadlineExceeded("absent", details=[f"rank {rank}" for rank in response.absent_ranks])
            time.sleep(response.retry_after_ms / 1000)

    def push(
        self,
        model: str,
        number: int,
        pieces: Sequence[tuple[int, bytes]],
        *,
        rank: int = 0,
        damage: bool = False,
    ) -> None:
        """Push pieces to where they belong; with ``damage``, the last one does not agree with its checksum."""
        answer = self.answers.get((number, rank))
        if answer is None or not answer.routes:
            with rpc.translated_errors(self.address):
                self.checkpoints.Push(self.messages(model, number, pieces, rank=rank, damage=damage), timeout=20.0)
            return
        for route in answer.routes:
            parts = _within(pieces, [(each.start, each.end) for each in route.ranges])
            self.push_to(route.address, answer.claim, model, number, parts, rank=rank)

    def push_to(
        self,
        address: str,
        claim: str,
        model: str,
        number: int,
        pieces: Sequence[tuple[int, bytes]],
        *,
        rank: int,
    ) -> None:
        """Push pieces to another replica, or with an empty address to this one, once it receives the version."""
        stub, header = (
            self.checkpoints,
            pb.PushHeader(model=model, number=number, rank=rank, client_id=self.client_id),
        )
        if address:
            channel = self._others.setdefault(address, rpc.open_channel(address, self._credentials))
            stub = checkpoint_service_pb2_grpc.CheckpointServiceStub(channel)
            header = pb.PushHeader(model=model, number=number, rank=rank, claim=claim)
        patience = rpc.Patience(20.0)
        while True:
            try:
                with rpc.translated_errors(address or self.address):
                    stub.Push(_messages(header, pieces, damage=False), timeout=20.0)
                return
            except Unavailable:
                if not address or not patience.wait():
                    raise

    def messages(
        self,
        model: str,
        number: int,
        pieces: Sequence[tuple[int, bytes]],
        *,
        rank: int = 0,
        damage: bool = False,
    ) -> Iterator[Any]:
        """The messages of a push."""
        header = pb.PushHeader(model=model, number=number, rank=rank, client_id=self.client_id)
        return _messages(header, pieces, damage=damage)

    def received(self, model: str, number: int, rank: int = 0) -> list[tuple[int, int]]:
        """Byte ranges of a rank's stream that have arrived."""
        request = pb.GetPushStateRequest(model=model, number=number, rank=rank)
        return [(r.start, r.end) for r in self.call(self.checkpoints.GetPushState, request).received]

    def seal(self, model: str, number: int, rank: int = 0, nonfinite: int | None = None) -> Any:
        """Seal a rank with its count of non-finite elements, or without, as older clients do; returns the version."""
        request = pb.SealRankRequest(
            model=model, number=number, rank=rank, client_id=self.client_id, nonfinite_elements=nonfinite
        )
        return self.call(self.checkpoints.SealRank, request).version

    def push_whole(self, model: str, arrays: Arrays, *, nonfinite: int | None = None, **opening: Any) -> int:
        """Make a complete push of one rank; returns the version's number."""
        number = self.open(model, **opening)
        layout = whole_layout(arrays)
        self.push(model, number, cut(stream_of(arrays, layout, self.declare(model, number, layout))))
        self.seal(model, number, nonfinite=nonfinite)
        return number


def _messages(header: Any, pieces: Sequence[tuple[int, bytes]], *, damage: bool) -> Iterator[Any]:
    yield pb.PushRequest(header=header)
    for i, (offset, data) in enumerate(pieces):
        wrong = damage and i == len(pieces) - 1
        yield pb.PushRequest(offset=offset, data=data, checksum=rpc.checksum(data) ^ wrong)


def _within(pieces: Sequence[tuple[int, bytes]], ranges: Sequence[tuple[int, int]]) -> list[tuple[int, bytes]]:
    """Parts of the pieces that lie in these ranges."""
    found = []
    for offset, data in pieces:
        for start, stop in ranges:
            begin, end = max(offset, start), min(offset + len(data), stop)
            if begin < end:
                found.append((begin, data[begin - offset : end - offset]))
    return found


def pulled(engine: EngineClient, model: str, version: str | int = "latest") -> dict[str, bytes]:
    """All tensors of a version, as bytes."""
    return {name: tensor.numpy().tobytes() for name, tensor in engine.pull(model, version)}


def assert_equal(engine: EngineClient, model: str, version: str | int, arrays: Arrays) -> None:
    """The version's tensors are these, to the byte."""
    found = pulled(engine, model, version)
    assert found.keys() == arrays.keys()
    different = [name for name, array in arrays.items() if found[name] != array.tobytes()]
    assert not different, f"{model}@{version} differs in {different}"
