"""Digests of one file of a version, computed in one pass over its bytes.

- XXH3-128 (seed 0) of the file and of each tensor: detects accidental damage, and is cheap enough to be compared on
  every read.
- BLAKE3-256 of each block of 1 MiB: a cryptographic digest with which any block can be checked separately, regardless
  of its source. The last block may be shorter; an empty file has no blocks. The object ``<file>.blake3`` contains all
  block digests in order, 32 bytes each.
- The file's **root**: BLAKE3-256 of these block digests, i.e. of the content of ``<file>.blake3``. It is not the BLAKE3
  of the file.
- SHA-256 of the file, on request: signatures of models identify files by it. It takes twice as long as all other
  digests together.
- The number of non-finite elements of each tensor: NaN and, where the dtype has them, infinities.

docs/manifest.md lists the cost of each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xxhash
from blake3 import blake3

from weighbridge._core.layouts import TensorSpec
from weighbridge._core.nonfinite import NonfiniteCounter, encoding_of
from weighbridge._formats.safetensors_files import FilesLayout
from weighbridge_storage.stores.objects import ByteArray
from weighbridge_storage.versions.manifest import FileEntry, TensorEntry

BLOCK_BYTES = 1 << 20
"""Bytes of the file that one block digest covers."""
DIGEST_BYTES = blake3.digest_size
"""Bytes of one block digest."""
_WINDOW = 4 * BLOCK_BYTES
"""Number of bytes with which all digests are updated before the next bytes: few enough to stay in the processor's
cache, and enough that a thread rarely requests the interpreter's lock.
"""


@dataclass(frozen=True)
class FileDigests:
    """Digests of a file, computed in one pass.

    Attributes:
        entry: the file, as the manifest lists it.
        tensors: the tensors in it, as the manifest lists them.
        blocks: the block digests in order, `DIGEST_BYTES` each.
    """

    entry: FileEntry
    tensors: Mapping[str, TensorEntry]
    blocks: bytes

    @property
    def nonfinite(self) -> dict[str, int]:
        """Numbers of non-finite elements, by the names of the tensors that have any."""
        return {name: tensor.nonfinite for name, tensor in self.tensors.items() if tensor.nonfinite}


def digest_file(
    files: FilesLayout, name: str, data: ByteArray, go_on: Callable[[], None], *, sha256: bool = False
) -> FileDigests:
    """The digests of one file of a version.

    Args:
        files: layout of the version's tensors in its files.
        name: name of the file.
        data: its bytes, including the header.
        go_on: called every few MiB. An error that it raises ends the pass.
        sha256: whether to make SHA-256 of the file as well.
    """
    spans = ((files.layout.tensors[p.shard.tensor], p.offset) for p in files.layout.placements if p.buffer == name)
    digester = FileDigester(name, spans, sha256=sha256)
    view = data.data
    for start in range(0, len(view), _WINDOW):
        go_on()
        digester.update(view[start : start + _WINDOW])
    return digester.finish()


def digest_bytes(data: bytes) -> FileEntry:
    """The entry of a file without tensors."""
    sha256 = hashlib.sha256(data).hexdigest()
    return FileEntry(len(data), xxhash.xxh3_128_hexdigest(data), root_of(block_digests(data)), sha256)


def block_digests(data: bytes | memoryview) -> bytes:
    """The BLAKE3 digests of a file's blocks, in order."""
    blocks = BlockDigester()
    blocks.update(memoryview(data))
    return blocks.finish()


def root_of(blocks: bytes) -> str:
    """The root of a file with these block digests, as 64 hex digits."""
    return blake3(blocks).hexdigest()


class BlockDigester:
    """BLAKE3 of each block of a file. The bytes arrive in order, in pieces of any size."""

    def __init__(self) -> None:
        self._done = bytearray()
        self._block = blake3()
        self._filled = 0

    def update(self, piece: memoryview) -> None:
        """Take the next bytes."""
        while piece:
            if not self._filled and len(piece) >= BLOCK_BYTES:
                self._done += blake3(piece[:BLOCK_BYTES]).digest()
                piece = piece[BLOCK_BYTES:]
                continue
            part = piece[: BLOCK_BYTES - self._filled]
            self._block.update(part)
            self._filled += len(part)
            piece = piece[len(part) :]
            if self._filled == BLOCK_BYTES:
                self._end_block()

    def finish(self) -> bytes:
        """The digests of all blocks. Afterwards, bytes can no longer be added."""
        if self._filled:
            self._end_block()
        return bytes(self._done)

    def _end_block(self) -> None:
        self._done += self._block.digest()
        self._block, self._filled = blake3(), 0


class FileDigester:
    """All digests of a file. The bytes arrive in order, in pieces of any size.

    Args:
        name: name of the file.
        spans: its tensors, with the offset of each in the file; they do not overlap.
        sha256: whether to make SHA-256 of the file as well.
    """

    def __init__(self, name: str, spans: Iterable[tuple[TensorSpec, int]], *, sha256: bool = False) -> None:
        self._name = name
        self._file = xxhash.xxh3_128()
        self._sha256 = hashlib.sha256() if sha256 else None
        self._blocks = BlockDigester()
        self._tensors: dict[str, TensorEntry] = {}
        # a tensor without elements before another at the same offset
        self._rest = iter(sorted(spans, key=lambda span: (span[1], span[0].nbytes)))
        self._position = 0
        self._next()

    def update(self, piece: memoryview) -> None:
        """Take the next bytes."""
        self._file.update(piece)
        self._blocks.update(piece)
        if self._sha256 is not None:
            self._sha256.update(piece)
        end = self._position + len(piece)
        while self._current is not None and self._current.offset < end:
            tensor = self._current
            part = piece[max(tensor.offset - self._position, 0) : max(tensor.end - self._position, 0)]
            tensor.digest.update(part)
            tensor.nonfinite.update(np.frombuffer(part, np.uint8))
            if tensor.end > end:
                break
            self._end_tensor(tensor)
        self._position = end

    def finish(self) -> FileDigests:
        """The digests of all bytes so far. Afterwards, bytes can no longer be added."""
        while self._current is not None:  # tensors without elements, after the last byte
            self._end_tensor(self._current)
        blocks = self._blocks.finish()
        sha256 = "" if self._sha256 is None else self._sha256.hexdigest()
        entry = FileEntry(self._position, self._file.hexdigest(), root_of(blocks), sha256)
        return FileDigests(entry, self._tensors, blocks)

    def _next(self) -> None:
        self._current: _Tensor | None = None
        for spec, offset in self._rest:
            self._current = _Tensor(
                spec,
                offset,
                offset + spec.nbytes,
                xxhash.xxh3_128(),
                NonfiniteCounter(encoding_of(spec.dtype)),
            )
            return

    def _end_tensor(self, tensor: _Tensor) -> None:
        spec = tensor.spec
        self._tensors[spec.name] = TensorEntry(
            dtype=spec.dtype,
            shape=spec.shape,
            file=self._name,
            offset=tensor.offset,
            nbytes=spec.nbytes,
            xxh3_128=tensor.digest.hexdigest(),
            nonfinite=tensor.nonfinite.count,
        )
        self._next()


class _Tensor(NamedTuple):
    """The tensor that a `FileDigester` is hashing."""

    spec: TensorSpec
    offset: int
    end: int
    digest: xxhash.xxh3_128
    nonfinite: NonfiniteCounter
