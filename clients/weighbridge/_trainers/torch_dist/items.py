"""Items of a torch_dist checkpoint: where a tensor's bytes lie inside of the file that ``torch.save`` makes of it, and what stands around them.

Every chunk of a torch_dist checkpoint is such a file, a ZIP archive inside a larger file. Its records, all stored without compression:
``archive/data.pkl``, the pickle of the one tensor (`stored_tensors`); ``archive/data/0``, the raw storage, at a multiple of 64 bytes from the
start of the archive, by padding in the extra field of its local header; ``archive/byteorder``, ``archive/version`` and others.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from functools import lru_cache

from weighbridge._core.dtypes import DType
from weighbridge._trainers.torch_dist.archives import CENTRAL, END, END64, FULL, LOCAL, LOCATOR, Archive
from weighbridge._trainers.torch_dist.pickles import allow, read_pickle
from weighbridge._trainers.torch_dist.stored_tensors import (
    STORAGES,
    TENSOR_NAMES,
    DescribedTensor,
    StoredTensor,
    described,
    located,
)

ALIGNMENT = 64
"""torch's own: raw bytes begin at a multiple of it, counted from the start of the archive."""

_STORAGE_OF = {dtype: name.removeprefix("torch.") for name, dtype in STORAGES.items()}
_ALLOWED = allow(*TENSOR_NAMES)
_MAX_DIRECTORY = 1 << 16
_MAX_PICKLE = 1 << 12


@dataclass(frozen=True, slots=True)
class Framing:
    """What surrounds the raw bytes of a tensor: together an archive that ``torch.load(weights_only=True)`` reads."""

    head: bytes
    tail: bytes


def find_tensor(fd: int, offset: int, length: int) -> StoredTensor:
    """Find the raw bytes of the one tensor in an archive. Only the archive's directory and its pickle are read.

    Args:
        fd: the open file.
        offset: first byte of the archive in the file.
        length: its bytes; the caller has seen that the file is long enough.

    Raises:
        DataLoss: it is no such archive, or does not hold one dense row-major tensor in little-endian byte order.
    """
    archive = Archive(fd, offset, length, _MAX_DIRECTORY)
    return located(_describe(archive.pickle(_MAX_PICKLE)), archive)


# A model has few kinds of chunks, and all chunks of a kind have one pickle.
@lru_cache(maxsize=4096)
def _describe(pickle: bytes) -> DescribedTensor:
    return described(read_pickle(pickle, _ALLOWED, "its pickle"))


def frame(dtype: DType, shape: tuple[int, ...], nbytes: int) -> Framing:
    """What is to stand before and after the raw bytes of a dense tensor.

    The raw bytes begin at a multiple of `ALIGNMENT` from the start of the archive.

    The CRC-32 of the raw record is 0 in the archive: it would need the data, and torch's reader is built without a check
    of it (``torch.serialization.set_crc32_options(False)`` makes torch write none either). Other readers of ZIP archives
    would complain.
    """
    records = (
        (b"archive/data.pkl", _write_pickle(dtype, shape)),
        (b"archive/.format_version", b"1"),
        (b"archive/.storage_alignment", str(ALIGNMENT).encode()),
        (b"archive/byteorder", b"little"),
        (b"archive/version", b"3\n"),
    )
    head = bytearray()
    directory = bytearray()
    for name, content in records:
        crc = zlib.crc32(content)
        directory += _central(name, crc, len(content), len(head))
        head += LOCAL.pack(b"PK\x03\x04", 20, 0x800, 0, 0, 0, crc, len(content), len(content), len(name), 0)
        head += name + content
    name = b"archive/data/0"
    directory += _central(name, 0, nbytes, len(head))
    wide = struct.pack("<HHQQ", 1, 16, nbytes, nbytes) if nbytes >= FULL else b""
    fill = -(len(head) + LOCAL.size + len(name) + len(wide) + 4) % ALIGNMENT
    # "FB" is the tag that torch gives its padding.
    extra = wide + b"FB" + struct.pack("<H", fill) + b"Z" * fill
    narrow = min(nbytes, FULL)
    head += LOCAL.pack(
        b"PK\x03\x04", 45 if wide else 20, 0x800, 0, 0, 0, 0, narrow, narrow, len(name), len(extra)
    )
    head += name + extra
    start, count = len(head) + nbytes, len(records) + 1
    tail = bytes(directory)
    if start >= FULL:
        tail += END64.pack(b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, len(directory), start)
        tail += LOCATOR.pack(b"PK\x06\x07", 0, start + len(directory), 1)
    tail += END.pack(b"PK\x05\x06", 0, 0, count, count, len(directory), min(start, FULL), 0)
    return Framing(bytes(head), tail)


def _central(name: bytes, crc: int, size: int, header: int) -> bytes:
    """A directory entry."""
    wide = struct.pack("<HHQQ", 1, 16, size, size) if size >= FULL else b""
    version = 45 if wide else 20
    narrow = min(size, FULL)
    fields = (version, version, 0x800, 0, 0, 0, crc, narrow, narrow, len(name), len(wide), 0, 0, 0, 0, header)
    return CENTRAL.pack(b"PK\x01\x02", *fields) + name + wide


def _write_pickle(dtype: DType, shape: tuple[int, ...]) -> bytes:
    """``data.pkl``, in the protocol 2 that torch uses, without its memo."""
    strides = []
    volume = 1
    for extent in reversed(shape):
        strides.append(volume)
        volume *= max(extent, 1)
    elements = 0 if 0 in shape else volume
    typed = _STORAGE_OF.get(dtype.torch_name)
    storage = f"ctorch\n{typed}\n" if typed else "ctorch.storage\nUntypedStorage\n"
    last = b"" if typed else f"ctorch\n{dtype.torch_name}\n".encode()
    return b"".join(
        (
            f"\x80\x02ctorch._utils\n_rebuild_tensor_{'v2' if typed else 'v3'}\n((".encode("latin-1"),
            b"X\x07\x00\x00\x00storage" + storage.encode() + b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpu",
            _write_int(elements if typed else elements * dtype.itemsize) + b"tQK\x00",
            b"(" + b"".join(map(_write_int, shape)) + b"t",
            b"(" + b"".join(map(_write_int, reversed(strides))) + b"t",
            b"\x89ccollections\nOrderedDict\n)R" + last + b"tR.",
        )
    )


def _write_int(value: int) -> bytes:
    if value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    return b"\x8a\x08" + struct.pack("<q", value)
