"""Targets that are files of weights: safetensors headers and indexes, pickles and archives of torch_dist
checkpoints.
"""

from __future__ import annotations

import io
import os
import pickle
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.fuzz import mutators
from tests.fuzz.target import Bounds, Parse, Target, stateless
from weighbridge._core import dtypes
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Shard, TensorSpec
from weighbridge._formats.folder_weights import FolderWeights
from weighbridge._formats.safetensors_files import (
    INDEX_FILE,
    lay_out_files,
    layout_of_files,
    map_folder,
    read_header,
)
from weighbridge._trainers.torch_dist.items import find_tensor
from weighbridge._trainers.torch_dist.metadata import Item, read_entries, write_metadata
from weighbridge.errors import WeighbridgeError

_SPECS = [
    TensorSpec("model.embed.weight", dtypes.parse("bf16"), (4, 8)), TensorSpec("norm", dtypes.parse("fp32"), (8,)),
    TensorSpec("none", dtypes.parse("fp32"), (0, 3)), TensorSpec("scalar", dtypes.parse("fp8_e4m3"), ()),
]  # fmt: skip


def _headers() -> list[bytes]:
    files = [file for most in (1 << 20, 64) for file in lay_out_files(_SPECS, most).files]
    return [file.header + bytes(file.nbytes - len(file.header)) for file in files]


def _header(data: bytes) -> None:
    file, specs, placements = read_header(memoryview(data), "model.safetensors")
    assert sum(each.nbytes for each in placements) + len(file.header) == len(data)
    assert len(specs) == len(placements)
    layout_of_files({"model.safetensors": memoryview(data)})


def _safetensors(header: str) -> bytes:
    text = header.encode()
    return len(text).to_bytes(8, "little") + text


def _heavy_headers() -> Iterator[bytes]:
    empty = '"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    yield _safetensors("{" + ",".join(empty % n for n in range(300_000)) + "}")
    yield _safetensors('{"__metadata__":' + "[" * 900 + "]" * 900 + "}")
    yield _safetensors("[" * 10_000_000)
    yield _safetensors('{"a":' * 1_000_000)
    yield _safetensors('{"a":{"dtype":"F32","data_offsets":[0,0],"shape":[' + "0," * 1_000_000 + "0]}}")
    yield _safetensors('{"a":{"dtype":"F32","data_offsets":[0,' + "9" * 4000 + '],"shape":[' + "9" * 4000 + "]}}")
    yield _safetensors('{"a":{"dtype":"' + "F" * 3_000_000 + '","data_offsets":[0,0],"shape":[0]}}')
    yield _safetensors('{"' + "a" * 3_000_000 + '":{"dtype":"F32","data_offsets":[0,0],"shape":[0]}}')
    yield (2**64 - 1).to_bytes(8, "little") + b"{}"


@contextmanager
def _folders() -> Iterator[Parse]:
    """Folders with an index of this content, and files of weights."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        config = b'{"model_type": "llama", "tie_word_embeddings": true}'
        for file in lay_out_files(_SPECS, 64).files:
            (folder / file.name).write_bytes(file.header + bytes(file.nbytes - len(file.header)))

        def parse(data: bytes) -> None:
            (folder / INDEX_FILE).write_bytes(data)
            map_folder(folder)
            FolderWeights.read(folder, config)

        yield parse


def _indexes() -> list[bytes]:
    text = lay_out_files(_SPECS, 64).index_json
    assert text is not None
    return [text]


def _metadata() -> list[bytes]:
    """As the project writes it, and as torch does in each protocol that it might."""
    shards = [
        (Shard(spec.name, Box.whole(spec.shape)), Item("__0_0.distcp", 64 * n, 64)) for n, spec in enumerate(_SPECS)
    ]
    found = [write_metadata(_SPECS, shards, {"extra": Item("__0_1.distcp", 0, 8)}, {"extra": ("extra", 0)})]
    chunks = [ChunkStorageMetadata(torch.Size((n * 2, 0)), torch.Size((2, 3))) for n in range(3)]
    theirs = Metadata(
        {
            "a": TensorStorageMetadata(TensorProperties(torch.float32), torch.Size((6, 3)), chunks),
            "b": BytesStorageMetadata(),
        },
        {"a": ("a",)},
        {
            MetadataIndex("a", chunk.offsets, n): _StorageInfo("__0_0.distcp", n * 100, 100)
            for n, chunk in enumerate(chunks)
        },
    )
    return found + [pickle.dumps(theirs, protocol) for protocol in (2, 3, 4, 5)]


def _heavy_pickles() -> list[bytes]:
    large = 200_000
    start = b"\x80\x04"
    return [
        start + op * large + b"."
        for op in (b"(", b"}", b"]", b"\x8f", b")", b"N", b"\x88", b"(}", b"(\x8f", b"]\x94", b"\x8c\0", b"G" + bytes(8), b"K\1", b"}\x94", b"\x8f\x94")
    ] + [
        start + b")" + b"\x85" * large + b".",
        start + b"N" + b"Q" * large + b".",
        start + b"N" + b"\x85\x94" * (large // 2) + b".",
        start + b"(" + b"\x8f" * large + b"t.",
        start + b"]" + b"(" + b"}" * large + b"e.",
        start + b"ctorch\nSize\n\x94" + b"h\0)\x85R" * (large // 6) + b".",
        start + b"ctorch.distributed.checkpoint.metadata\nMetadata\n\x94" + b"h\0)\x81" * (large // 4) + b".",
        start + b"r\xff\xff\xff\x7f" + b".",
        start + b"\x8a\xff" + b"\x7f" * 255 + b".",
        start + b"X\xff\xff\xff\xff" + b"a" * 1000,
        start + b"(" + b"h\0" * 1000 + b"t" + b"\x94" * 1000,
        start + b"cos\nsystem\n(X\x04\0\0\0truetR.",
        start + b"]\x94" + b"(h\0h\0h\0h\0e" * 100_000 + b".",
    ]  # fmt: skip


def _archives() -> list[bytes]:
    """As torch saves tensors."""
    found = []
    for tensor in (
        torch.arange(6.0).reshape(2, 3),
        torch.ones(9, dtype=torch.bfloat16),
        torch.zeros((), dtype=torch.uint16),
    ):
        stream = io.BytesIO()
        torch.save(tensor, stream)
        found.append(stream.getvalue())
    return found


@contextmanager
def _files() -> Iterator[Parse]:
    """One file after the other, in memory."""
    fd = os.memfd_create("archive")
    try:

        def parse(data: bytes) -> None:
            os.ftruncate(fd, 0)
            os.pwrite(fd, data, 0)
            found = find_tensor(fd, 0, len(data))
            assert 0 <= found.offset <= len(data)

        yield parse
    finally:
        os.close(fd)


def _archive(choose: random.Random, data: bytes) -> bytes:
    """Change the pickle within an archive, a field of its directory, or any bytes."""
    begin = data.find(b"\x80\x02")
    end = data.find(b"PK", begin)
    if begin < 0 or end < 0 or choose.random() < 0.6:
        return mutators.raw(choose, data)
    changed = mutators.pickles(choose, data[begin:end])
    if choose.random() < 0.7:  # nothing else moves
        changed = changed[: end - begin].ljust(end - begin, b"\0")
    return data[:begin] + changed + data[end:]


def _heavy_archives() -> list[bytes]:
    [first, *_] = _archives()
    end = b"PK\5\6" + bytes(4) + b"\xff\xff\xff\xff" + b"\xff" * 8 + bytes(2)
    record = b"PK\1\2" + bytes(24) + b"\1\0" + bytes(16) + b"a"
    return [
        first + bytes(10_000_000),
        bytes(10_000_000) + end,
        record * 200_000 + b"PK\5\6" + bytes(18),
        first * 1000,
    ]


TARGETS = (
    Target(
        "safetensors", stateless(_header), _headers, mutators.headers, (WeighbridgeError,), _heavy_headers, Bounds(seconds_per_mb=8.0),
    ),
    Target(
        "safetensors-index",
        _folders,
        _indexes,
        mutators.json_documents(texts=("weight_map", "model-00001-of-00003.safetensors", "../model.safetensors", "x.safetensors")),
        (WeighbridgeError,),
        lambda: [b"[" * 10_000_000, b'{"weight_map":{' + b",".join(b'"%d":"a"' % n for n in range(200_000)) + b"}}", b'{"weight_map":' * 200_000],
        weight=0.05,
    ),
    Target(
        "torch-dist-metadata", stateless(read_entries), _metadata, mutators.pickles, (WeighbridgeError,), _heavy_pickles, Bounds(seconds_per_mb=40.0),
    ),
    Target("torch-dist-items", _files, _archives, _archive, (WeighbridgeError,), _heavy_archives),
)  # fmt: skip
