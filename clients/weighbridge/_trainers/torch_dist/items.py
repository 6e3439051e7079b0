"""Items of a torch_dist checkpoint: where a tensor's bytes lie inside of the file that ``torch.save`` makes of it, and what stands around them.

Every chunk of a torch_dist checkpoint is such a file, a ZIP archive inside a larger file. Its records, all stored without compression:
``archive/data.pkl``, the pickle of the one tensor (`stored_tensors`); ``archive/data/0``, the raw storage, at a multiple of 64 bytes from the
start of the archive, by padding in the extra field of its local header; ``archive/byteorder``, ``archive/version`` and others.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import lru_cache

from weighbridge._core.dtypes import DType
from weighbridge._trainers.torch_dist.archives import Archive
from weighbridge._trainers.torch_dist.names import KNOWN
from weighbridge._trainers.torch_dist.pickles import read_pickle
from weighbridge._trainers.torch_dist.stored_tensors import (
    DescribedTensor,
    StoredTensor,
    described,
    located,
)

ALIGNMENT = 64
"""torch's own: raw bytes begin at a multiple of it, counted from the start of the archive."""

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
    return described(read_pickle(pickle, KNOWN, "its pickle"))


def frame(dtype: DType, shape: tuple[int, ...]) -> Framing:
    """What ``torch.save`` puts before and after the raw bytes of a dense tensor.

    The raw bytes begin at a multiple of `ALIGNMENT` from the start of the archive.

    The CRC-32 of the raw record is 0 in the archive: it would need the data, and torch's reader is built without a check
    of it (``torch.serialization.set_crc32_options(False)`` makes torch write none either). Other readers of ZIP archives
    would complain.
    """
    import torch

    tensor = torch.empty(shape, dtype=dtype.torch, device="cpu")  # no page of it is touched
    file = _WithoutData()
    with torch.serialization.skip_data():
        torch.save(tensor, file)
    written, name = file.getvalue(), b"archive/data/0"
    at = written.index(name)  # in its header, which says just before how much stands behind the name
    begin = at + len(name) + int.from_bytes(written[at - 2 : at], "little")
    return Framing(written[:begin], written[begin:])


class _WithoutData(io.BytesIO):
    """A file in which what torch leaves open takes no room."""

    def seek(self, *_: int) -> int:
        """Stay."""
        return self.tell()
