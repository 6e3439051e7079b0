"""A version while it is being received: who holds what, what has arrived, and when it is complete.

The ranks of a push declare what they hold. When all have, the shards are shared out, the plan is made and coverage is
proved, before a byte moves. Then bytes arrive in any order, and each goes straight to its final place in the image.
When every rank has sealed, all bytes are there and the version is ready.

A trainer that pushes again with the layouts of last time does not wait for its other ranks: what the set of layouts
leads to is known, and each rank gets its part of it at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from weighbridge import rpc
from weighbridge.errors import (
    AlreadyExists,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    VersionFailed,
    WeighbridgeError,
)
from weighbridge.resources import Version, VersionState
from weighbridge_service.preparing import PreparedPush
from weighbridge_service.ranges import RangeSet
from weighbridge_service.transfers import Bytes
from weighbridge_storage.images import Image

_NAMED = 20


@dataclass(frozen=True, slots=True)
class Declaration:
    """What one rank said it holds."""

    client_id: str
    digest: str


@dataclass(frozen=True, slots=True)
class KnownSet:
    """The declarations of the last push of a model, and what they led to."""

    declarations: Mapping[int, Declaration]
    prepared: PreparedPush


@dataclass
class _Rank:
    received: RangeSet = field(default_factory=RangeSet)
    sealed: bool = False


class Receiving:
    """One version from its opening to its being ready or failed. Safe to use from many threads.

    Args:
        opened: the version as it was opened.
        request_id: which request opened it.
        prepare: makes a `PreparedPush` from the digests of all ranks, in their order.
        acquire_image: gives an image with headers written, when the first rank is about to push.
        known: declarations of the push before, if any.
        on_end: is called once, when the version is ready or has failed, without a lock being held.
    """

    def __init__(
        self,
        opened: Version,
        request_id: str,
        *,
        prepare: Callable[[Sequence[str]], PreparedPush],
        acquire_image: Callable[[], Image],
        known: KnownSet | None,
        on_end: Callable[[Receiving], None],
    ) -> None:
        self.request_id = request_id
        self._opened = opened
        self._name = f"{opened.model}@{opened.number}"
        self._prepare = prepare
        self._acquire_image = acquire_image
        self._known = known if known and len(known.declarations) == opened.ranks else None
        self._on_end = on_end
        self._changed = threading.Condition()
        self._declared: dict[int, Declaration] = {}
        self._ranks = [_Rank() for _ in range(opened.ranks)]
        self._prepared: PreparedPush | None = None
        self._preparing = False
        self._writers = 0
        self._state = VersionState.RECEIVING
        self._error: WeighbridgeError | None = None
        self._ready_time_ms = 0
        self._last_activity = time.monotonic()
        self.image: Image | None = None
        self._buffers: Mapping[str, Bytes] = {}

    @property
    def version(self) -> Version:
        """The version as it stands now."""
        with self._changed:
            error = self._error
            return replace(
                self._opened,
                state=self._state,
                sealed_ranks=sum(rank.sealed for rank in self._ranks),
                received_bytes=sum(rank.received.size for rank in self._ranks),
                ready_time_ms=self._ready_time_ms,
                error=error.message if error else "",
                error_details=error.details if error else (),
            )

    @property
    def known_set(self) -> KnownSet | None:
        """What the next push can count on; None as long as not all ranks have declared."""
        with self._changed:
            if self._prepared is None or len(self._declared) < len(self._ranks):
                return None
            return KnownSet(dict(self._declared), self._prepared)

    @property
    def idle_seconds(self) -> float:
        """How long no rank has been heard of."""
        with self._changed:
            return time.monotonic() - self._last_activity

    def takes_part(self, client_id: str) -> bool:
        """Whether this client has declared a rank of this version."""
        with self._changed:
            return any(declaration.client_id == client_id for declaration in self._declared.values())

    def declare(self, rank: int, client_id: str, digest: str, *, seconds: float) -> PreparedPush:
        """Say what a rank holds; its layout is known by this digest.

        Waits for the other ranks, unless the layouts are those of the push before.

        Raises:
            AlreadyExists: another client has declared this rank.
            LayoutError: the layouts contradict the model or each other; the version has failed.
            DeadlineExceeded: not all ranks came within ``seconds``; names those that did not.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            self._check_receiving()
            self._check_rank(rank)
            declaration = Declaration(client_id, digest)
            there = self._declared.get(rank)
            if there is not None and there.client_id != client_id:
                raise AlreadyExists(
                    f"rank {rank} of {self._name} has been declared by another process",
                    fix="if two trainers push this step, give each its own run name; if the trainer was restarted, "
                    f"abort version {self._opened.number} or wait until it times out, and push again",
                )
            if there is not None and there.digest != digest:
                raise FailedPrecondition(f"rank {rank} of {self._name} has declared another layout before")
            self._declared[rank] = declaration
            self._touch()
            contradiction = self._use_known(rank, declaration)
            mine = self._prepared is None and len(self._declared) == len(self._ranks) and not self._preparing
            self._preparing = self._preparing or mine
        if contradiction is not None:
            self.fail(contradiction)
        elif mine:
            self._prepare_all()
        with self._changed:
            while self._prepared is None or (self.image is None and self._state is VersionState.RECEIVING):
                self._check_receiving()
                left = deadline - time.monotonic()
                if left <= 0:
                    absent = [r for r in range(len(self._ranks)) if r not in self._declared]
                    raise DeadlineExceeded(
                        f"{self._name}: {len(absent)} of {len(self._ranks)} ranks have not declared their layout",
                        details=[f"rank {r}" for r in absent[:_NAMED]],
                        fix="every rank calls push with the same step, run and world_size",
                    )
                self._changed.wait(left)
            self._check_receiving()
            return self._prepared

    def _use_known(self, rank: int, declaration: Declaration) -> WeighbridgeError | None:
        """Count on the layouts of the push before, if this rank's is one of them."""
        known = self._known
        if known is None:
            return None
        expected = known.declarations[rank]
        if self._prepared is known.prepared:
            if expected.digest != declaration.digest:
                # others are pushing what they were assigned on the strength of this rank's former layout
                return VersionFailed(
                    f"rank {rank} of {self._name} holds other shards than in the push before",
                    fix="push again: the shards will be shared out anew",
                )
        elif (
            expected == declaration
            and not self._preparing
            and all(known.declarations[r].digest == there.digest for r, there in self._declared.items())
        ):
            self._preparing = True
            self._prepared = (
                known.prepared
            )  # from here on, whoever declares something else makes the version fail
            threading.Thread(target=self._begin, args=(known.prepared,), daemon=True).start()
        return None

    def _prepare_all(self) -> None:
        try:
            with self._changed:
                digests = [self._declared[rank].digest for rank in range(len(self._ranks))]
            self._begin(self._prepare(digests))
        except WeighbridgeError as error:
            self.fail(error)
            raise
        except Exception as error:
            # nobody would make the plan any more, and the other ranks would wait for it
            self.fail(WeighbridgeError(f"the push could not be planned: {type(error).__name__}"))
            raise

    def _begin(self, prepared: PreparedPush) -> None:
        with self._changed:
            self._prepared = prepared
        try:
            image = self._acquire_image()
        except WeighbridgeError as error:
            self.fail(error)
            return
        except Exception as error:  # this thread's last chance: otherwise all ranks would wait in vain
            self.fail(WeighbridgeError(f"no image could be made for {self._name}: {error!r}"))
            return
        with self._changed:
            if self._state is VersionState.RECEIVING:
                self.image, self._buffers = image, image.buffers
                self._changed.notify_all()
                return
        image.release()

    def write(self, rank: int, client_id: str, offset: int, data: memoryview, checksum: int) -> None:
        """Take a piece of a rank's stream. One that has come before is left alone.

        Raises:
            DataLoss: the piece does not agree with its checksum; send it again.
            InvalidArgument: it lies outside the stream.
            FailedPrecondition: the rank or the version is sealed, or the rank has not declared.
        """
        with self._writing(rank, client_id) as (prepared, buffers):
            if rpc.checksum(data) != checksum:
                raise DataLoss(
                    f"{self._name}, rank {rank}: the piece at byte {offset} does not agree with its checksum"
                )
            end = offset + len(data)
            if end > prepared.streams[rank].nbytes:
                raise InvalidArgument(
                    f"{self._name}, rank {rank}: bytes {offset} to {end} lie outside of its stream of "
                    f"{prepared.streams[rank].nbytes} bytes"
                )
            with self._changed:
                known = self._ranks[rank].received.covers(offset, end)
            if not known:
                prepared.transfer.scatter(data, offset, buffers, str(rank))
                with self._changed:
                    self._ranks[rank].received.add(offset, end)

    @contextmanager
    def _writing(self, rank: int, client_id: str) -> Iterator[tuple[PreparedPush, Mapping[str, Bytes]]]:
        """Hold the image while writing to it: it is neither published nor given away meanwhile."""
        with self._changed:
            self._check_receiving()
            self._check_client(rank, client_id)
            if self._ranks[rank].sealed:
                raise FailedPrecondition(f"rank {rank} of {self._name} is sealed")
            if self._prepared is None or self.image is None:
                raise FailedPrecondition(f"not all ranks of {self._name} have declared their layouts")
            self._writers += 1
            prepared, buffers = self._prepared, self._buffers
        try:
            yield prepared, buffers
        finally:
            with self._changed:
                self._writers -= 1
                self._touch()
                self._changed.notify_all()

    def push_state(self, rank: int) -> tuple[list[tuple[int, int]], int, bool]:
        """Ranges that have arrived, length of the stream, and whether the rank is sealed.

        Raises:
            FailedPrecondition: there is no stream yet.
        """
        with self._changed:
            self._check_rank(rank)
            if self._prepared is None:
                raise FailedPrecondition(f"not all ranks of {self._name} have declared their layouts")
            self._touch()
            state = self._ranks[rank]
            return list(state.received), self._prepared.streams[rank].nbytes, state.sealed

    def seal(self, rank: int, client_id: str) -> None:
        """The rank has pushed everything; the last one makes the version ready. Repeating it is harmless.

        Raises:
            FailedPrecondition: something is missing; names tensors and boxes.
        """
        with self._changed:
            self._check_rank(rank)
            if self._state is VersionState.READY and self._ranks[rank].sealed:
                return
            self._check_receiving()
            self._check_client(rank, client_id)
            missing = self._missing(rank)
            if missing:
                raise FailedPrecondition(
                    f"rank {rank} of {self._name} cannot be sealed: parts of its stream have not arrived",
                    details=missing[:_NAMED],
                    fix="ask for the push state and send the rest",
                )
            self._ranks[rank].sealed = True
            self._touch()
            if not all(r.sealed for r in self._ranks):
                return
            while self._writers:
                self._changed.wait()
            if self._state is VersionState.READY:
                return  # the same call, repeated, was here first
            self._check_receiving()  # it may have been aborted meanwhile
            self._state = VersionState.READY
            self._ready_time_ms = time.time_ns() // 1_000_000
            self._changed.notify_all()
        self._on_end(self)

    def fail(self, error: WeighbridgeError) -> None:
        """Give the version up: it was never visible. Nothing happens if it is no longer being received."""
        with self._changed:
            if self._state is not VersionState.RECEIVING:
                return
            self._state = VersionState.FAILED
            self._error = error
            self._changed.notify_all()
            while self._writers:
                self._changed.wait()
            image, self.image, self._buffers = self.image, None, {}
        if image is not None:
            image.release()
        self._on_end(self)

    def time_out(self, seconds: float) -> None:
        """Fail the version if no rank has been heard of for so long; says what is missing."""
        with self._changed:
            if self._state is not VersionState.RECEIVING or time.monotonic() - self._last_activity < seconds:
                return
            missing = [
                f"rank {r} has not declared" for r in range(len(self._ranks)) if r not in self._declared
            ]
            if self._prepared is not None:
                for rank in sorted(self._declared):
                    missing += self._missing(rank)
                missing += [
                    f"rank {rank} has not sealed"
                    for rank, state in enumerate(self._ranks)
                    if not state.sealed
                ]
        self.fail(
            VersionFailed(
                f"{self._name} was given up: nothing was heard of its ranks for {seconds:g} s",
                details=missing[:_NAMED],
                fix="push the step again",
            )
        )

    def _missing(self, rank: int) -> list[str]:
        if self._prepared is None:
            return [f"rank {rank} has no stream yet"]
        stream, received = self._prepared.streams[rank], self._ranks[rank].received
        return [
            f"{stream.tensors[p.shard.tensor]}: box {p.shard.box} of rank {rank}"
            for p in stream.placements
            if not received.covers(p.offset, p.offset + p.nbytes)
        ]

    def _check_receiving(self) -> None:
        if self._state is VersionState.FAILED and self._error is not None:
            error = self._error
            raise type(error)(error.message, fix=error.fix, details=error.details)
        if self._state is not VersionState.RECEIVING:
            raise FailedPrecondition(
                f"{self._name} is sealed",
                fix="push a new version: another step or run",
            )

    def _check_rank(self, rank: int) -> None:
        if rank >= len(self._ranks):
            raise InvalidArgument(f"{self._name} has {len(self._ranks)} ranks; rank {rank} does not exist")

    def _check_client(self, rank: int, client_id: str) -> None:
        self._check_rank(rank)
        declaration = self._declared.get(rank)
        if declaration is None:
            raise FailedPrecondition(f"rank {rank} of {self._name} has not declared its layout")
        if declaration.client_id != client_id:
            raise AlreadyExists(f"rank {rank} of {self._name} belongs to another process")

    def _touch(self) -> None:
        self._last_activity = time.monotonic()
