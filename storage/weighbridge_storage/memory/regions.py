"""Regions of memory or disk that contain images, and their descriptors in other processes.

A region is a piece of shared memory, or of an unlinked file on local disk. Each other process gets a newly opened
descriptor, so that the kernel counts it: the kernel then knows whether any other process could still write. It could
not distinguish a duplicated descriptor from ours. The service queries the kernel only about processes that have not
reported the end of their writes.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import itertools
import logging
import mmap
import os
import signal
import tempfile
import threading
import uuid
import weakref
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from weighbridge._memory.paging import COLLAPSE, HUGE_PAGE, POPULATE_WRITE, advise, map_aligned
from weighbridge_storage.stores.objects import ByteArray, error_for

log = logging.getLogger(__name__)

PAGE = mmap.PAGESIZE
_STEP_BYTES = 256 << 20
"""Number of bytes that are allocated at a time."""

_serials = itertools.count(1)
_BOOT = uuid.uuid4().hex
"""Part of the keys, because clients may have stored keys of an earlier process."""


class _PlainPages:
    """State of the fallback to small pages on this machine, which is logged once.

    Attributes:
        reason: reason why huge pages are no longer tried; empty while they are tried.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._told = False

    def tell(self, error: OSError) -> None:
        """Record that huge pages could not be created, now or ever."""
        if error.errno in (errno.EINVAL, errno.ENOSYS, errno.EPERM):
            self.reason = str(error)
        if not self._told:
            self._told = True
            log.warning(
                "images use small pages, at least in part, which makes fresh memory and its "
                "first use slower: %s (madvise(2), "
                "MADV_COLLAPSE, needs Linux 6.1 with transparent huge pages, and free memory in pieces of 2 MiB)",
                error.strerror,
            )


_plain_pages = _PlainPages()


class Region:
    """A piece of shared memory, or of an unlinked file. All of its space is reserved.

    Args:
        capacity: bytes; a multiple of `PAGE`, at least one.
        folder: folder of the file; None for shared memory.
        on_allocated: called with numbers of bytes as they are allocated, which takes time. The last call precedes the
            return of the constructor.

    Raises:
        ResourceExhausted: memory or disk does not have enough space.

    Attributes:
        key: identifies the region among all regions of all processes.
        in_memory: whether it is shared memory.
        model: model of the image that used it last; empty before the first use. The caller sets it.
    """

    def __init__(
        self, capacity: int, folder: str | None, on_allocated: Callable[[int], None] = lambda _nbytes: None
    ) -> None:
        self.key = f"{_BOOT}-{next(_serials)}"
        self.capacity = capacity
        self.in_memory = folder is None
        self.model = ""
        what = f"making an image of {capacity} bytes in {'memory' if folder is None else folder}"
        try:
            self.fd = _open_memory() if folder is None else _open_unlinked(folder, capacity)
            self._release = weakref.finalize(self, os.close, self.fd)
            self._asking = threading.Lock()
            self._doubted: list[Callable[[], bool]] = []
            self._left_open = False
            try:
                os.ftruncate(self.fd, capacity)
                protection = mmap.PROT_READ | mmap.PROT_WRITE
                self._map, offset = map_aligned(self.fd, capacity, mmap.MAP_SHARED, protection)
                self.writable: ByteArray = np.frombuffer(self._map, np.uint8, capacity, offset)
                for start in range(0, capacity, _STEP_BYTES):
                    nbytes = min(_STEP_BYTES, capacity - start)
                    if self.in_memory:
                        self._make_huge(start, nbytes)
                    # Without this, a full disk would raise SIGBUS in the middle of a copy.
                    os.posix_fallocate(self.fd, start, nbytes)
                    on_allocated(nbytes)
                if folder is None:
                    # Otherwise a process with the descriptor could truncate the memory.
                    fcntl.fcntl(
                        self.fd,
                        fcntl.F_ADD_SEALS,
                        fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW,
                    )
                os.fchmod(self.fd, 0o600)  # a descriptor for reading must not give access to one for writing
            except BaseException:
                self._release()
                for name in ("writable", "_map"):  # the error keeps this object, but must not keep its memory
                    self.__dict__.pop(name, None)
                raise
        except OSError as error:
            raise error_for(error, what) from error
        if self.in_memory:
            # A file's pages are not touched, because an image in a file is too large for memory.
            with suppress(OSError):  # an older kernel: the first copies will fault the pages in
                advise(self.writable.ctypes.data, capacity, POPULATE_WRITE)
        read_only = memoryview(self._map).toreadonly()
        self.readable: ByteArray = np.frombuffer(read_only, np.uint8, capacity, offset)

    def _make_huge(self, start: int, nbytes: int) -> None:
        """Allocate a part of shared memory in huge pages, as far as the system has any.

        This takes a tenth of the time.
        """
        pages = range(start, start + nbytes - HUGE_PAGE + 1, HUGE_PAGE)
        address = self.writable.ctypes.data
        if not pages or address % HUGE_PAGE or _plain_pages.reason:
            return
        for page in pages:
            os.posix_fallocate(self.fd, page, PAGE)  # MADV_COLLAPSE skips empty ranges
        try:
            advise(address + start, len(pages) * HUGE_PAGE, COLLAPSE)
        except OSError as error:
            _plain_pages.tell(error)

    def reopen(self, *, writable: bool) -> int:
        """A descriptor for another process. The caller closes it after sending it.

        A process with the descriptor can map the region, and keeps its memory until it closes both.

        Args:
            writable: whether the descriptor allows writes.

        Raises:
            OSError: ``/proc`` does not exist, or no descriptor is left.
        """
        flags = os.O_RDWR if writable else os.O_RDONLY
        return os.open(f"/proc/self/fd/{self.fd}", flags | os.O_CLOEXEC)

    def doubt(self, exited: Callable[[], bool]) -> None:
        """Record that a process with write access has not reported the end of its writes.

        Args:
            exited: returns whether that process is known to have ended.
        """
        with self._asking:
            self._doubted.append(exited)

    def may_change(self) -> bool:
        """Whether one of these processes may still write to the region: it may be alive, and some process has the
        region open for writing.

        For a region on disk, processes that can only read also count: the kernel cannot distinguish them because this
        process has the region open for writing.
        """
        with self._asking:
            self._doubted = [exited for exited in self._doubted if not exited()]
            if self._doubted and not self._is_open_elsewhere(fcntl.F_RDLCK):
                self._doubted = []
            return bool(self._doubted)

    def left_open(self) -> None:
        """Record that a process that was reading the region has disconnected without releasing it, and may still have
        it mapped.
        """
        self._left_open = True

    @property
    def was_left_open(self) -> bool:
        """Whether `left_open` was called, and that process may still have it mapped."""
        return self._left_open

    def in_use_elsewhere(self) -> bool:
        """Whether the region must not be reused: it `may_change`, or a process that `left_open` recorded may still read
        it.
        """
        if self.may_change():
            return True
        with self._asking:
            if self._left_open:
                self._left_open = self._is_open_elsewhere(fcntl.F_WRLCK)
            return self._left_open

    def _is_open_elsewhere(self, kind: int) -> bool:
        """Whether other processes can write to the region (F_RDLCK), or have it open at all (F_WRLCK)."""
        try:
            if not self.in_memory:
                return not _can_be_leased(self.fd, fcntl.F_WRLCK)
            # the kernel does not count the descriptor that created the memory, only later ones
            fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                return not _can_be_leased(fd, kind)
            finally:
                os.close(fd)
        except OSError:
            return True  # assume that a process has it open; callers check again

    def close(self) -> None:
        """Return the region to the system. Its memory stays allocated as long as a caller keeps an array over it."""
        del self.writable, self.readable, self._map
        self._release()


def _open_memory() -> int:
    return os.memfd_create("weighbridge-image", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def _open_unlinked(folder: str, capacity: int) -> int:
    """A new file without a name, if the disk has space for it."""
    status = os.statvfs(folder)
    if status.f_bavail * status.f_frsize < capacity:
        # Raise before the disk is full, because other processes may be writing to it.
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), folder)
    with tempfile.TemporaryFile(dir=folder, prefix=".image-", buffering=0) as file:
        return os.dup(file.fileno())


def _can_be_leased(fd: int, kind: int) -> bool:
    """Whether the kernel grants a file lease: F_RDLCK if no process has the file open for writing, F_WRLCK if no other
    has it open.

    Source: fcntl(2), "Leases".
    """
    # the default signal for a broken lease ends a process; SIGURG is ignored by default
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, kind)
    except BlockingIOError:
        return False
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True


@functools.cache
def why_not_granted() -> str:
    """Reason why regions cannot be shared with other processes on this machine; empty if they can.

    Tested once: the kernel must report a second descriptor, for writing and for reading, and the closing of the
    descriptor.
    """
    try:
        region = Region(PAGE, None)
        try:
            seen = [region.in_use_elsewhere()]
            for writable in (True, False):
                protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
                fd = region.reopen(writable=writable)
                if writable:
                    region.doubt(lambda: False)
                else:
                    region.left_open()
                with mmap.mmap(fd, PAGE, prot=protection):
                    os.close(fd)
                    seen.append(region.in_use_elsewhere())
                seen.append(region.in_use_elsewhere())
        finally:
            region.close()
    except OSError as error:
        return f"this system cannot report which processes use shared memory: {error}"
    return (
        ""
        if seen == [False, True, False, True, False]
        else "this system does not report reliably which processes use shared memory"
    )
