"""Files of a stored version that this process reads itself, through descriptors that the service has granted.

They are not mapped: a page that cannot be read, because the disk reports an error or the file was cut short, would end
the process with SIGBUS.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from weighbridge._core.byte_copies import ByteCopy
from weighbridge._memory.file_reads import read_into
from weighbridge._memory.strided import view_bytes
from weighbridge.errors import DataLoss, ResourceExhausted

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A whole tensor as it lies in a file.

    Attributes:
        nbytes: its length.
        xxh3_128: digest of its bytes.
    """

    nbytes: int
    xxh3_128: bytes


class StoredFile:
    """File of this machine that the service has granted.

    Args:
        descriptor: of the file; stays the caller's.
        nbytes: the size that the service says it has.
        title: of the version.
        names: of the version's files in it, for messages.
        tensors: those in it, by their first bytes.

    Raises:
        DataLoss: it is shorter than the service says.
        ResourceExhausted: there is no descriptor left.
    """

    def __init__(
        self, descriptor: int, nbytes: int, title: str, names: str, tensors: Mapping[int, StoredTensor]
    ) -> None:
        try:
            self._descriptor = os.dup(descriptor)
        except OSError as error:
            raise ResourceExhausted(f"no file descriptor is left: {error}") from error
        weakref.finalize(self, os.close, self._descriptor)
        self._what = f"{names} of {title}"
        self._title = title
        self._tensors = tensors
        found = os.fstat(self._descriptor).st_size
        if found < nbytes:
            raise DataLoss(
                f"{self._what} has {found} bytes, and {nbytes} are needed", fix=self._fix, worth_retrying=0.0
            )

    @property
    def _fix(self) -> str:
        return f"`weighbridge verify {self._title}` reports what is left of it; restore the file from a backup"

    def read(self, copy: ByteCopy[int], target: Bytes, tensor: str) -> None:
        """Read the bytes of one copy. Those of a whole tensor are compared with its digest.

        Args:
            copy: where they lie.
            target: the bytes of the shard that they belong to.
            tensor: the name of the shard's tensor, for messages.

        Raises:
            DataLoss: they cannot be read, or do not agree.
        """
        whole = self._tensors.get(copy.file_offset) if copy.dense else None
        digest = xxhash.xxh3_128() if whole is not None and whole.nbytes == copy.nbytes else None

        def took(_offset: int, run: Bytes) -> None:
            if digest is not None:
                digest.update(run.data)

        part = view_bytes(target, copy.stream_offset, copy.extent, copy.stream_strides)
        try:
            read_into(self._descriptor, part, copy.file_offset, copy.file_strides, took)
        except (OSError, EOFError) as error:
            said = error.strerror if isinstance(error, OSError) else str(error)
            raise DataLoss(
                f"{tensor} in {self._what} cannot be read: {said}", fix=self._fix, worth_retrying=0.0
            ) from error
        if whole is not None and digest is not None and digest.digest() != whole.xxh3_128:
            raise DataLoss(
                f"{tensor} in {self._what} does not agree with its digest", fix=self._fix, worth_retrying=0.0
            )
