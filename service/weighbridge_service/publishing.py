"""Making versions durable: from the first declaration to the write that makes a version part of history.

Each version has a thread of its own for that. Its files are uploaded while the rest is still arriving, each as soon as all its bytes
are there; then come the other files, the manifest, and the model's head. Where the ranks push to several replicas of the
service, each replica has such a thread, and whoever sees that all files have been written does the rest; that several do makes no
difference.
"""

from __future__ import annotations

import functools
import logging
import operator
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from weighbridge.errors import (
    AlreadyExists,
    InvalidArgument,
    Unavailable,
    VersionFailed,
    WeighbridgeError,
)
from weighbridge_service.clock import unix_ms
from weighbridge_service.declaring import Agreement, Home, alone_at, is_alone_elsewhere
from weighbridge_service.meeting import Meeting
from weighbridge_service.models import RegisteredModel, files_key
from weighbridge_service.receiving import Receiving
from weighbridge_storage.digests import FileDigests, digest_file
from weighbridge_storage.entries import OpenEntry
from weighbridge_storage.head import Head
from weighbridge_storage.head_changes import (
    check_not_given_up,
    claim_version,
    give_up_abandoned,
    give_up_version,
)
from weighbridge_storage.head_store import HeadStore
from weighbridge_storage.history import History
from weighbridge_storage.manifest import Manifest
from weighbridge_storage.objects import ByteArray, ObjectStore
from weighbridge_storage.version_reading import read_manifest
from weighbridge_storage.version_writing import (
    NOTHING_WRITTEN,
    Written,
    discard_version,
    publish_version,
    write_manifest,
    write_side_files,
    write_weights,
)

log = logging.getLogger(__name__)

_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 30.0
_UPLOADS_AT_ONCE = 2
"""Files of all versions that are uploaded at one time; the store uploads parts of each side by side."""
_LISTEN = 0.25
"""Seconds between two looks at what other replicas have said."""
_LOOK = 1.0
"""Seconds between two looks at whether a version is still open."""
_LEAVE_TO_OTHERS = 2.0
"""Seconds that a replica leaves the last steps to the one that came last."""

T = TypeVar("T")


class Follower(Protocol):
    """Who wants to know how a publication gets on."""

    def on_failure(self, error: WeighbridgeError, last: bool) -> None:
        """An attempt has failed; whether it was the last."""

    def on_waiting(self, for_others: bool) -> None:
        """This replica has done its part; whether the version waits for others now, or for this one again."""

    def on_success(self) -> None:
        """The version is part of history."""

    def on_left_to_others(self) -> None:
        """The version is received by other replicas, and not by this one."""


@dataclass(frozen=True)
class Job:
    """A version that is to be made durable.

    Attributes:
        model: the registration under which it was opened.
        entry: what the head says of it.
        receiving: how far it is here.
        follower: who wants to know.
    """

    model: RegisteredModel
    entry: OpenEntry
    receiving: Receiving
    follower: Follower

    def __str__(self) -> str:
        return f"{self.model.name}@{self.entry.number}"


class Publisher:
    """Runs publications, each in a thread of its own; one that waits to try again holds up no other.

    Args:
        store: where versions are kept.
        heads: the heads in it.
        attempts: how often a step is tried, once all bytes are there, before it is given up.
        spreading: whether versions may be shared with other replicas.
    """

    def __init__(self, store: ObjectStore, heads: HeadStore, attempts: int, *, spreading: bool) -> None:
        self.store = store
        self.heads = heads
        self.attempts = attempts
        self.spreading = spreading
        self.turns = threading.BoundedSemaphore(_UPLOADS_AT_ONCE)
        self.hurrying = threading.Event()
        self._stopping = threading.Event()
        self._changed = threading.Condition()
        self._running: set[threading.Thread] = set()

    @property
    def running(self) -> int:
        """Publications that are not done."""
        with self._changed:
            return len(self._running)

    @property
    def stopping(self) -> bool:
        """Whether what is not done is to be left as it is."""
        return self._stopping.is_set()

    def pause(self, seconds: float) -> None:
        """Let time pass, unless the service is going down."""
        self._stopping.wait(seconds)

    def start(self, job: Job) -> None:
        """Begin to make a version durable, in the background."""

        def run() -> None:
            try:
                _Publication(self, job).run()
            finally:
                with self._changed:
                    self._running.discard(thread)

        thread = threading.Thread(target=run, name=f"publish-{job}", daemon=True)
        with self._changed:
            self._running.add(thread)
        thread.start()

    def give_up(self, model: RegisteredModel, number: int, reason: str, *, by: Home | None) -> None:
        """Close a version that will not be published, and delete what there is of it; later, if the store fails.

        Args:
            model: whose version.
            number: which version.
            reason: why.
            by: who cannot go on with it; nothing happens if another replica receives it alone. None if somebody wants it so.
        """
        now_ms = unix_ms()

        def change(history: History) -> tuple[Head, bool]:
            head = history.head
            there = head.open.get(number)
            of_others = there is not None and by is not None and is_alone_elsewhere(there.claim, by)
            after = head if of_others else give_up_version(head, number, reason, now_ms)
            return after, history.under(after).is_gone(number)

        try:
            # an attempt may fail after its head was written: what is in the head is never discarded
            if self.heads.edit(model.name, change):
                discard_version(self.store, model.name, number)
        except WeighbridgeError as error:
            log.warning("%s@%d could not be cleaned up, and will be later: %s", model.name, number, error)

    def give_up_if_lost(self, model: RegisteredModel, entry: OpenEntry, home: Home) -> None:
        """Close an open version of which a process before this one, at the same address, had received something."""
        try:
            lost = alone_at(entry.claim) == home.address or (
                self.spreading and Meeting(self.store, model.name, entry.number, home).was_here_before()
            )
        except WeighbridgeError as error:
            log.warning("who receives %s@%d cannot be seen: %s", model.name, entry.number, error)
            return
        if lost:
            reason = f"the replica at {home.address} was restarted, and has lost what it had received"
            self.give_up(model, entry.number, reason, by=home)

    def hurry(self) -> None:
        """Wait no more between attempts, and give up what fails from now on."""
        self.hurrying.set()

    def stop(self, seconds: float) -> None:
        """Leave what is not done as it is; waits for the threads."""
        self._stopping.set()
        self.hurrying.set()
        deadline = time.monotonic() + seconds
        with self._changed:
            running = list(self._running)
        for thread in running:
            thread.join(max(deadline - time.monotonic(), 0.0))


class _Stopped(Exception):
    """The service is going down."""


class _Publication:
    """One version on its way into history."""

    def __init__(self, publisher: Publisher, job: Job) -> None:
        self._publisher = publisher
        self._store = publisher.store
        self._heads = publisher.heads
        self._job = job
        self._model = job.model
        self._number = job.entry.number
        self._receiving = job.receiving
        self._meeting = Meeting(self._store, job.model.name, self._number, job.receiving.home)
        self._looked = 0.0

    def run(self) -> None:
        """Do it, or close the version."""
        try:
            agreed = self._agree()
            if not agreed.alone:
                self._keep_trying(self._tell)
            self._keep_trying(lambda: self._claim(agreed))
            written = self._write_weights(agreed)
            while not self._receiving.wait_complete(_LOOK):
                self._look(agreed)
            if agreed.alone:
                self._keep_trying(lambda: self._finish(agreed, written))
            else:
                self._finish_together(agreed, written)
        except _Stopped:
            return
        except Exception as error:  # a thread's last chance to say what happened
            known = _known(error)
            if not isinstance(error, WeighbridgeError):
                log.exception("publishing %s failed", self._job)
            if self._is_published():  # the last answer was lost, or another replica was faster
                self._succeed()
                return
            self._receiving.fail(known)
            others_have_it = isinstance(error, AlreadyExists) or not self._receiving.declared_here
            if others_have_it and self._is_claimed():
                self._job.follower.on_left_to_others()
                return
            self._publisher.give_up(self._model, self._number, known.message, by=self._receiving.home)
            self._job.follower.on_failure(known, True)
        else:
            self._succeed()

    def _is_claimed(self) -> bool:
        """Whether others receive the version, as far as can be seen."""
        try:
            found = self._heads.read(self._model.name)
        except WeighbridgeError:
            return False
        entry = found[0].open.get(self._number) if found is not None else None
        return entry is not None and bool(entry.claim)

    def _succeed(self) -> None:
        self._receiving.publish_elsewhere()
        self._job.follower.on_success()

    def _is_published(self) -> bool:
        """Whether the version is part of history under this replica's claim, as far as can be seen."""
        agreed = self._receiving.agreed
        try:
            history = self._heads.history(self._model.name)
            entry = history.durable(self._number) if history is not None else None
        except WeighbridgeError:
            return False
        return entry is not None and agreed is not None and entry.write_id == agreed.claim

    def _agree(self) -> Agreement:
        """Wait until all ranks have declared, here and at other replicas."""
        spreading = self._publisher.spreading
        while (agreed := self._receiving.wait_agreed(_LISTEN if spreading else _LOOK)) is None:
            self._check_running()
            if spreading and self._receiving.declared_here and not self._receiving.declared_everywhere:
                try:
                    self._exchange()
                except (VersionFailed, AlreadyExists, InvalidArgument):
                    raise  # nothing that would pass
                except WeighbridgeError as error:
                    log.warning("%s: the other replicas cannot be heard: %s", self._job, error)
            self._look_at_head()
        return agreed

    def _exchange(self) -> None:
        self._tell()
        for heard in self._meeting.listen():
            for declaration in heard.values():
                if not self._model.knows_layout(declaration.digest):
                    self._model.add_layout(*self._meeting.layout(declaration.digest))
            self._receiving.declare_elsewhere(heard)

    def _tell(self) -> None:
        here = self._receiving.declared_here
        for digest in {declaration.digest for declaration in here.values()}:
            if not self._model.is_offered(digest):
                self._meeting.offer_layout(digest, *self._model.declared_layout(digest))
                self._model.offered(digest)
        self._meeting.tell(here)

    def _look(self, agreed: Agreement) -> None:
        """Let others who take part hear of us, and see whether the version was given up elsewhere."""
        self._check_running()
        if not agreed.alone:
            try:
                self._tell()
            except WeighbridgeError as error:
                log.warning("%s: the other replicas cannot be told: %s", self._job, error)
        self._look_at_head()

    def _look_at_head(self) -> None:
        """Notice a version that was given up elsewhere. Raises VersionFailed."""
        now = time.monotonic()
        if now - self._looked < _LOOK:
            return
        self._looked = now
        try:
            history = self._heads.history(self._model.name)
            if history is not None:
                check_not_given_up(history, self._number)
        except VersionFailed:
            raise
        except WeighbridgeError as error:
            log.warning("%s: %s", self._job, error)

    def _check_running(self) -> None:
        if self._publisher.stopping:
            raise _Stopped

    def _claim(self, agreed: Agreement) -> None:
        self._heads.update(
            self._model.name, lambda head: (claim_version(head, self._number, agreed.claim), None)
        )

    def _write_weights(self, agreed: Agreement) -> Written:
        """Upload the files that this replica writes, each as soon as it is complete."""
        image = self._receiving.image
        names = agreed.to_come_to(self._receiving.home)
        if image is None:
            raise VersionFailed(f"{self._job} was given up")
        parent = self._keep_trying(self._parent) if names else None
        written, count = NOTHING_WRITTEN, 0
        with image.lease():
            buffers = image.read_only_buffers
            while count < len(names):
                for name in self._receiving.wait_filled(count, _LOOK):
                    digests = self._keep_trying(lambda: self._digest(name, buffers[name]))  # noqa: B023
                    written |= self._keep_trying(
                        lambda: self._upload(name, buffers[name], digests, parent)  # noqa: B023
                    )
                    count += 1
                self._look(agreed)
        return written

    def _digest(self, name: str, data: ByteArray) -> FileDigests:
        return digest_file(self._model.files, name, data, self._go_on)

    def _upload(self, name: str, data: ByteArray, digests: FileDigests, parent: Manifest | None) -> Written:
        with self._publisher.turns:
            return write_weights(
                self._store,
                self._model.name,
                self._number,
                name,
                data,
                digests,
                parent,
                self._go_on,
            )

    def _go_on(self) -> None:
        self._check_running()
        self._receiving.wait_filled(0, 0.0)  # raises if the version has failed

    def _parent(self) -> Manifest | None:
        """The version before, whose files may be the same."""
        if not self._job.entry.parent:
            return None
        try:
            return read_manifest(self._store, self._model.name, self._job.entry.parent)
        except WeighbridgeError as error:  # it may have been deleted; without it, everything is uploaded
            log.info("%s: nothing is copied from version %d: %s", self._job, self._job.entry.parent, error)
            return None

    def _finish(self, agreed: Agreement, written: Written) -> None:
        model = self._model
        # the config that the weights were mapped with, whatever has been registered since
        keys = {file: files_key(model.name, model.files_id, file) for file in model.side_files}
        written |= write_side_files(self._store, model.name, self._number, model.files, keys)
        write_manifest(self._store, model.name, self._job.entry, written)
        publish_version(self._heads, model.name, self._job.entry, model.files, agreed.claim)

    def _finish_together(self, agreed: Agreement, written: Written) -> None:
        """Say what this replica has written, and publish the version once all have, unless another one does."""
        spread = agreed.prepared.spread
        writers = set() if spread is None else set(spread.owners.values())
        me = agreed.homes.index(self._receiving.home)
        if me in writers:
            self._keep_trying(lambda: self._meeting.hand_in(me, agreed.claim, written))
        wait_until = time.monotonic()
        while True:
            self._keep_trying(self._tell)
            parts = self._keep_trying(lambda: self._meeting.handed_in(agreed.claim, writers))
            self._job.follower.on_waiting(parts.keys() != writers)
            if parts.keys() == writers and time.monotonic() >= wait_until:
                everything = functools.reduce(operator.or_, parts.values(), NOTHING_WRITTEN)
                self._keep_trying(functools.partial(self._finish, agreed, everything))
                self._clear()
                return
            if parts.keys() != writers:
                wait_until = time.monotonic() + _LEAVE_TO_OTHERS
            if self._keep_trying(self._published_elsewhere):
                return
            self._publisher.pause(_LISTEN)
            self._check_running()

    def _clear(self) -> None:
        try:
            self._meeting.clear()
        except WeighbridgeError as error:  # the next collection does it
            log.info("%s: what the replicas have told each other stays for now: %s", self._job, error)

    def _published_elsewhere(self) -> bool:
        """Whether another replica has published the version; closes it if the others have died. Raises VersionFailed."""
        now_ms = unix_ms()
        head = self._heads.update(
            self._model.name, lambda head: ((new := give_up_abandoned(head, now_ms)), new)
        )
        check_not_given_up(history := self._heads.history_of(self._model.name, head), self._number)
        return history.find(self._number) is not None

    def _keep_trying(self, step: Callable[[], T]) -> T:
        """The result of a step, which is tried again when it fails, and given up only when all bytes are there."""
        failures = counted = 0
        while True:
            try:
                return step()
            except (VersionFailed, AlreadyExists, _Stopped):
                raise  # nothing that would pass
            except Exception as error:
                self._check_running()
                failures += 1
                counted += self._receiving.wait_complete(0.0)
                last = counted >= self._publisher.attempts or self._publisher.hurrying.is_set()
                known = _known(error)
                log.warning("publishing %s failed (attempt %d): %s", self._job, failures, known.message)
                if last:
                    raise known from error
                self._job.follower.on_failure(known, False)
                self._publisher.hurrying.wait(min(_FIRST_PAUSE * 2**failures, _LONGEST_PAUSE))


def _known(error: Exception) -> WeighbridgeError:
    if isinstance(error, WeighbridgeError):
        return error
    return Unavailable(f"publishing failed: {error!r}")
