"""``python -m benchmarks.client_process SPEC``: one trainer rank or engine that is measured, in a process of its own.

SPEC is a `ClientSpec` as JSON. Commands come as JSON lines on standard input, answers go as JSON lines to standard
output. A command has ``do``, the name of a method of the client, and its arguments. ``at`` among them is the moment of
the machine's monotonic clock at which the clock starts to run: the same for all clients, so they start together. Times
are in seconds, sizes in bytes.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
import torch
import xxhash
from torch import Tensor

from benchmarks import cuts, models, raw_grpc
from benchmarks.memory import HighWaterMark
from benchmarks.warm_copy import WarmCopy
from weighbridge import EngineClient, TrainerClient
from weighbridge._core.resources import VersionState
from weighbridge._formats.push_sources import StagingPool, TensorSource
from weighbridge._transport import rpc

MODEL = "bench/model"
_WAIT_SECONDS = 900.0


@dataclass(frozen=True)
class ClientSpec:
    """Specification of a client.

    Attributes:
        role: ``trainer`` or ``engine``.
        server: address of the service, where the model is registered.
        raw: address of a server of `benchmarks.raw_grpc`.
        specs: path of the model's tensors in Hugging Face's space, as `models.write_specs` writes them.
        cut: one of `cuts.CUTS`.
        lane: which lane to take.
        clients: number of clients with this role.
        rank: this client's number, from 0.
        device: device of the tensors, ``cpu`` or ``cuda``.
    """

    role: str
    server: str
    raw: str
    specs: str
    cut: str
    lane: str
    clients: int
    rank: int
    device: str = "cpu"


def _wait_until(at: float) -> None:
    time.sleep(max(at - time.monotonic(), 0.0))


class _Raw:
    """The same number of bytes through bare grpcio."""

    def __init__(self, server: str, nbytes: int) -> None:
        self._channel: grpc.Channel = rpc.open_channel(server)
        self._ring = raw_grpc.ring()
        self._nbytes = nbytes

    def push(self, at: float) -> dict[str, Any]:
        """Push; ``seconds``, and the ``bytes`` that arrived."""
        _wait_until(at)
        arrived = raw_grpc.push(self._channel, self._ring, self._nbytes)
        return {"seconds": time.monotonic() - at, "bytes": arrived}

    def pull(self, at: float) -> dict[str, Any]:
        """Pull; ``seconds``, and the ``bytes`` that came."""
        _wait_until(at)
        came = raw_grpc.pull(self._channel, self._nbytes)
        return {"seconds": time.monotonic() - at, "bytes": came}


class TrainerProcess:
    """A trainer rank with its shards in memory."""

    def __init__(self, spec: ClientSpec) -> None:
        self._spec = spec
        self._client = TrainerClient(spec.server, lane=spec.lane)
        specs = models.read_specs(Path(spec.specs))
        self._layout, self._space = cuts.trainer_shards(spec.cut, self._client, MODEL, specs, spec.clients, spec.rank)
        sizes = (p.nbytes for p in self._layout.placements)
        self._bits = models.RandomBits(sizes, seed=spec.rank, device=spec.device)
        self._tensors = self._bits.of_layout(self._layout)
        self._staging = StagingPool()
        self._copy = WarmCopy(models.shapes_of(self._layout), spec.device)
        self._raw = _Raw(spec.raw, self._layout.nbytes)
        self._memory = HighWaterMark()
        self.nbytes = self._layout.nbytes

    def push(self, at: float, step: int) -> dict[str, Any]:
        """Push the shards of a step, whose bits are its own, and wait until the version is durable.

        Moments are Unix times: ``first_byte`` is when the first byte was read, ``last_byte`` when all of this rank's
        were, ``ready`` when this rank heard that the version is ready. ``held`` is what the push itself says that it
        kept the rank for, ``called`` what a stopwatch says.
        """
        tensors = self._bits.of_layout(self._layout, generation=step)
        shards = TensorSource(self._staging, self._layout, tensors)
        _wait_until(at)
        started = time.monotonic()
        handle = self._client.push_shards(
            MODEL, self._layout, self._space, shards, step=step, rank=self._spec.rank, world_size=self._spec.clients
        )  # fmt: skip
        called, returned = time.monotonic() - started, time.time()
        handle.wait(VersionState.READY, timeout=_WAIT_SECONDS)
        ready = time.time()
        version = handle.wait(timeout=_WAIT_SECONDS)
        report = handle.report()
        self._tensors = tensors
        return {
            "held": report.held_seconds,
            "called": called,
            "stream": report.stream_seconds,
            "bytes": report.stream_bytes,
            "first_byte": returned - report.copy_seconds,
            "last_byte": returned,
            "ready": ready,
            "durable": version.durable_time_ms / 1e3,
            "version_bytes": version.received_bytes,
            "lane": report.lane,
            "local_bytes": report.local_bytes,
        }

    def copy(self, at: float) -> dict[str, Any]:
        """One warm copy of the shards; ``seconds``."""
        _wait_until(at)
        self._copy.run(self._tensors)
        return {"seconds": time.monotonic() - at}

    def raw(self, at: float) -> dict[str, Any]:
        """Push as many bytes through bare grpcio."""
        return self._raw.push(at)

    def digest(self) -> dict[str, Any]:
        """The ``digest`` of the shards that were pushed last, in their order."""
        return {"digest": _digest(self._tensors)}

    def memory(self) -> dict[str, Any]:
        """The kernel's ``high_water_mark`` beyond the start: weights in memory, nothing pushed yet."""
        return {"high_water_mark": self._memory.beyond_start}


class EngineProcess:
    """An engine rank with tensors of its slices, which each pull fills again."""

    def __init__(self, spec: ClientSpec) -> None:
        self._client = EngineClient(spec.server, lane=spec.lane)
        specs = models.read_specs(Path(spec.specs))
        self._request = cuts.engine_slices(spec.cut, specs, spec.clients, spec.rank)
        layout = self._client.pull(MODEL, "live", self._request).layout
        self._copy = WarmCopy(models.shapes_of(layout), spec.device)
        self._raw = _Raw(spec.raw, layout.nbytes)
        self._tensors = [
            torch.ones(shape, dtype=dtype, device=spec.device) for dtype, shape in models.shapes_of(layout)
        ]
        self._memory = HighWaterMark()
        self.nbytes = layout.nbytes

    def pull(self, at: float) -> dict[str, Any]:
        """Pull into existing tensors; ``seconds`` with planning, and ``bytes`` of the tensors that came."""
        _wait_until(at)
        pull = self._client.pull(MODEL, "live", self._request)
        came = sum(tensor.nbytes for _, tensor in pull.filled(self._tensors.__getitem__))
        return {"seconds": time.monotonic() - at, "bytes": came, "lane": pull.lane}

    def view(self, at: float) -> dict[str, Any]:
        """Pull tensors into memory of the client's choice, and release each at once; returns as `pull`."""
        _wait_until(at)
        pull = self._client.pull(MODEL, "live", self._request)
        came = sum(tensor.nbytes for _, tensor in pull)
        return {"seconds": time.monotonic() - at, "bytes": came, "lane": pull.lane}

    def copy(self, at: float) -> dict[str, Any]:
        """One warm copy of the slices; ``seconds``."""
        _wait_until(at)
        self._copy.run(self._tensors)
        return {"seconds": time.monotonic() - at}

    def raw(self, at: float) -> dict[str, Any]:
        """Pull as many bytes through bare grpcio."""
        return self._raw.pull(at)

    def digest(self) -> dict[str, Any]:
        """The ``digest`` of the slices that were pulled last, in their order."""
        return {"digest": _digest(self._tensors)}

    def memory(self) -> dict[str, Any]:
        """The kernel's ``high_water_mark`` beyond the start, with memory for the slices allocated and before the first
        pull.
        """
        return {"high_water_mark": self._memory.beyond_start}


def _digest(tensors: list[Tensor]) -> str:
    digest = xxhash.xxh3_128()
    for tensor in tensors:
        digest.update(tensor.reshape(-1).view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()


def main() -> None:
    """Do what is asked until standard input ends."""
    spec = ClientSpec(**json.loads(sys.argv[1]))
    client = TrainerProcess(spec) if spec.role == "trainer" else EngineProcess(spec)
    print(json.dumps({**asdict(spec), "bytes": client.nbytes}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(client, command.pop("do"))(**command)
        except Exception as error:
            answer = {"error": repr(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
