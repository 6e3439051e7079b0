"""Cache for reads of parts of files in a remote store, as if the files were local.

Files are fetched in blocks, into one sparse file on disk for each version. Two rules prevent deadlocks of readers. A
copy pins either all of its blocks at once or none of them, and releases them when it ends. Prefetched blocks use at
most half of the budget, so that there is always space for copies.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from weighbridge.errors import DataLoss, InvalidArgument, Unavailable, WeighbridgeError
from weighbridge_storage.cache.block_books import Block, BlockBooks, Key
from weighbridge_storage.cache.block_file import BlockFile
from weighbridge_storage.cache.strides import blocks_touched, widest_axis
from weighbridge_storage.memory.file_bytes import FileBytes, unreadable
from weighbridge_storage.memory.images import place_files
from weighbridge_storage.memory.read_checks import DigestedRange, parts_between
from weighbridge_storage.stores.objects import ByteArray, error_for

log = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 20
"""Bytes of a block: small enough that the extra bytes fetched at the edges of a slice are cheap."""
_RUN_BLOCKS = 8
"""Maximum number of adjacent blocks in one GET. With so many, the wait for the first byte is insignificant."""
FEWEST_BLOCKS = 4
"""Minimum number of blocks in a budget: two for a copy, and two for prefetching."""
_COPY_BLOCKS = 64
"""Maximum number of blocks that one copy pins. A copy that touches more is split."""
_THREADS = 16

Fetch = Callable[[str, int, int], bytes]
"""Fetch a range of a file: called with its name, offset and number of bytes."""


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """Contents of a cache, and totals since its creation.

    Attributes:
        nbytes: bytes of its blocks, including blocks that are being fetched.
        fetched: bytes that came from the store.
        hits: requested blocks that were cached and had no pin.
        misses: requested blocks that had to be fetched.
    """

    nbytes: int
    fetched: int
    hits: int
    misses: int


class _Files:
    """The files of one version: their places in one sparse file, and their cached blocks."""

    def __init__(
        self,
        title: str,
        sizes: Mapping[str, int],
        fetch: Fetch,
        digests: Mapping[str, Sequence[DigestedRange]],
        folder: Path,
    ) -> None:
        self.title = title
        self.sizes = dict(sizes)
        self.offsets, total = place_files(sizes)
        self.disk = BlockFile(folder, total)
        self.fetch = fetch
        self.digests = digests
        self.checked: set[str] = set()
        self.lacking: dict[str, int] = {}  # by part that is not checked yet, a block that had not arrived
        self.blocks: dict[Key, _Block] = {}

    def place(self, block: _Block) -> int:
        """Offset of a block in the sparse file."""
        return self.offsets[block.key[0]] + block.offset


_Block: TypeAlias = Block[_Files]


def _discard(block: _Block) -> None:
    block.owner.disk.discard(block.owner.place(block), block.room)


class _Use:
    """Owner of a version's files. It is garbage-collected with the last `CachedBytes` of the version."""


class BlockCache:
    """Blocks of files, in a folder, within a budget. Thread-safe.

    Args:
        folder: folder of the sparse files; created when it is first needed.
        budget: maximum bytes on disk.
        block: bytes of a block; a multiple of the page size.

    Raises:
        InvalidArgument: the budget is below `FEWEST_BLOCKS` blocks.
    """

    def __init__(self, folder: Path, budget: int, block: int = BLOCK_BYTES) -> None:
        if budget < FEWEST_BLOCKS * block:
            raise InvalidArgument(
                f"a read cache of {budget} bytes is too small",
                fix=f"use a budget of at least {FEWEST_BLOCKS * block} bytes",
            )
        self._folder = folder
        self._block = block
        self._copy_blocks = min(_COPY_BLOCKS, budget // 2 // block)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="read-cache")
        self._changed = threading.Condition()
        self._books: BlockBooks[_Files] = BlockBooks(budget, _discard)
        self._forgotten: deque[_Files] = deque()  # finalizers, which must not take a lock, append to it
        self._fetched = 0

    def open(
        self,
        title: str,
        sizes: Mapping[str, int],
        fetch: Fetch,
        digests: Mapping[str, Sequence[DigestedRange]],
    ) -> dict[str, CachedBytes]:
        """The files of a version. Does not fetch any block yet. When all `CachedBytes` of the version have been freed,
        its blocks are evicted first.

        Args:
            title: title of the version, for messages.
            sizes: sizes of the files in bytes, by name.
            fetch: fetches bytes; its errors are raised to the readers that need the bytes.
            digests: parts of each file, by the file's name, sorted by offset. A part is compared with its digest as
                soon as all of it has arrived for the first time.

        Raises:
            ResourceExhausted, Unavailable: a cache file cannot be created.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise error_for(error, f"making {self._folder}") from error
        files, use = _Files(title, sizes, fetch, digests, self._folder), _Use()
        weakref.finalize(use, self._forgotten.append, files)
        return {name: CachedBytes(self, files, use, name) for name in sizes}

    def usage(self) -> CacheUsage:
        """Current contents and totals."""
        with self._changed:
            return CacheUsage(self._books.used, self._fetched, self._books.hits, self._books.misses)

    def close(self) -> None:
        """Stop prefetching. A file's blocks stay until its readers have been freed."""
        self._pool.shutdown(cancel_futures=True)

    def copy(self, files: _Files, file: str, target: ByteArray, offset: int, strides: tuple[int, ...]) -> None:
        """See `FileBytes.copy_to`."""
        numbers = blocks_touched(offset, target.shape, strides, self._block)
        if len(numbers) <= self._copy_blocks:
            with self._present(files, file, numbers):
                try:
                    files.disk.read_into(target, files.offsets[file] + offset, strides)
                except (OSError, EOFError) as error:
                    raise unreadable(error, file, files.title, "the read cache") from error
            return
        axis = widest_axis(target.shape, strides)
        middle = target.shape[axis] // 2
        first, second = np.split(target, [middle], axis)
        self.copy(files, file, first, offset, strides)
        self.copy(files, file, second, offset + middle * strides[axis], strides)

    def prepare(
        self, files: _Files, file: str, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> Sequence[_KeptBlock] | None:
        """See `FileBytes.prepare`."""
        blocks = self._pin(files, file, blocks_touched(offset, shape, strides, self._block), ahead=True)
        if blocks is None:
            return None
        self._begin(_runs(block for block in blocks if not block.begun))
        return [_KeptBlock(self, block) for block in blocks]

    def release(self, block: _Block, *, ahead: bool) -> None:
        """Remove a pin."""
        with self._changed:
            self._books.unpin(block, ahead=ahead)
            self._changed.notify_all()

    @contextmanager
    def _present(self, files: _Files, file: str, numbers: Sequence[int]) -> Iterator[None]:
        """Keep blocks pinned and readable inside the context."""
        with self._changed:
            while (blocks := self._pin(files, file, numbers, ahead=False)) is None:
                # other copies use the space, and they end independently of this one
                self._changed.wait()
        try:
            runs = _runs(block for block in blocks if not block.begun)
            self._begin(runs[1:])
            for run in runs:
                # in this thread, unless another thread already fetches it: a copy does not queue behind earlier
                # prefetches
                self._bring(run)
            for block in blocks:
                block.ended.wait()
                if block.error is not None:
                    raise block.error.anew() from block.error
            yield
        finally:
            for block in blocks:
                self.release(block, ahead=False)

    def _pin(self, files: _Files, file: str, numbers: Sequence[int], *, ahead: bool) -> list[_Block] | None:
        with self._changed:
            self._note_forgotten()
            return self._books.pin([self._new(files, file, number) for number in numbers], ahead=ahead)

    def _new(self, files: _Files, file: str, number: int) -> _Block:
        offset = number * self._block
        nbytes = min(self._block, files.sizes[file] - offset)
        return Block(files, files.blocks, (file, number), offset, nbytes)

    def _note_forgotten(self) -> None:
        while self._forgotten:
            for block in self._forgotten.popleft().blocks.values():
                self._books.first_to_go(block)

    def _begin(self, runs: Sequence[Sequence[_Block]]) -> None:
        with suppress(RuntimeError):  # closed: readers that need the blocks fetch them themselves
            for run in runs:
                self._pool.submit(self._bring, run)

    def _bring(self, run: Sequence[_Block]) -> None:
        """Fetch adjacent blocks, except those that another thread already fetches."""
        with self._changed:
            mine = [block for block in run if not block.begun]
            for block in mine:
                block.begun = True
        for part in _runs(mine):
            self._fetch(part)

    def _fetch(self, run: Sequence[_Block]) -> None:
        files, file, nbytes = run[0].owner, run[0].key[0], sum(block.nbytes for block in run)
        try:
            data = files.fetch(file, run[0].offset, nbytes)
            files.disk.write(data, files.place(run[0]))
        except Exception as error:
            self._fail(run, error)
        else:
            with self._changed:
                self._fetched += nbytes
                for block in run:
                    block.arrived = True
            for block in run:
                self._finish(block)

    def _finish(self, block: _Block) -> None:
        """Make a block readable after its bytes have arrived, unless they are known to be wrong."""
        file = block.key[0]
        try:
            for part in parts_between(block.owner.digests.get(file, ()), block.offset, block.offset + block.nbytes):
                self._check(block.owner, file, part)
        except Exception as error:
            self._fail([block], error)
            return
        with self._changed:
            block.ended.set()
            if not block.pins:
                self._books.rest(block)
            self._changed.notify_all()

    def _fail(self, blocks: Sequence[_Block], error: Exception) -> None:
        files, file = blocks[0].owner, blocks[0].key[0]
        if isinstance(error, OSError):
            error = error_for(error, f"caching {file} of {files.title}")
        elif not isinstance(error, WeighbridgeError):
            log.error("reading %s of %s failed", file, files.title, exc_info=error)
            error = Unavailable(f"reading {file} of {files.title} failed: {type(error).__name__}")
        with self._changed:
            for block in blocks:
                with suppress(OSError):
                    _discard(block)
                self._books.strike_off(block)
                block.error = error
                block.ended.set()
            self._changed.notify_all()

    def _check(self, files: _Files, file: str, part: DigestedRange) -> None:
        """Compare a part with its digest when all of its bytes have arrived for the first time.

        Raises:
            DataLoss: they differ. It is unknown which of its blocks are wrong, so all of them are fetched again.
        """
        with self._changed:
            if part.name in files.checked:
                return
            blocks: list[_Block] = []
            first, last = part.offset // self._block, (part.offset + part.nbytes - 1) // self._block
            # begin with the block that was missing last time, or else with the last block: most tensors arrive in
            # order, and this method runs for each block
            for number in itertools.chain([files.lacking.get(part.name, last)], range(last, first - 1, -1)):
                found = files.blocks.get((file, number))
                if found is None or not found.arrived:
                    files.lacking[part.name] = number
                    return
                blocks.append(found)
            del blocks[0]
            self._books.pin_arrived(blocks)
        start = files.offsets[file] + part.offset
        agrees = files.disk.xxh3_128(start, part.nbytes) == part.xxh3_128
        with self._changed:
            for block in blocks:
                block.suspect |= not agrees
                self._books.unpin(block, ahead=False)
            if agrees:
                files.checked.add(part.name)
                files.lacking.pop(part.name, None)
            self._changed.notify_all()
        if not agrees:
            raise DataLoss(
                f"{part.name} in {file} of {files.title} does not agree with its digest",
                fix="try again; if it fails again, the store has lost bytes: `weighbridge verify` reports which",
            )


@dataclass(frozen=True, slots=True)
class _KeptBlock:
    """See `Kept`."""

    _cache: BlockCache
    key: _Block

    @property
    def nbytes(self) -> int:
        return self.key.nbytes

    def release(self) -> None:
        self._cache.release(self.key, ahead=True)


class CachedBytes(FileBytes):
    """A file in a remote store, with some of its blocks cached. Made by `BlockCache.open`."""

    def __init__(self, cache: BlockCache, files: _Files, use: _Use, name: str) -> None:
        self._cache = cache
        self._files = files
        self._use = use
        self._name = name

    @property
    def is_near(self) -> bool:
        """See `FileBytes.is_near`."""
        return False

    @property
    def disk_bytes(self) -> int:
        """Bytes that the cached blocks of all files of the version occupy on disk."""
        return self._files.disk.disk_bytes

    def copy_to(self, target: ByteArray, offset: int, strides: tuple[int, ...]) -> None:
        """See `FileBytes.copy_to`. Fetches missing blocks, several at a time."""
        self._cache.copy(self._files, self._name, target, offset, strides)

    def prepare(self, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Sequence[_KeptBlock] | None:
        """See `FileBytes.prepare`."""
        return self._cache.prepare(self._files, self._name, offset, shape, strides)


def _runs(blocks: Iterable[_Block]) -> list[list[_Block]]:
    """Runs of at most `_RUN_BLOCKS` adjacent blocks of one file. The blocks must be in order."""
    runs: list[list[_Block]] = []
    for block in blocks:
        last = runs[-1] if runs else None
        if last and last[-1].key[1] + 1 == block.key[1] and len(last) < _RUN_BLOCKS:
            last.append(block)
        else:
            runs.append([block])
    return runs
