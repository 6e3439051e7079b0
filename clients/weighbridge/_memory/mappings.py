"""The service's shared memory, mapped into this process."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Iterable
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from weighbridge._memory.paging import DO_NOT_FORK, POPULATE_READ, advise, map_aligned
from weighbridge.errors import FailedPrecondition, ResourceExhausted

if TYPE_CHECKING:
    import torch

_MAP_NORESERVE = 0x4000
"""Linux's flag; without it, a private mapping of a file larger than memory would be refused."""


_mapping = threading.Lock()
_pinning = threading.Lock()
"""Keeps the process from being forked between a mapping and the advice to exclude it from children."""


class Use(Enum):
    """Purpose of a mapping."""

    WRITE = (mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    """The service reads what is written."""
    READ = (mmap.MAP_SHARED, mmap.PROT_READ)
    """The memory is only copied from."""
    VIEW = (mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE)
    """Arrays over the memory are handed out.

    A write to one changes a private copy of the page, which no other process sees.
    """


class MappedMemory:
    """A mapping of memory that the service has granted.

    Args:
        descriptor: descriptor of the memory; the caller closes it.
        key: the memory's name.
        nbytes: its size.
        use: purpose of the mapping. GPUs are given no access to a view: CUDA would make a copy of every page of it.

    Raises:
        ResourceExhausted: it cannot be mapped.
    """

    def __init__(self, descriptor: int, key: str, nbytes: int, use: Use) -> None:
        self.key = key
        self._pinnable = use is not Use.VIEW
        self.nbytes = nbytes
        self._use = use
        self._unpin: weakref.finalize[..., MappedMemory] | None = None
        if use is Use.WRITE:
            _for_writing.add(self)
        flags, protection = use.value
        try:
            with _mapping:
                self._map, self._offset = map_aligned(descriptor, nbytes, flags, protection)
                if use is Use.WRITE:
                    advise(self.address, nbytes, DO_NOT_FORK)
        except (OSError, ValueError) as error:
            raise ResourceExhausted(f"{nbytes} bytes of the service's memory cannot be mapped: {error}") from error

    @cached_property
    def bytes(self) -> NDArray[np.uint8]:
        """All of its bytes."""
        return np.frombuffer(self._map, np.uint8, self.nbytes, self._offset)

    @cached_property
    def tensor(self) -> torch.Tensor:
        """All of its bytes, as a tensor. Must not be written to if the memory is mapped for reading."""
        import torch

        if not self.bytes.flags.writeable:
            # torch would warn about a read-only array, and only a ctypes buffer hides that from it
            view: Any = (ctypes.c_ubyte * self.nbytes).from_address(self.bytes.ctypes.data)
            view.mapping = self.bytes  # keeps the mapping alive
            return torch.frombuffer(view, dtype=torch.uint8)
        return torch.from_numpy(self.bytes)

    @property
    def address(self) -> int:
        """Address of its first byte in this process."""
        return int(self.bytes.ctypes.data)

    @property
    def pinned(self) -> bool:
        """Whether GPUs copy from and to it directly."""
        return self._unpin is not None

    def pin(self) -> None:
        """Let GPUs copy from and to it directly until it is unmapped.

        Raises:
            FailedPrecondition, ResourceExhausted: that is not possible; the message says why.
        """
        if not self._pinnable:
            raise FailedPrecondition("memory that is mapped for only one pull is not registered with CUDA")
        with _pinning:
            if self._unpin is not None:
                return
            from weighbridge._memory import cuda_copies

            unregister = cuda_copies.register(self.address, self.nbytes, read_only=self._use is Use.READ)
            # runs before the mapping is undone, also if `close` is never called
            self._unpin = weakref.finalize(self, unregister)

    def exported(self) -> Any:
        """An object over the mapping, which keeps the mapping alive as long as there is a reference to the object."""
        return (ctypes.c_ubyte * self.nbytes).from_buffer(self._map, self._offset)

    def populate(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Enter pages into this process's page table before they are needed.

        A read access enters several pages at a time, and pages of shared memory can be written to after that.

        Args:
            ranges: first byte of each range, and the byte after its last.
        """
        start_of_all = self.address
        for start, end in ranges:
            first = start - start % mmap.PAGESIZE
            try:
                advise(start_of_all + first, end - first, POPULATE_READ)
            except OSError:
                return  # they are entered when they are accessed

    def abandon(self) -> None:
        """Release the mapping in a forked process: CUDA's registration belongs to its parent."""
        if self._unpin is not None:
            self._unpin.detach()
            self._unpin = None
        if self._use is Use.WRITE:
            # it does not exist here: undoing it, by the end of the process at the latest, would undo a later mapping at
            # the same address
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.__dict__.pop("_map")))
        else:
            self.close()

    def close(self) -> None:
        """Undo the mapping: now if no array, tensor or exported object over it is left, otherwise with the last of
        them.
        """
        if self._unpin is not None:
            self._unpin()
        self.__dict__.pop("bytes", None)
        self.__dict__.pop("tensor", None)
        with contextlib.suppress(BufferError):
            self._map.close()
        del self._map


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges in order; those that are at most a page apart are merged."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1] + mmap.PAGESIZE:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


_for_writing: weakref.WeakSet[MappedMemory] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """Release mappings for writing in a forked process: they do not exist there, and its parent goes on writing."""
    _mapping.release()
    for memory in list(_for_writing):
        with contextlib.suppress(AttributeError):
            memory.abandon()


os.register_at_fork(before=_mapping.acquire, after_in_parent=_mapping.release, after_in_child=_let_go_in_child)
