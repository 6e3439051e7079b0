"""``python -m benchmarks.counting``: what the count of non-finite elements costs where a rank copies its shards, casts
them and streams them.

Each way is measured in turn with the same without the count, by the processor time of its one thread: other work on the
machine disturbs that less than the time that passes. With ``--device cuda`` shards lie on a GPU, and it is the time
that passes.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch

from benchmarks.against import Ratio
from benchmarks.models import RandomBits
from weighbridge._core.boxes import Box
from weighbridge._core.byte_copies import ByteCopy
from weighbridge._core.dtypes import DType, parse
from weighbridge._core.layouts import Layout, Shard, TensorSpec
from weighbridge._core.nonfinite import encoding_of
from weighbridge._formats.push_counts import PushCounts
from weighbridge._memory.casting import write_cast
from weighbridge._memory.copying import write_tensors
from weighbridge._memory.mappings import MappedMemory, Use
from weighbridge._memory.strided import Uncounted, count_written
from weighbridge._transport import rpc

_TENSOR_BYTES = 16 << 20
_MESSAGE_BYTES = 1 << 20
_ROW_BYTES = 2048
Way = Callable[[], object]
Clock = Callable[[], float]


class Shards:
    """Shards of finite numbers on a device, and memory that they are copied to; rows of some lie apart there."""

    def __init__(self, megabytes: int, device: str) -> None:
        nbytes = megabytes << 20
        descriptor = os.memfd_create("counting")
        os.ftruncate(descriptor, 2 * nbytes)
        self.memory = MappedMemory(descriptor, "counting", 2 * nbytes, Use.WRITE)
        os.close(descriptor)
        self.count = nbytes // _TENSOR_BYTES
        self._bits = RandomBits([2 * _TENSOR_BYTES] * self.count, device=device)

    def tensors(self, dtype: DType, elements: int) -> list[torch.Tensor]:
        """One for each shard."""
        return self._bits.tensors([(dtype.torch, (elements,))] * self.count)

    def copies(self, *, rows: bool) -> list[list[ByteCopy[int]]]:
        """Placement of each shard's bytes."""
        found: list[list[ByteCopy[int]]] = []
        for index in range(self.count):
            if rows:
                extent = (_TENSOR_BYTES // _ROW_BYTES, _ROW_BYTES)
                place = index * 2 * _TENSOR_BYTES
                found.append([ByteCopy(extent, 0, (_ROW_BYTES, 1), 0, place, (2 * _ROW_BYTES, 1))])
            else:
                found.append([ByteCopy((_TENSOR_BYTES,), 0, (1,), 0, index * _TENSOR_BYTES, (1,))])
        return found

    def copying(self, name: str, *, rows: bool) -> tuple[Way, Way]:
        """Copies of shards of a dtype, without the count and with it."""
        dtype = parse(name)
        copies = self.copies(rows=rows)
        shards = list(zip(self.tensors(dtype, _TENSOR_BYTES // dtype.itemsize), copies, strict=True))
        encodings = [encoding_of(dtype)] * self.count
        return (
            lambda: write_tensors(shards, [self.memory]),
            lambda: write_tensors(shards, [self.memory], encodings),
        )

    def copying_then_counting(self) -> tuple[Way, Way]:
        """Copies without the count, and with one of what was copied: what the extension saves by counting on the
        way.
        """
        bf16, copies = parse("bf16"), self.copies(rows=False)
        encoding = encoding_of(bf16)
        assert encoding is not None
        shards = list(zip(self.tensors(bf16, _TENSOR_BYTES // 2), copies, strict=True))

        def counted() -> None:
            write_tensors(shards, [self.memory])
            count_written([Uncounted(0, copy, encoding) for [copy] in copies], self.memory.bytes)

        return lambda: write_tensors(shards, [self.memory]), counted

    def casting(self, name: str, *, behind: bool) -> tuple[Way, Way]:
        """Casts of float32, without the count and with what of it is made meanwhile; or with that behind the rank's
        back, too.
        """
        dtype, copies = parse(name), self.copies(rows=False)
        tensors = self.tensors(parse("fp32"), _TENSOR_BYTES // dtype.itemsize)
        shards = [(tensor, dtype.torch, of_shard) for tensor, of_shard in zip(tensors, copies, strict=True)]
        encodings = [encoding_of(dtype)] * self.count

        def counted() -> None:
            rest = write_cast(shards, [self.memory], encodings).uncounted
            if behind:
                count_written(rest, self.memory.bytes)

        return lambda: write_cast(shards, [self.memory]), counted

    def on_host(self) -> Mapping[str, tuple[Way, Way]]:
        """All that is measured of shards in host memory."""
        return {
            "copy, bf16": self.copying("bf16", rows=False),
            "copy, bf16, rows of 2 KB": self.copying("bf16", rows=True),
            "copy, fp32": self.copying("fp32", rows=False),
            "copy, fp8": self.copying("fp8_e5m2", rows=False),
            "copy, bf16, counted afterwards": self.copying_then_counting(),
            "cast of fp32 to bf16": self.casting("bf16", behind=True),
            "cast of fp32 to fp16, while the rank waits": self.casting("fp16", behind=False),
            "cast of fp32 to fp16, until it is sealed": self.casting("fp16", behind=True),
            "checksums of a stream, bf16": self.streaming(),
        }

    def on_gpu(self) -> Mapping[str, tuple[Way, Way]]:
        """All that is measured of shards on a GPU."""
        return {
            "copy, bf16": self.copying("bf16", rows=False),
            "copy, bf16, rows of 2 KB": self.copying("bf16", rows=True),
            "copy, fp32": self.copying("fp32", rows=False),
            "copy, fp8": self.copying("fp8_e5m2", rows=False),
            "cast of fp32 to bf16": self.casting("bf16", behind=True),
        }

    def streaming(self) -> tuple[Way, Way]:
        """Checksums of the messages of a stream, without the count and with it: what is done to them before gRPC has
        them.
        """
        dtype = parse("bf16")
        shape = (_TENSOR_BYTES // dtype.itemsize,)
        specs = [TensorSpec(str(index), dtype, shape) for index in range(self.count)]
        layout = Layout.stream(specs, [Shard(spec.name, Box.whole(shape)) for spec in specs])
        tensors = self.tensors(dtype, shape[0])
        whole = np.concatenate([tensor.view(torch.uint8).numpy() for tensor in tensors]).data

        def messages(counts: PushCounts | None) -> None:
            for start in range(0, len(whole), _MESSAGE_BYTES):
                data = whole[start : start + _MESSAGE_BYTES]
                rpc.checksum(data)
                if counts is not None:
                    counts.take(start, data, lambda begin, end: whole[begin:end])

        return lambda: messages(None), lambda: messages(PushCounts(layout))


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.counting", description=__doc__)
    options.add_argument("--mb", type=int, default=256, help="MiB that are copied (default 256)")
    options.add_argument("--rounds", type=int, default=15, help="rounds that count (default 15)")
    options.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where shards lie")
    args = options.parse_args(arguments)
    torch.set_num_threads(1)
    shards = Shards(args.mb, args.device)
    on_host = args.device == "cpu"
    clock = time.thread_time if on_host else time.monotonic
    for name, (plain, counted) in (shards.on_host() if on_host else shards.on_gpu()).items():
        times = [_in_turn(clock, plain, counted, number) for number in range(args.rounds + 1)][1:]
        without, ratio = (
            sorted(each for each, _ in times)[len(times) // 2],
            Ratio.of([b / a for a, b in times]),
        )
        rate = shards.count * _TENSOR_BYTES / without / 1e9
        print(f"{name:45} {rate:5.1f} GB/s without, with the count {ratio} times as long")
    return 0


def _in_turn(clock: Clock, plain: Way, counted: Way, number: int) -> tuple[float, float]:
    """Seconds of both, each first every other time."""
    if number % 2:
        b, a = _seconds(clock, counted), _seconds(clock, plain)
        return a, b
    return _seconds(clock, plain), _seconds(clock, counted)


def _seconds(clock: Clock, way: Way) -> float:
    started = clock()
    way()
    return clock() - started


if __name__ == "__main__":
    sys.exit(main())
