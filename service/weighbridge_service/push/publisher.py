"""Publisher of one version: what a push does in the object store. Every method blocks, and raises WeighbridgeError."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from weighbridge.errors import VersionFailed, WeighbridgeError
from weighbridge_service.models.registered_model import RegisteredModel
from weighbridge_service.models.registration import files_key
from weighbridge_service.plan.declarations import Agreement, Home, address_in, is_alone_elsewhere
from weighbridge_service.push.machine import events as on
from weighbridge_service.push.machine.effects import Awaited
from weighbridge_service.runtime.clock import unix_ms
from weighbridge_storage.documents.entries import OpenEntry, VersionEntry
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head.head import Head
from weighbridge_storage.head.head_store import HeadStore
from weighbridge_storage.head.history import History
from weighbridge_storage.head.open_versions import (
    claim_version,
    give_up_abandoned,
    give_up_version,
    renew_version,
    still_open,
)
from weighbridge_storage.stores.objects import ByteArray, ObjectStore
from weighbridge_storage.versions.digests import FileDigests
from weighbridge_storage.versions.manifest import Manifest
from weighbridge_storage.versions.reading import read_manifest
from weighbridge_storage.versions.writing import (
    Written,
    copy_weights,
    differs_from,
    discard_version,
    publish_version,
    write_block_digests,
    write_manifest,
    write_side_files,
    write_weights,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Publisher:
    """Writes one version. Thread-safe.

    Attributes:
        store: where versions are kept.
        heads: the heads in it.
        model: the registration under which the version was opened.
        entry: what head.json said of the version when it was opened.
        home: this replica.
    """

    store: ObjectStore
    heads: HeadStore
    model: RegisteredModel
    entry: OpenEntry
    home: Home
    _away: threading.Event = field(default_factory=threading.Event, init=False, repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.model.name}@{self.entry.number}"

    def claim(self, claim: str) -> None:
        """Record in head.json who may write the version's folder.

        Raises:
            VersionFailed: it is no longer open.
            AlreadyExists: others have claimed it.
        """
        number = self.entry.number
        # the claim of a version that was taken over names the replica that has left
        holder = self.home.address if address_in(claim) not in ("", self.home.address) else ""
        self.heads.update(self.model.name, lambda head: (claim_version(head, number, claim, holder), None))

    def renew(self, seconds: float) -> None:
        """Extend the lease of the open version to ``seconds`` from now. Raises VersionFailed if it is no longer open."""
        number, until_ms = self.entry.number, unix_ms() + round(seconds * 1000)
        self.heads.update(self.model.name, lambda head: (renew_version(head, number, until_ms), None))

    def look(self, effect: Awaited, *, closing: bool = False) -> on.HeadSaid:
        """What head.json says of the version. A store that is away is an answer, too.

        Args:
            effect: by which effect this is asked.
            closing: whether versions whose lease has expired are closed on the way.
        """
        name, number, now_ms = self.model.name, self.entry.number, unix_ms()
        verdict = on.Verdict
        try:
            if closing:
                self.heads.update(name, lambda head: (give_up_abandoned(head, now_ms), None))
            history = self.heads.history(name)
            if history is None:
                return on.HeadSaid(effect, verdict.GIVEN_UP, reason=f"the model {name} was removed")
            there = None if number in history.head.open else history.find(number)
        except WeighbridgeError as error:
            if not self._away.is_set():  # it is asked each second
                log.warning("%s: whether it is still open cannot be seen: %s", self, error)
            self._away.set()
            return on.HeadSaid(effect, verdict.UNKNOWN)
        if self._away.is_set():
            log.warning("%s: whether it is still open can be seen again", self)
            self._away.clear()
        if there is not None:
            return on.HeadSaid(effect, verdict.PUBLISHED, there.write_id, entry=there)
        failed = history.head.failed.get(number)
        if failed is not None:
            given_up = verdict.ABORTED if failed.aborted else verdict.GIVEN_UP
            return on.HeadSaid(effect, given_up, reason=failed.reason)
        try:
            opened = still_open(history.head, number)
            return on.HeadSaid(effect, verdict.OPEN, opened.claim, opened=opened)
        except VersionFailed as error:
            return on.HeadSaid(effect, verdict.GIVEN_UP, reason=error.message)

    def is_owned_by(self, other: Home) -> bool:
        """Whether head.json says that another replica has taken the version over, or that it is published.

        A store that is away says nothing.
        """
        try:
            history = self.heads.history(self.model.name)
        except WeighbridgeError:
            return False
        if history is None:
            return False
        entry = history.head.open.get(self.entry.number)
        return entry.holder == other.address if entry is not None else self._is_published(history)

    def _is_published(self, history: History) -> bool:
        return history.find(self.entry.number) is not None

    @cached_property
    def _parent(self) -> Manifest | None:
        """The version before, whose files may be the same."""
        if not self.entry.parent:
            return None
        try:
            return read_manifest(self.store, self.model.name, self.entry.parent)
        except WeighbridgeError as error:  # it may have been deleted; without it, everything is uploaded
            log.info("%s: nothing is copied from version %d: %s", self, self.entry.parent, error)
            return None

    def forget(self) -> None:
        """Drop what was read of the version before."""
        self.__dict__.pop("_parent", None)

    def upload(
        self, file: str, data: ByteArray, digests: FileDigests | None, go_on: Callable[[], None]
    ) -> bool:
        """Put a file of weights into the store, or have it copied from the version before if it is the same there.

        Args:
            file: its name.
            data: its bytes, header included.
            digests: of these bytes; None as long as they are not made.
            go_on: raises if this is not wanted any more.

        Returns:
            Whether it is there. If not, digests are needed to tell it from that of the version before.
        """
        name, number, parent = self.model.name, self.entry.number, self._parent
        if parent is not None and digests is None and not differs_from(parent, file, data, go_on):
            return False
        copied = (
            parent is not None
            and digests is not None
            and copy_weights(self.store, name, number, file, digests, parent)
        )
        if not copied:
            write_weights(self.store, name, number, file, data, go_on)
        return True

    def upload_digests(self, file: str, digests: FileDigests) -> None:
        """Put the block digests of a file of weights into the store."""
        write_block_digests(self.store, self.model.name, self.entry.number, file, digests)

    def publish(
        self, opened: OpenEntry, agreed: Agreement, written: Written, ready_ms: int, verified_ms: int
    ) -> VersionEntry:
        """Write the side files and the manifest, and make the version part of history. Gives what history says of it.

        Args:
            opened: what head.json has said of it since all of its ranks have opened it.
            agreed: under which agreement.
            written: all files of weights.
            ready_ms, verified_ms: when it became so at this replica, in milliseconds since 1970 UTC; 0 if it did just now.

        Raises:
            VersionFailed: it was given up meanwhile.
            AlreadyExists: others have claimed it.
        """
        model, number = self.model, self.entry.number
        # the config that the weights were mapped with, whatever has been registered since
        keys = {file: files_key(model.name, model.files_id, file) for file in model.side_files}
        written |= write_side_files(self.store, model.name, number, model.files, keys)
        manifest = write_manifest(self.store, model.name, opened, written, agreed.layouts)
        now_ms = unix_ms()
        entry = VersionEntry(
            number,
            step=opened.step,
            run=opened.run,
            created_ms=opened.created_ms,
            nbytes=sum(file.nbytes for file in model.files.files),
            tensor_count=len(manifest.tensors),
            files_id=opened.files_id,
            write_id=agreed.claim,
            ranks=opened.ranks,
            ready_ms=ready_ms or now_ms,
            verified_ms=verified_ms or now_ms,
            durable_ms=now_ms,
            nonfinite_elements=manifest.nonfinite_elements,
            tensor_bytes=model.files.layout.nbytes if model.by_version else 0,
            held=manifest.held,
            traceparent=opened.traceparent,
        )
        return publish_version(self.heads, model.name, entry)

    def give_up(self, reason: str, *, aborted: bool, unless_claimed: bool) -> bool:
        """Close the version and delete what there is of it; whether it was left to other replicas instead.

        Args:
            reason: why.
            aborted: whether somebody asked for it.
            unless_claimed: whether it is left alone if others have claimed or published it.
        """
        if unless_claimed:
            try:
                history = self.heads.history(self.model.name)
                entry = None if history is None else history.head.open.get(self.entry.number)
                published = history is not None and history.find(self.entry.number) is not None
            except WeighbridgeError as error:
                log.warning("%s: who receives it could not be seen: %s", self, error)
                return False
            if published or (entry is not None and entry.claim):
                return True
        give_up(
            self.store, self.heads, self.model.name, self.entry.number, reason, by=self.home, aborted=aborted
        )
        return False

    def discard_if_gone(self) -> None:
        """Delete what an upload that was still under way has put into the store after the version was given up."""
        try:
            history = self.heads.history(self.model.name)
            if history is not None and history.is_gone(self.entry.number):
                discard_version(self.store, self.model.name, self.entry.number)
        except WeighbridgeError as error:
            log.warning("%s could not be cleaned up, and will be later: %s", self, error)


def give_up(
    store: ObjectStore,
    heads: HeadStore,
    model: ModelName,
    number: int,
    reason: str,
    *,
    by: Home | None,
    aborted: bool,
) -> None:
    """Close a version that will not be published, and delete what there is of it; later, if the store fails.

    Args:
        store: where versions are kept.
        heads: the heads in it.
        model: whose version.
        number: which version.
        reason: why.
        by: the replica that cannot go on with it; nothing happens if another one receives it alone. None if no replica is asked.
        aborted: whether somebody asked for it.
    """
    now_ms = unix_ms()

    def change(history: History) -> tuple[Head, bool]:
        head = history.head
        there = head.open.get(number)
        of_others = there is not None and by is not None and is_alone_elsewhere(there, by)
        after = head if of_others else give_up_version(head, number, reason, now_ms, aborted=aborted)
        return after, history.under(after).is_gone(number)

    try:
        # an attempt may fail after its head was written: what is in the head is never discarded
        if heads.edit(model, change):
            discard_version(store, model, number)
    except WeighbridgeError as error:
        log.warning("%s@%d could not be cleaned up, and will be later: %s", model, number, error)
