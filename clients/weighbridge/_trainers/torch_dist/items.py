"""Tensors in files of ``torch.save``: the places of their bytes, and the framing around them.

In the pickle a tensor is a call of ``torch._utils._rebuild_tensor_v2(storage, storage offset, size, stride, ...)``
(``_v3`` with the dtype as last argument, where no storage class has that dtype), in which the storage is a persistent
reference ``("storage", class, key, location, number of elements)``; the record ``data/<key>`` contains its bytes.
Source: torch/_utils.py and torch/serialization.py of torch 2.13.

Every chunk of a torch_dist checkpoint is such a file with one tensor, inside a larger file. Padding in the extra field
of its local header places its raw storage at a multiple of 64 bytes from the start of the archive.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import lru_cache

from weighbridge._core.dtypes import DTYPES, DType
from weighbridge._core.layouts import MAX_RANK
from weighbridge._trainers.torch_dist.archives import Archive
from weighbridge._trainers.torch_dist.names import KNOWN, STORAGES
from weighbridge._trainers.torch_dist.pickles import Instance, Persistent, PickledName, are_sizes, read_pickle
from weighbridge.errors import DataLoss

ALIGNMENT = 64
"""Torch's alignment: raw bytes begin at a multiple of it, relative to the start of the archive."""

_MAX_DIRECTORY = 1 << 16
_MAX_PICKLE = 1 << 12
_ITEMSIZES = {d.torch_name: d.itemsize for d in DTYPES}
_V2 = "torch._utils._rebuild_tensor_v2"
_V3 = "torch._utils._rebuild_tensor_v3"
_UNTYPED = "torch.storage.UntypedStorage"


@dataclass(frozen=True, slots=True)
class ArchivedTensor:
    """A tensor in an archive: torch's name of its dtype, its shape, and the offset of its first byte in the archive."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class DescribedTensor:
    """Description of a tensor in a pickle.

    Attributes:
        dtype: torch's name of the dtype.
        shape: shape of the tensor.
        key: key of the storage.
        begin: offset of the first byte in the storage.
        storage_nbytes: size of the storage in bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    key: str
    begin: int
    storage_nbytes: int


def described(call: object) -> DescribedTensor:
    """Read the description of a dense row-major tensor.

    Args:
        call: result of `read_pickle`.

    Raises:
        DataLoss: the pickle does not describe such a tensor.
    """
    if type(call) is not Instance or call.kind not in (_V2, _V3) or type(call.args) is not tuple:
        raise DataLoss("its pickle does not contain a plain tensor")
    wanted = 6 if call.kind == _V2 else 7
    # One more argument contains torch's flags, of which the conjugate and the negative bit change the meaning of the
    # bytes.
    if len(call.args) not in (wanted, wanted + 1) or (len(call.args) > wanted and call.args[-1]):
        raise DataLoss("its pickle describes a tensor with a conjugate or negative bit, or of an unknown kind")
    storage, first, shape, stride = call.args[:4]
    match storage:
        case Persistent(key=("storage", PickledName(name=kind), str(key), str(), int(elements))):
            pass
        case _:
            raise DataLoss("its pickle has no storage")
    if not key.isascii():
        raise DataLoss("its storage has a name that torch does not use")
    dtype = STORAGES.get(kind)
    if call.kind == _V3 and type(call.args[6]) is PickledName:
        dtype = call.args[6].name.removeprefix("torch.")
    if dtype not in _ITEMSIZES:
        raise DataLoss(f"its storage is a {kind} of {dtype or 'unknown elements'}, which is not supported")
    itemsize = _ITEMSIZES[dtype]
    if not (are_sizes(shape) and are_sizes(stride) and are_sizes((first, elements))):
        raise DataLoss("its pickle has a size, a stride or an offset that is not a number")
    if len(shape) > MAX_RANK:
        raise DataLoss(f"it has {len(shape)} axes, more than {MAX_RANK}")
    volume = _check_dense(shape, stride)
    storage_nbytes = elements if kind == _UNTYPED else elements * itemsize
    if (first + volume) * itemsize > storage_nbytes:
        raise DataLoss(f"its storage of {storage_nbytes} bytes is too small for {list(shape)} of {dtype}")
    return DescribedTensor(dtype, shape, key, first * itemsize, storage_nbytes)


def located(found: DescribedTensor, archive: Archive) -> ArchivedTensor:
    """Find a tensor's bytes in the archive whose pickle describes it. Raises DataLoss if its storage is missing or
    differs from the description.
    """
    begin, end = archive.record(b"data/" + found.key.encode())
    if end - begin != found.storage_nbytes:
        raise DataLoss(f"its storage has {end - begin} bytes, but its pickle declares {found.storage_nbytes}")
    return ArchivedTensor(found.dtype, found.shape, begin + found.begin)


def _check_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Return the number of elements of a row-major tensor. Axes with one element may have any stride."""
    volume = 1
    dense = len(shape) == len(stride)
    for extent, step in zip(reversed(shape), reversed(stride), strict=False):
        dense = dense and (extent == 1 or step == volume)
        volume *= extent
    if volume and not dense:
        raise DataLoss(f"it is not dense and row-major: size {list(shape)}, stride {list(stride[:MAX_RANK])}")
    return volume


@dataclass(frozen=True, slots=True)
class Framing:
    """Bytes before and after the raw bytes of a tensor.

    All three form an archive that ``torch.load(weights_only=True)`` reads.
    """

    head: bytes
    tail: bytes


def find_tensor(fd: int, offset: int, length: int) -> ArchivedTensor:
    """Find the raw bytes of the one tensor in an archive. Only the archive's directory and its pickle are read.

    Args:
        fd: the open file.
        offset: first byte of the archive in the file.
        length: bytes of the archive; the caller has checked that the file is long enough.

    Raises:
        DataLoss: this is not such an archive, or it does not contain exactly one dense row-major tensor in
            little-endian byte order.
    """
    archive = Archive(fd, offset, length, _MAX_DIRECTORY)
    return located(_describe(archive.pickle(_MAX_PICKLE)), archive)


# A model has few kinds of chunks, and all chunks of a kind have the same pickle.
@lru_cache(maxsize=4096)
def _describe(pickle: bytes) -> DescribedTensor:
    return described(read_pickle(pickle, KNOWN, "its pickle"))


def frame(dtype: DType, shape: tuple[int, ...]) -> Framing:
    """Return the bytes that ``torch.save`` writes before and after the raw bytes of a dense tensor.

    The raw bytes begin at a multiple of `ALIGNMENT` from the start of the archive.

    The CRC-32 of the raw record is 0 in the archive, because computing it would require the data. Torch's reader does
    not check it (with ``torch.serialization.set_crc32_options(False)`` torch does not write one either), but other
    readers of ZIP archives would reject the archive.
    """
    import torch

    tensor = torch.empty(shape, dtype=dtype.torch, device="cpu")  # its pages are never accessed
    file = _WithoutData()
    with torch.serialization.skip_data():
        torch.save(tensor, file)
    written, name = file.getvalue(), b"archive/data/0"
    at = written.index(name)  # in the record's header, after the length of the next field
    begin = at + len(name) + int.from_bytes(written[at - 2 : at], "little")
    return Framing(written[:begin], written[begin:])


class _WithoutData(io.BytesIO):
    """A file in which the data that torch skips does not occupy memory."""

    def seek(self, *_: int) -> int:
        """Do not move."""
        return self.tell()
