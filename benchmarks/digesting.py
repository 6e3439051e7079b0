"""``python -m benchmarks.digesting``: what the digests of a version's files cost on one core, next to other algorithms.

All are taken over one file of BF16 tensors in memory, in turn, and the median of the rounds is given in milliseconds of
processor time for each GB.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import time
from collections.abc import Callable

import numpy as np
import xxhash
from blake3 import blake3

from weighbridge._core.dtypes import parse
from weighbridge._core.layouts import TensorSpec
from weighbridge._core.nonfinite import NonfiniteCounter, encoding_of
from weighbridge._formats.safetensors_files import FilesLayout, lay_out_files
from weighbridge_storage.stores.objects import ByteArray
from weighbridge_storage.versions.digests import BLOCK_BYTES, digest_file

BF16 = parse("bf16")
_SHAPES = ((1536, 576), (576, 1536), (576,), (576, 576), (576, 192))
"""Shapes of a small model's layer: many tensors are the expensive case."""


def model(gigabytes: float) -> tuple[FilesLayout, ByteArray]:
    """A file of BF16 tensors of ordinary values."""
    specs: list[TensorSpec] = []
    nbytes = 0
    while nbytes < gigabytes * 1e9:
        specs.append(TensorSpec(f"tensor.{len(specs)}", BF16, _SHAPES[len(specs) % len(_SHAPES)]))
        nbytes += specs[-1].nbytes
    files = lay_out_files(specs, max_shard_bytes=nbytes)
    (file,) = files.files
    values = np.random.default_rng(0).standard_normal(nbytes // 2, np.float32)
    body = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return files, np.concatenate([np.frombuffer(file.header, np.uint8), body])


def ways(files: FilesLayout, data: ByteArray, broken: ByteArray) -> dict[str, Callable[[], object]]:
    """Functions to measure, by name."""
    name = files.files[0].name

    def each_block(digest: Callable[[memoryview], object]) -> Callable[[], object]:
        return lambda: [digest(data[start : start + BLOCK_BYTES].data) for start in range(0, len(data), BLOCK_BYTES)]

    def before() -> None:
        xxhash.xxh3_128_digest(data.data)
        for place in files.layout.placements:
            xxhash.xxh3_128_digest(data[place.offset : place.offset + place.nbytes].data)

    def finite(values: ByteArray) -> None:
        NonfiniteCounter(encoding_of(BF16)).update(values[len(values) % 2 :])

    return {
        "XXH3-128": each_block(xxhash.xxh3_128_digest),
        "BLAKE3-256": each_block(lambda block: blake3(block).digest()),
        "SHA-256": each_block(lambda block: hashlib.sha256(block).digest()),
        "BLAKE2b-256": each_block(lambda block: hashlib.blake2b(block, digest_size=32).digest()),
        "non-finite elements, none there": lambda: finite(data),
        "non-finite elements, some in each block": lambda: finite(broken),
        "all in one pass": lambda: digest_file(files, name, data, lambda: None),
        "XXH3-128 of the file, then of each tensor": before,
    }


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.digesting", description=__doc__)
    options.add_argument("--gb", type=float, default=0.5, help="size of the file (default 0.5)")
    options.add_argument("--rounds", type=int, default=5, help="rounds that count (default 5)")
    args = options.parse_args()
    files, data = model(args.gb)
    broken = data.copy()
    broken[-2 :: -BLOCK_BYTES // 2] = 0xC0
    broken[-1 :: -BLOCK_BYTES // 2] = 0x7F
    measured = ways(files, data, broken)
    times: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(args.rounds):
        for name, way in measured.items():
            begin = time.process_time()
            way()
            times[name].append(time.process_time() - begin)
    print(f"{len(files.layout.tensors)} tensors of BF16, {len(data) / 1e9:.2f} GB")
    for name, found in times.items():
        print(f"{name:44}{statistics.median(found) / len(data) * 1e12:8.0f} ms/GB")


if __name__ == "__main__":
    main()
