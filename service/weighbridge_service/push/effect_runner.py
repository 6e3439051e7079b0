"""Runner of the effects of one push: plans, memory, digests, the object store.

The state machine makes all decisions.
"""

from __future__ import annotations

import functools
import logging
import operator
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from weighbridge._core.text.waits import ranks_have
from weighbridge.errors import DeadlineExceeded, Unavailable, VersionFailed, WeighbridgeError
from weighbridge_service.catalog.snapshots import VersionSnapshot
from weighbridge_service.plan.declarations import Agreement, Declaration, Home, numbers_of
from weighbridge_service.push.declared_layouts import DeclaredLayouts
from weighbridge_service.push.filling.image_writer import ImageWriter
from weighbridge_service.push.handover import HandedShare, HandedVersion, Successors
from weighbridge_service.push.image_allocator import ImageAllocator, VersionRequest
from weighbridge_service.push.machine import effects as do
from weighbridge_service.push.machine import events as on
from weighbridge_service.push.machine.phases import FINAL, Phase
from weighbridge_service.push.machine.state import Limits, PushState
from weighbridge_service.push.mappings import Mappings
from weighbridge_service.push.observing.observer import PushFigures
from weighbridge_service.push.publisher import Publisher
from weighbridge_service.push.replica_exchange import Exchange
from weighbridge_storage.documents.entries import OpenEntry
from weighbridge_storage.memory.images import Image
from weighbridge_storage.versions.digests import FileDigests, digest_file
from weighbridge_storage.versions.writing import NOTHING_WRITTEN, Written

log = logging.getLogger(__name__)

_NAMED = 20


class Surroundings(Protocol):
    """Callbacks by which one push (a `PushSession`) reaches the other pushes of the process."""

    def show(self, session: Any, snapshot: VersionSnapshot, *, changed: bool) -> None:
        """Show the version's snapshot to readers; ``changed`` is whether more has changed than the received bytes."""

    def supersede(self, session: Any) -> None:
        """Mark older versions of the model as superseded: this one is visible."""

    def want_memory(self, session: Any) -> None:
        """Ask older versions of the model to release their memory: this one waits for an image."""

    def notify(self, session: Any) -> None:
        """Report the progress of this replica to the other replicas."""

    def forget(self, session: Any) -> None:
        """Remove the version from this process's lists, because other replicas receive it."""


class EffectSession(Protocol):
    """Session whose effects are carried out.

    The runner keeps no reference to it, so that both are freed as soon as the push has ended.
    """

    surroundings: Surroundings

    def go_on(self) -> None:
        """Raise if a long operation should stop because its result is no longer needed."""

    def post_all(self, events: Sequence[on.Event]) -> None:
        """Queue the events of the data plane."""


@dataclass(frozen=True, slots=True)
class Facilities:
    """Resources that all pushes of a process share.

    Attributes:
        home: this process, as other replicas see it.
        limits: timeouts and options of pushes that begin now.
        allocator: allocates images.
        mappings: the processes that have images mapped.
        successors: other replicas, to which this one hands versions over when it stops.
        figures: metrics of the pushes.
    """

    home: Home
    limits: Limits
    allocator: ImageAllocator
    mappings: Mappings
    successors: Successors
    figures: PushFigures


class EffectRunner:
    """Resources that a push holds outside of its state. The session runs at most one effect of each kind at a time.

    Args:
        publisher: publisher of the version.
        exchange: message exchange with other replicas.
        facilities: resources shared with other pushes.
        image: holds the bytes of a version that this replica has taken over from another one.

    Attributes:
        model: the registration under which the version was opened. If each version has its own tensors, it contains the
            tensors that the ranks
                have declared, once the plan is made.
        layouts: layouts that its ranks have declared.
        writer: the data plane; None before there is an image.
        image: memory in which the version's files are assembled; None before it is granted and after its release.
    """

    def __init__(
        self,
        publisher: Publisher,
        exchange: Exchange,
        facilities: Facilities,
        image: Image | None = None,
    ) -> None:
        self.model = publisher.model
        self.layouts = DeclaredLayouts(publisher.model)
        self.writer: ImageWriter | None = None
        self.image = image
        self._publisher = publisher
        self._exchange = exchange
        self._allocator = facilities.allocator
        self._mappings = facilities.mappings
        self._successors = facilities.successors
        self._request: VersionRequest | None = None
        self._digests: dict[str, FileDigests] = {}
        self._handed_in: dict[int, Written] = {}

    @property
    def entry(self) -> OpenEntry:
        """Entry of the version in head.json, as read when the version was opened."""
        return self._publisher.entry

    @property
    def written(self) -> Written:
        """Files of this replica, once they are in the store."""
        return Written.of(self._digests)

    def take_hand_in(self, replica: int, written: Written) -> None:
        """Record the files that another replica has uploaded."""
        self._handed_in.setdefault(replica, written)

    def run(self, effect: do.Effect, state: PushState, owner: EffectSession) -> on.Event | None:
        """Carry an effect out. Returns the event that answers it, or `EffectFailed` on errors. Returns None if no event
        answers the effect, or if a later event does."""
        try:
            return self.carry_out(effect, state, owner)
        except WeighbridgeError as error:
            if not isinstance(effect, do.AcquireImage):  # is retried all the time while memory is short
                log.warning("%s: %s failed: %s", state.name, effect, error.message)
            failure = error.with_traceback(None)  # the state keeps it
        except Exception as error:  # without an answer, the push would wait for this effect forever
            log.exception("%s: %s failed", state.name, effect)
            failure = _unexpected(effect, error)
        return on.EffectFailed(effect, failure) if isinstance(effect, do.Awaited) else None

    def carry_out(self, effect: do.Effect, state: PushState, owner: EffectSession) -> on.Event | None:
        """Like `run`, but raises errors."""
        match effect:
            case do.MakePlan():
                declared = state.declarations.declared
                layouts = [self.layouts.find(declared[rank].digest) for rank in range(len(declared))]
                model = self.model.declared_by(layout for _, layout in layouts)
                prepared = model.prepare(layouts, numbers_of(declared))
                if model is not self.model:
                    self.model, self._publisher = model, replace(self._publisher, model=model)
                return on.Planned(prepared)
            case do.AcquireImage():
                return self._acquire_image(state, owner)
            case do.NameMissing():
                heard_at = 0.0 if self.writer is None else self.writer.progress[1]
                return on.TimedOut(tuple(self._missing(state)[:_NAMED]), heard_at)
            case do.Digest(file):
                return self._digest(file, owner, sha256=state.limits.sha256)
            case do.CompareSample():
                self._compare_sample()
                return on.SampleCompared()
            case do.Upload(file):
                return self._upload(file, owner)
            case do.UploadDigests(file):
                self._publisher.upload_digests(file, self._digests[file])
                return on.DigestsUploaded(file)
            case do.LookAtHead(closing):
                return self._publisher.look(effect, closing=closing)
            case do.Confirm() | do.FindOut():
                return self._publisher.look(effect)
            case do.Claim():
                self._publisher.claim(_agreed(state).claim)
                return on.Claimed()
            case do.Renew():
                self._publisher.renew(state.limits.lease)
                return on.Renewed()
            case do.TellReplicas():
                return self._tell(state.declarations.here)
            case do.HearReplicas():
                return on.HeardElsewhere(self._hear())
            case do.HandIn() if state.share is not None:
                self._exchange.hand_in(state.share.me, _agreed(state).claim, self.written)
                return on.HandedIn()
            case do.CollectHandIns() if state.share is not None:
                return self._collect(state.share.owners - self._handed_in.keys(), _agreed(state).claim)
            case do.WriteManifestAndPublish():
                return self._publish(state, _agreed(state))
            case do.HandOver(to):
                self._hand_over(to, state, _agreed(state))
                return on.HandedOver(to)
            case do.ProbeMemory() if self.writer is not None:
                self.writer.probe()  # which answers later
            case do.RecallMemory() if self.image is not None:
                self._mappings.recall(self.image.region)
            case do.CloseStream(rank) if self.writer is not None:
                self.writer.close_stream(rank)
            case do.CloseWriter(error):
                self._close_writer(error)
            case do.ReleaseImage():
                self._close_writer(state.error)
                image, self.image = self.image, None
                if image is not None:
                    image.release()
            case do.Remember(known):
                self.model.known_set, self.model.known_number = known, state.opened.number
            case do.GiveUp(error, unless_claimed, aborted):
                if self._publisher.give_up(error.message, aborted=aborted, unless_claimed=unless_claimed):
                    return on.LeftToOthers()
            case do.Supersede():
                owner.surroundings.supersede(owner)
            case do.WantMemory():
                owner.surroundings.want_memory(owner)
            case do.NotifyReplicas():
                owner.surroundings.notify(owner)
            case do.Forget():
                owner.surroundings.forget(owner)
            case do.Awaited():
                raise AssertionError(effect)
        return None

    def follow_up(self, effect: do.Effect, answer: on.Event | None, state: PushState) -> None:
        """Finish an effect after the session has applied its answer: clean up after an ended push, begin to fill a new
        image.
        """
        if state.phase in FINAL:
            self._leave_line()  # the effect may have queued for an image after the end
        given_up = state.gave_up or state.phase in (Phase.FAILED, Phase.ABORTED)
        if given_up and isinstance(effect, do.Upload | do.UploadDigests):
            self._publisher.discard_if_gone()
        writer = self.writer
        if isinstance(answer, on.ImageGranted) and writer is not None:
            writer.begin()

    # --- memory

    def _close_writer(self, error: WeighbridgeError | None) -> None:
        self._leave_line()
        if self.writer is not None:
            self.writer.close(error)
        if error is None and self.image is not None:
            self.image.freeze()

    def _acquire_image(self, state: PushState, owner: EffectSession) -> on.Event:
        agreed, share = _agreed(state), state.share
        if self._request is None:
            files = frozenset[str]() if share is None else share.files.keys()
            self._request = self._allocator.request(self.model, state.opened.number, files)
        image = self._request.take()
        try:
            home = state.declarations.home
            self.writer = ImageWriter(state.name, agreed, home, image, owner.post_all)
        except BaseException:
            image.release()
            raise
        self.image = image
        return on.ImageGranted()

    def _leave_line(self) -> None:
        if self._request is not None:
            self._request.leave()

    def planned(self, state: PushState) -> None:
        """Release the layouts once the plan is made, except those that this replica has yet to offer to other
        replicas.
        """
        spreading = state.limits.spreading
        self.layouts.let_go(lambda digest: spreading and not self.model.is_offered(digest))

    def forget(self) -> None:
        """Drop the data plane, digests and layouts of a push that has ended.

        Its session is kept for a while, and digests are large.
        """
        self.writer = None
        self._digests, self._handed_in = {}, {}
        self.layouts.let_go(lambda _digest: False)
        self._publisher.forget()

    def _image_there(self) -> Image:
        image = self.image
        if image is None:
            raise VersionFailed(f"{self._publisher} was given up")
        return image

    def _digest(self, file: str, owner: EffectSession, *, sha256: bool) -> on.Event:
        image = self._image_there()
        with image.hold():
            data = image.read_only_buffers[file]
            digests = digest_file(self.model.files, file, data, owner.go_on, sha256=sha256)
        owner.go_on()  # digests stored after `forget` would never be freed
        self._digests[file] = digests
        return on.Digested(file, sum(digests.nonfinite.values()))

    def _compare_sample(self) -> None:
        image = self._image_there()
        if self.writer is not None:
            with image.hold():
                self.writer.compare_sample(image.read_only_buffers)

    def _upload(self, file: str, owner: EffectSession) -> on.Event:
        image = self._image_there()
        with image.hold():
            data = image.read_only_buffers[file]
            is_there = self._publisher.upload(file, data, self._digests.get(file), owner.go_on)
        return on.Uploaded(file) if is_there else on.PerhapsUnchanged(file)

    def _missing(self, state: PushState) -> list[str]:
        """Ranks and shards that have not arrived, one line each. Shards come last, because there are many of them."""
        share, lines = state.share, [(state.declarations.absent, "not declared")]
        if share is not None:
            lines.append((sorted(share.ranks - state.sealed), "not sealed"))
        missing = [f"{ranks_have(ranks)} {what}" for ranks, what in lines if ranks]
        if state.memory_mapped_at is not None:
            missing.append("a process can still write to the memory of files that have arrived")
        return missing if self.writer is None else missing + self.writer.missing_of_all()

    # --- other replicas

    def _hand_over(self, to: Home, state: PushState, agreed: Agreement) -> None:
        seconds = state.until - time.monotonic()
        if seconds <= 0:
            raise DeadlineExceeded("no time was left for the handover")
        declared = state.declarations.declared
        ranks = [(declared[rank].client_id, declared[rank].digest) for rank in sorted(declared)]
        entry, spread, share = self._opened(state), agreed.prepared.spread, None
        if spread is not None and state.share is not None:
            share = HandedShare(state.share.me, agreed.homes, spread.owners, agreed.handovers)
        nonfinite = state.holding.known
        handed = HandedVersion(self.model, entry, agreed.claim, state.ready_ms, ranks, share, nonfinite)
        memory_wait = seconds / 2 / max(len(state.successors), 1)  # the rest is for reading, and for the next ones
        try:
            self._successors.hand_over(to, handed, seconds, memory_wait)
        except (DeadlineExceeded, Unavailable):
            if not self._publisher.is_owned_by(to):  # its answer may be lost
                raise

    def _opened(self, state: PushState) -> OpenEntry:
        """The opened version, with the metadata and flags that all of its ranks have sent since."""
        entry, holding = self._publisher.entry, state.holding
        return replace(
            entry,
            held=holding.opened,
            allow_nonfinite=holding.allows_nonfinite,
            metadata=state.opened.metadata,
            cast_from=tuple(sorted({*entry.cast_from, *state.cast_from})),
        )

    def _tell(self, here: Mapping[int, Declaration]) -> on.Event:
        for digest in {declaration.digest for declaration in here.values()}:
            if not self.model.is_offered(digest):
                self._exchange.offer_layout(digest, *self.layouts.find(digest))
                self.model.offered(digest)
        self._exchange.tell(here)
        return on.ReplicasTold(frozenset(here))

    def _hear(self) -> list[tuple[int, Declaration]]:
        heard: list[tuple[int, Declaration]] = []
        try:
            for batch in self._exchange.listen():
                for declaration in batch.values():
                    if not self.layouts.knows(declaration.digest):
                        self.layouts.add(*self._exchange.layout(declaration.digest))
                heard += batch.items()
        except WeighbridgeError:
            if not heard:
                raise  # otherwise return what was read: it is not read again, the rest is
        return heard

    def _collect(self, wanted: frozenset[int], claim: str) -> on.Event:
        if wanted:
            self._handed_in |= self._exchange.handed_in(claim, wanted)
        nonfinite = {
            number: sum(tensor.nonfinite for tensor in files.tensors.values())
            for number, files in self._handed_in.items()
        }
        return on.ReplicasHandedIn(frozenset(self._handed_in), nonfinite)

    def _publish(self, state: PushState, agreed: Agreement) -> on.Event:
        handed_in = functools.reduce(operator.or_, self._handed_in.values(), NOTHING_WRITTEN)
        written = self.written if agreed.alone else handed_in
        opened = self._opened(state)
        entry = self._publisher.publish(opened, agreed, written, state.ready_ms, state.verified_ms)
        if state.told:
            self._clear_exchange(state)
        return on.Published(entry)

    def _clear_exchange(self, state: PushState) -> None:
        try:
            self._exchange.clear()
        except WeighbridgeError as error:  # the next collection does it
            log.info("%s: the documents that replicas exchanged stay in the store for now: %s", state.name, error)


def _agreed(state: PushState) -> Agreement:
    if state.agreed is None:
        raise AssertionError(f"{state.name} is not agreed on")
    return state.agreed


def _unexpected(effect: do.Effect, error: Exception) -> WeighbridgeError:
    match effect:
        case do.MakePlan():
            return WeighbridgeError(f"the push could not be planned: {type(error).__name__}")
        case do.AcquireImage():
            return WeighbridgeError(f"the image could not be allocated: {error!r}")
        case _:
            return Unavailable(f"{effect} failed: {error!r}")
