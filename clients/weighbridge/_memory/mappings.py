"""Shared memory of the service as this process maps it."""

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
"""Linux's; a private mapping of a file larger than memory would be refused otherwise."""


_mapping = threading.Lock()
_pinning = threading.Lock()
"""A process is not forked between a mapping and the advice not to give it to children."""


class Use(Enum):
    """What memory is mapped for."""

    WRITE = (mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    """What is written is meant for the service."""
    READ = (mmap.MAP_SHARED, mmap.PROT_READ)
    """It is only copied from."""
    VIEW = (mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE)
    """It is handed out. Who writes to it changes a copy of his own of the page, and nobody else sees that."""


class MappedMemory:
    """A mapping of memory that was lent.

    Args:
        descriptor: of the memory; stays the caller's.
        key: the memory's name.
        nbytes: its size.
        use: what for. GPUs are given no access to a view: CUDA would make a copy of every page of it.

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
            raise ResourceExhausted(
                f"{nbytes} bytes of the service's memory cannot be mapped: {error}"
            ) from error

    @cached_property
    def bytes(self) -> NDArray[np.uint8]:
        """All of it."""
        return np.frombuffer(self._map, np.uint8, self.nbytes, self._offset)

    @cached_property
    def tensor(self) -> torch.Tensor:
        """All of it. Of memory that is mapped for reading it must not be written to."""
        import torch

        if not self.bytes.flags.writeable:
            # torch would warn of an array that is not writable, and only that can be told it
            view: Any = (ctypes.c_ubyte * self.nbytes).from_address(self.bytes.ctypes.data)
            view.mapping = self.bytes  # which keeps it from being undone
            return torch.frombuffer(view, dtype=torch.uint8)
        return torch.from_numpy(self.bytes)

    @property
    def address(self) -> int:
        """Of its first byte in this process."""
        return int(self.bytes.ctypes.data)

    @property
    def pinned(self) -> bool:
        """Whether GPUs copy from and to it directly."""
        return self._unpin is not None

    def pin(self) -> None:
        """Let GPUs copy from and to it directly, from now on until it is unmapped.

        Raises:
            FailedPrecondition, ResourceExhausted: that cannot be; says why.
        """
        if not self._pinnable:
            raise FailedPrecondition("memory that is only borrowed for one pull is not registered with CUDA")
        with _pinning:
            if self._unpin is not None:
                return
            from weighbridge._memory import cuda_copies

            unregister = cuda_copies.register(self.address, self.nbytes, read_only=self._use is Use.READ)
            # runs before the mapping goes, also if nobody closes it
            self._unpin = weakref.finalize(self, unregister)

    def exported(self) -> Any:
        """An object that gives access to the mapping, and keeps it as long as anything refers to that object."""
        return (ctypes.c_ubyte * self.nbytes).from_buffer(self._map, self._offset)

    def populate(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Enter pages into this process's page table before they are needed.

        Reading does it for several pages at a time, and those of shared memory can be written to after that.

        Args:
            ranges: first byte and one past the last of each.
        """
        start_of_all = self.address
        for start, end in ranges:
            first = start - start % mmap.PAGESIZE
            try:
                advise(start_of_all + first, end - first, POPULATE_READ)
            except OSError:
                return  # they are entered when they are touched

    def abandon(self) -> None:
        """Let go of the mapping in a process that was forked: CUDA's registration belongs to its parent."""
        if self._unpin is not None:
            self._unpin.detach()
            self._unpin = None
        if self._use is Use.WRITE:
            # it is not there: undoing it, at the end of the process at the latest, would undo whatever lies there by then
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.__dict__.pop("_map")))
        else:
            self.close()

    def close(self) -> None:
        """Undo the mapping: now if no array, tensor or exported object is left of it, and with the last of them otherwise."""
        if self._unpin is not None:
            self._unpin()
        self.__dict__.pop("bytes", None)
        self.__dict__.pop("tensor", None)
        with contextlib.suppress(BufferError):
            self._map.close()
        del self._map


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges in order, those that are at most a page apart as one."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1] + mmap.PAGESIZE:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


_for_writing: weakref.WeakSet[MappedMemory] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """A process that was forked has no part in what its parent writes, and nothing of it is mapped there."""
    _mapping.release()
    for memory in list(_for_writing):
        with contextlib.suppress(AttributeError):
            memory.abandon()


os.register_at_fork(
    before=_mapping.acquire, after_in_parent=_mapping.release, after_in_child=_let_go_in_child
)
