"""Publisher of one version: reads and writes of a push in the object store.

Every method blocks, and raises WeighbridgeError.
"""

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
    """Publisher of one version. Thread-safe.

    Attributes:
        store: the object store that holds versions.
        heads: the heads in it.
        model: the registration under which the version was opened.
        entry: entry of the version in head.json, as read when it was opened.
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
        """Record the claim in head.json: only replicas under this agreement may write the version's folder.

        Raises:
            VersionFailed: the version is no longer open.
            AlreadyExists: other replicas have claimed it under another agreement.
        """
        number = self.entry.number
        # the claim of a version that was taken over names the replica that has stopped
        holder = self.home.address if address_in(claim) not in ("", self.home.address) else ""
        self.heads.update(self.model.name, lambda head: (claim_version(head, number, claim, holder), None))

    def renew(self, seconds: float) -> None:
        """Renew the lease of the open version until ``seconds`` from now.

        Raises VersionFailed if the version is no longer open.
        """
        number, until_ms = self.entry.number, unix_ms() + round(seconds * 1000)
        self.heads.update(self.model.name, lambda head: (renew_version(head, number, until_ms), None))

    def look(self, effect: Awaited, *, closing: bool = False) -> on.HeadSaid:
        """State of the version in head.json. If the store cannot be reached, the verdict is `UNKNOWN`.

        Args:
            effect: the effect that the event answers.
            closing: whether to first close versions whose lease has expired.
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
            if not self._away.is_set():  # once per outage: sessions call this each second
                log.warning("%s: could not check whether it is still open: %s", self, error)
            self._away.set()
            return on.HeadSaid(effect, verdict.UNKNOWN)
        if self._away.is_set():
            log.warning("%s: can check again whether it is still open", self)
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
        """Whether head.json shows that another replica has taken the version over, or that it is published.

        False if the store cannot be reached.
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
        """Manifest of the parent version, whose files may be the same; None without one."""
        if not self.entry.parent:
            return None
        try:
            return read_manifest(self.store, self.model.name, self.entry.parent)
        except WeighbridgeError as error:  # the parent may be deleted; without it, all files are uploaded
            log.info("%s: nothing is copied from version %d: %s", self, self.entry.parent, error)
            return None

    def forget(self) -> None:
        """Drop the manifest of the parent version."""
        self.__dict__.pop("_parent", None)

    def upload(self, file: str, data: ByteArray, digests: FileDigests | None, go_on: Callable[[], None]) -> bool:
        """Put a file of weights into the store, or copy it there from the parent version if that has the same file.

        Args:
            file: name of the file.
            data: its bytes, header included.
            digests: digests of these bytes; None if they are not computed yet.
            go_on: raises if the upload is no longer needed.

        Returns:
            Whether the file is in the store. If not, it may equal the parent version's: call again with digests.
        """
        name, number, parent = self.model.name, self.entry.number, self._parent
        if parent is not None and digests is None and not differs_from(parent, file, data, go_on):
            return False
        copied = (
            parent is not None and digests is not None and copy_weights(self.store, name, number, file, digests, parent)
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
        """Write the side files and the manifest, and make the version part of history. Returns its entry there.

        Args:
            opened: the opened version, with the metadata and flags that all of its ranks have sent.
            agreed: the agreement under which it was pushed.
            written: all files of weights.
            ready_ms, verified_ms: when the version became ready and verified at this replica, in milliseconds since
                1970 UTC; 0 for now.

        Raises:
            VersionFailed: the version was given up in the meantime.
            AlreadyExists: other replicas have claimed it.
        """
        model, number = self.model, self.entry.number
        # the config with which the weights were mapped, even if another one was registered since
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
        """Close the version and delete its objects. Returns whether it was left to other replicas instead.

        Args:
            reason: the reason.
            aborted: whether a caller has aborted it.
            unless_claimed: whether to leave the version if other replicas have claimed or published it.
        """
        if unless_claimed:
            try:
                history = self.heads.history(self.model.name)
                entry = None if history is None else history.head.open.get(self.entry.number)
                published = history is not None and history.find(self.entry.number) is not None
            except WeighbridgeError as error:
                log.warning("%s: could not read which replica receives it: %s", self, error)
                return False
            if published or (entry is not None and entry.claim):
                return True
        give_up(self.store, self.heads, self.model.name, self.entry.number, reason, by=self.home, aborted=aborted)
        return False

    def discard_if_gone(self) -> None:
        """Delete the objects that a running upload has put into the store after the version was given up."""
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
    """Close a version that will not be published, and delete its objects.

    If the store fails, a later cleanup deletes them.

    Args:
        store: the object store that holds versions.
        heads: the heads in it.
        model: name of the model.
        number: number of the version.
        reason: the reason.
        by: the replica that cannot continue it; the version stays open if another replica receives it alone. None
            closes it in any case.
        aborted: whether a caller has aborted it.
    """
    now_ms = unix_ms()

    def change(history: History) -> tuple[Head, bool]:
        head = history.head
        there = head.open.get(number)
        of_others = there is not None and by is not None and is_alone_elsewhere(there, by)
        after = head if of_others else give_up_version(head, number, reason, now_ms, aborted=aborted)
        return after, history.under(after).is_gone(number)

    try:
        # an attempt may fail after its head was written, so objects are deleted only if the head read last shows the
        # version as gone
        if heads.edit(model, change):
            discard_version(store, model, number)
    except WeighbridgeError as error:
        log.warning("%s@%d could not be cleaned up, and will be later: %s", model, number, error)
