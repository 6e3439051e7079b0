"""Bookkeeping of blocks of files: the cached blocks, their pins, and the order of eviction.

This module does not do I/O, wait or lock: `block_cache` calls it while it holds a lock. A block that a reader copies
from or will read soon is **pinned** and stays cached. Among the other blocks, the least recently used is evicted first.
A block counts against the budget from the moment it is requested.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeAlias, TypeVar

from weighbridge.errors import WeighbridgeError
from weighbridge_storage.memory.regions import PAGE

Owner = TypeVar("Owner")
Key: TypeAlias = tuple[str, int]
"""A file's name, and the number of a block in it."""


class Block(Generic[Owner]):
    """One block, from the moment it is requested.

    Args:
        owner: files of the version that the block belongs to.
        among: the owner's cached blocks, by key.
        key: file and number.
        offset: offset of its first byte in the file.
        nbytes: its length; at least one.

    Attributes:
        room: bytes that it occupies on disk.
        pins: number of its pins.
        ahead: number of these pins that only prefetch it.
        begun: whether a thread fetches it or has fetched it, or it was removed before it was fetched.
        arrived: whether its bytes are on disk. They may then be compared with a digest before readers may use them.
        ended: set when the block can be read or has failed.
        error: error with which it failed.
        suspect: whether its bytes may be wrong; the block is then evicted with its last pin.
    """

    __slots__ = (
        "ahead",
        "among",
        "arrived",
        "begun",
        "ended",
        "error",
        "key",
        "nbytes",
        "offset",
        "owner",
        "pins",
        "room",
        "suspect",
    )

    def __init__(self, owner: Owner, among: dict[Key, Block[Owner]], key: Key, offset: int, nbytes: int) -> None:
        self.owner = owner
        self.among = among
        self.key = key
        self.offset = offset
        self.nbytes = nbytes
        self.room = -(-nbytes // PAGE) * PAGE
        self.pins = 0
        self.ahead = 0
        self.begun = False
        self.arrived = False
        self.ended = threading.Event()
        self.error: WeighbridgeError | None = None
        self.suspect = False


class BlockBooks(Generic[Owner]):
    """All blocks of a cache, within a budget.

    Args:
        budget: maximum bytes of all blocks together. Prefetched blocks use at most half of it.
        discard: frees a block's disk space. It is called before any reader can request the block again, so that new
            bytes are not written into the hole.

    Attributes:
        used: bytes of all blocks.
        hits: requested blocks that were cached and had no pin.
        misses: requested blocks that had to be fetched.
    """

    def __init__(self, budget: int, discard: Callable[[Block[Owner]], None]) -> None:
        self._budget = budget
        self._discard = discard
        self._idle: OrderedDict[Block[Owner], None] = (
            OrderedDict()
        )  # cached and not pinned; the least recently used first
        self._idle_bytes = 0
        self._ahead_bytes = 0
        self.used = 0
        self.hits = 0
        self.misses = 0

    def pin(self, wanted: Sequence[Block[Owner]], *, ahead: bool) -> list[Block[Owner]] | None:
        """Pin all given blocks and return them.

        If the budget has no space for them now, change nothing and return None.

        Args:
            wanted: new blocks; each is replaced by the cached block with the same key, if it exists.
            ahead: whether they are only prefetched.
        """
        blocks = [block.among.get(block.key, block) for block in wanted]
        if ahead and self._ahead_bytes + sum(b.room for b in blocks if not b.ahead) > self._budget // 2:
            return None
        idle = [block for block in blocks if block in self._idle]
        missing = [block for block in blocks if block.key not in block.among]
        needed = sum(block.room for block in missing)
        spare = self._idle_bytes - sum(block.room for block in idle)
        if self.used + needed - spare > self._budget:
            return None
        for block in idle:
            self._wake(block)
        while self.used + needed > self._budget:
            self._evict(next(iter(self._idle)))
        for block in missing:
            block.among[block.key] = block
            self.used += block.room
        self.hits += len(idle)
        self.misses += len(missing)
        for block in blocks:
            block.pins += 1
            if ahead:
                self._ahead_bytes += 0 if block.ahead else block.room
                block.ahead += 1
        return blocks

    def pin_arrived(self, blocks: Iterable[Block[Owner]]) -> None:
        """Pin cached blocks, to check them."""
        for block in blocks:
            if block in self._idle:
                self._wake(block)
            block.pins += 1

    def unpin(self, block: Block[Owner], *, ahead: bool) -> None:
        """Remove a pin. If a block loses its last pin before a thread has begun to fetch it, the block is removed."""
        block.pins -= 1
        if ahead:
            block.ahead -= 1
            self._ahead_bytes -= 0 if block.ahead else block.room
        if block.pins or block.error is not None:
            return
        if block.ended.is_set():
            self.rest(block)
        elif not block.begun:
            block.begun = True
            self.strike_off(block)

    def rest(self, block: Block[Owner]) -> None:
        """Record that a readable block has no pins, so it may be evicted."""
        self._idle[block] = None
        self._idle_bytes += block.room
        if block.suspect:
            self._evict(block)

    def first_to_go(self, block: Block[Owner]) -> None:
        """Make a block the first to be evicted, if it is cached and not pinned."""
        if block in self._idle:
            self._idle.move_to_end(block, last=False)

    def strike_off(self, block: Block[Owner]) -> None:
        """Remove a block whose bytes are no longer on disk."""
        del block.among[block.key]
        self.used -= block.room

    def _evict(self, block: Block[Owner]) -> None:
        self._wake(block)
        self._discard(block)
        self.strike_off(block)

    def _wake(self, block: Block[Owner]) -> None:
        del self._idle[block]
        self._idle_bytes -= block.room
