"""Items of a torch_dist checkpoint: where a tensor's bytes lie inside of the file that ``torch.save`` makes of it, and what stands around them.

Every chunk of a torch_dist checkpoint is such a file, a ZIP archive inside a larger file. Its records, all stored without
compression: ``archive/data.pkl``, a pickle of a call of ``torch._utils._rebuild_tensor_v2(storage, storage offset, size,
stride, ...)`` (``_v3`` with the dtype as last argument, where no storage class has that dtype), in which the storage is a
persistent reference ``("storage", class, key, "cpu", number of elements)``; ``archive/data/<key>``, the raw storage, at a
multiple of 64 bytes from the start of the archive, by padding in the extra field of its local header;
``archive/byteorder``, ``archive/version`` and others. Sources: torch/serialization.py and
caffe2/serialize/inline_container.cc of torch 2.13; APPNOTE.TXT of PKWARE for ZIP, ZIP64 in its section 4.3.14.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from functools import lru_cache

from weighbridge._core.dtypes import DTYPES, DType
from weighbridge._formats.torch_dist.pickles import (
    OTHER_DTYPES,
    Instance,
    Named,
    Persistent,
    allow,
    are_sizes,
    read_pickle,
)
from weighbridge.errors import DataLoss

ALIGNMENT = 64
"""torch's own: raw bytes begin at a multiple of it, counted from the start of the archive."""

_STORAGES = {
    "torch.BoolStorage": "bool",
    "torch.ByteStorage": "uint8",
    "torch.CharStorage": "int8",
    "torch.ShortStorage": "int16",
    "torch.HalfStorage": "float16",
    "torch.BFloat16Storage": "bfloat16",
    "torch.IntStorage": "int32",
    "torch.FloatStorage": "float32",
    "torch.LongStorage": "int64",
    "torch.DoubleStorage": "float64",
    "torch.ComplexFloatStorage": "complex64",
}
_STORAGE_OF = {dtype: name.removeprefix("torch.") for name, dtype in _STORAGES.items()}
_ITEMSIZES = {d.torch_name: d.itemsize for d in DTYPES}
_V2 = "torch._utils._rebuild_tensor_v2"
_V3 = "torch._utils._rebuild_tensor_v3"
_UNTYPED = "torch.storage.UntypedStorage"
_ALLOWED = allow(
    _V2,
    _V3,
    _UNTYPED,
    *_STORAGES,
    *(f"torch.{d.torch_name}" for d in DTYPES),
    *(f"torch.{n}" for n in OTHER_DTYPES),
)

_WHOLE = 4096
"""Archives up to this size are read at once, of larger ones this much in two parts, the first and the last bytes."""
_MAX_DIRECTORY = 1 << 16
_MAX_PICKLE = 1 << 12
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR = struct.Struct("<4sIQI")
_FULL = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as an archive has it: torch's name of its dtype, its shape, and its first byte in the archive."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _Described:
    """What ``data.pkl`` says of a tensor; sizes in bytes."""

    dtype: str
    shape: tuple[int, ...]
    key: str
    begin: int
    storage_nbytes: int


@dataclass(frozen=True, slots=True)
class Framing:
    """What surrounds the raw bytes of a tensor: together an archive that ``torch.load(weights_only=True)`` reads."""

    head: bytes
    tail: bytes


class _Archive:
    """Bytes of an archive inside an open file."""

    def __init__(self, fd: int, offset: int, length: int) -> None:
        self._fd = fd
        self._offset = offset
        self.length = length
        if length <= _WHOLE:
            self._head = self._pread(0, length)
            self._tail_begin, self._tail = 0, self._head
        else:
            self._head = self._pread(0, _WHOLE // 2)
            self._tail_begin = length - _WHOLE // 2
            self._tail = self._pread(self._tail_begin, length)

    def read(self, begin: int, end: int) -> bytes:
        if not 0 <= begin <= end <= self.length:
            raise DataLoss(f"its archive refers to the bytes {begin} to {end} of {self.length}")
        if end <= len(self._head):
            return self._head[begin:end]
        if begin >= self._tail_begin:
            return self._tail[begin - self._tail_begin : end - self._tail_begin]
        return self._pread(begin, end)

    def _pread(self, begin: int, end: int) -> bytes:
        data = os.pread(self._fd, end - begin, self._offset + begin)
        if len(data) != end - begin:
            raise DataLoss("the file ends inside of it")
        return data


def find_tensor(fd: int, offset: int, length: int) -> StoredTensor:
    """Find the raw bytes of the one tensor in an archive. Only the archive's directory and its pickle are read.

    Args:
        fd: the open file.
        offset: first byte of the archive in the file.
        length: its bytes; the caller has seen that the file is long enough.

    Raises:
        DataLoss: it is no such archive, or does not hold one dense row-major tensor in little-endian byte order.
    """
    archive = _Archive(fd, offset, length)
    records = _read_directory(archive)
    first = next(iter(records))
    prefix = first[: first.find(b"/") + 1]
    pickle_begin, pickle_end = _record(archive, records, prefix + b"data.pkl")
    if pickle_end - pickle_begin > _MAX_PICKLE:
        raise DataLoss(f"its pickle has {pickle_end - pickle_begin} bytes, more than any tensor's")
    described = _describe(archive.read(pickle_begin, pickle_end))
    if prefix + b"byteorder" in records:
        order = archive.read(*_record(archive, records, prefix + b"byteorder"))
        if order != b"little":
            raise DataLoss(f"its byte order is {order[:20]!r}, not little-endian")
    begin, end = _record(archive, records, prefix + b"data/" + described.key.encode())
    if end - begin != described.storage_nbytes:
        raise DataLoss(f"its storage has {end - begin} bytes, its pickle says {described.storage_nbytes}")
    return StoredTensor(described.dtype, described.shape, begin + described.begin)


def _read_directory(archive: _Archive) -> dict[bytes, tuple[int, int, int, int]]:
    """The records of an archive: name to (compression method, stored size, local header, end of all records)."""
    length = archive.length
    if length < _END.size:
        raise DataLoss(f"{length} bytes are too few for an archive of torch.save")
    end = length - _END.size
    magic, _, _, _, count, size, start, comment = _END.unpack(archive.read(end, length))
    if magic != b"PK\x05\x06" or comment:
        raise DataLoss("it does not end as an archive of torch.save does: cut short, or of another format")
    if _FULL in (size, start) or count == 0xFFFF:
        magic, _, end64, _ = _LOCATOR.unpack(archive.read(end - _LOCATOR.size, end))
        if magic != b"PK\x06\x07":
            raise DataLoss("its archive has no ZIP64 locator")
        fields = _END64.unpack(archive.read(end64, end64 + _END64.size))
        if fields[0] != b"PK\x06\x06":
            raise DataLoss("its archive has no ZIP64 directory")
        count, size, start = fields[7:]
    if size > _MAX_DIRECTORY or start + size > end:
        raise DataLoss(f"its archive has a directory of {size} bytes at {start}, in {length} bytes")
    data = archive.read(start, start + size)
    records: dict[bytes, tuple[int, int, int, int]] = {}
    position = 0
    while position < size:
        if position + _CENTRAL.size > size:
            raise DataLoss("the directory of its archive is cut short")
        entry = _CENTRAL.unpack_from(data, position)
        flags, method, packed, plain, name_length, extra_length = (entry[i] for i in (3, 4, 8, 9, 10, 11))
        header = entry[16]
        position += _CENTRAL.size
        name = data[position : position + name_length]
        if _FULL in (packed, plain, header):
            extra = data[position + name_length : position + name_length + extra_length]
            plain, packed, header = _wide_fields(extra, plain, packed, header)
        position += name_length + extra_length + entry[12]
        if (
            entry[0] != b"PK\x01\x02"
            or position > size
            or name in records
            or flags & 1
            or (not method and packed != plain)
        ):
            raise DataLoss("the directory of its archive is damaged")
        records[name] = (method, plain, header, start)
    if len(records) != count or not records:
        raise DataLoss(f"its archive has {len(records)} records and announces {count}")
    return records


def _wide_fields(extra: bytes, *narrow: int) -> list[int]:
    """Fields of a directory entry, those of them that are all ones taken from its ZIP64 extra field."""
    position = 0
    while position + 4 <= len(extra):
        tag, size = struct.unpack_from("<HH", extra, position)
        position += 4
        if tag == 1 and size >= 8 * narrow.count(_FULL) and position + size <= len(extra):
            wide = iter(struct.unpack_from(f"<{narrow.count(_FULL)}Q", extra, position))
            return [next(wide) if value == _FULL else value for value in narrow]
        position += size
    raise DataLoss("its archive has a record of more than 4 GiB without a ZIP64 field")


def _record(
    archive: _Archive, records: dict[bytes, tuple[int, int, int, int]], name: bytes
) -> tuple[int, int]:
    """Begin and end of a record's content in the archive."""
    if name not in records:
        raise DataLoss(f"its archive has no record {name[:80]!r}")
    method, size, header, limit = records[name]
    if method:
        raise DataLoss(f"the record {name[:80]!r} of its archive is compressed")
    local = _LOCAL.unpack(archive.read(header, header + _LOCAL.size))
    begin = header + _LOCAL.size + local[9] + local[10]
    found = archive.read(header + _LOCAL.size, header + _LOCAL.size + local[9])
    if local[0] != b"PK\x03\x04" or local[3] != 0 or found != name or begin + size > limit:
        raise DataLoss(f"the record {name[:80]!r} of its archive is not where the directory says")
    return begin, begin + size


# A model has few kinds of chunks, and all chunks of a kind have one pickle.
@lru_cache(maxsize=4096)
def _describe(pickle: bytes) -> _Described:
    """What ``data.pkl`` says, once that is found to be a dense row-major tensor."""
    call = read_pickle(pickle, _ALLOWED, "its pickle")
    if type(call) is not Instance or call.kind not in (_V2, _V3) or type(call.args) is not tuple:
        raise DataLoss("its pickle is not that of a plain tensor")
    wanted = 6 if call.kind == _V2 else 7
    # One more: flags of torch, of which the conjugate and the negative bit change the value of the bytes.
    if len(call.args) not in (wanted, wanted + 1) or (len(call.args) > wanted and call.args[-1]):
        raise DataLoss(
            "its pickle describes a tensor with a conjugate or negative bit, or of an unknown kind"
        )
    storage, first, shape, stride = call.args[:4]
    match storage:
        case Persistent(key=("storage", Named(name=kind), str(key), str(), int(elements))):
            pass
        case _:
            raise DataLoss("its pickle has no storage")
    if not key.isascii():
        raise DataLoss("its storage has a name that torch does not give")
    dtype = _STORAGES.get(kind)
    if call.kind == _V3 and type(call.args[6]) is Named:
        dtype = call.args[6].name.removeprefix("torch.")
    if dtype not in _ITEMSIZES:
        raise DataLoss(f"its storage is a {kind} of {dtype or 'unknown elements'}, which is not supported")
    itemsize = _ITEMSIZES[dtype]
    if not (are_sizes(shape) and are_sizes(stride) and are_sizes((first, elements))):
        raise DataLoss("its pickle has a size, a stride or an offset that is not a number")
    volume = _check_dense(shape, stride)
    storage_nbytes = elements if kind == _UNTYPED else elements * itemsize
    if (first + volume) * itemsize > storage_nbytes:
        raise DataLoss(f"its storage of {storage_nbytes} bytes is too small for {list(shape)} of {dtype}")
    return _Described(dtype, shape, key, first * itemsize, storage_nbytes)


def _check_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Number of elements of a row-major tensor; axes of one element may have any stride."""
    volume = 1
    dense = len(shape) == len(stride)
    for extent, step in zip(reversed(shape), reversed(stride), strict=False):
        dense = dense and (extent == 1 or step == volume)
        volume *= extent
    if volume and not dense:
        raise DataLoss(f"it is not dense and row-major: size {list(shape)}, stride {list(stride)}")
    return volume


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
        head += _LOCAL.pack(b"PK\x03\x04", 20, 0x800, 0, 0, 0, crc, len(content), len(content), len(name), 0)
        head += name + content
    name = b"archive/data/0"
    directory += _central(name, 0, nbytes, len(head))
    wide = struct.pack("<HHQQ", 1, 16, nbytes, nbytes) if nbytes >= _FULL else b""
    fill = -(len(head) + _LOCAL.size + len(name) + len(wide) + 4) % ALIGNMENT
    # "FB" is the tag that torch gives its padding.
    extra = wide + b"FB" + struct.pack("<H", fill) + b"Z" * fill
    narrow = min(nbytes, _FULL)
    head += _LOCAL.pack(
        b"PK\x03\x04", 45 if wide else 20, 0x800, 0, 0, 0, 0, narrow, narrow, len(name), len(extra)
    )
    head += name + extra
    start, count = len(head) + nbytes, len(records) + 1
    tail = bytes(directory)
    if start >= _FULL:
        tail += _END64.pack(b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, len(directory), start)
        tail += _LOCATOR.pack(b"PK\x06\x07", 0, start + len(directory), 1)
    tail += _END.pack(b"PK\x05\x06", 0, 0, count, count, len(directory), min(start, _FULL), 0)
    return Framing(bytes(head), tail)


def _central(name: bytes, crc: int, size: int, header: int) -> bytes:
    """A directory entry."""
    wide = struct.pack("<HHQQ", 1, 16, size, size) if size >= _FULL else b""
    version = 45 if wide else 20
    narrow = min(size, _FULL)
    fields = (version, version, 0x800, 0, 0, 0, crc, narrow, narrow, len(name), len(wide), 0, 0, 0, 0, header)
    return _CENTRAL.pack(b"PK\x01\x02", *fields) + name + wide


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
