"""A push in a simulated world.

Around the state machine are replicas, ranks, a head.json that is changed by the real pure functions, and effects that
are answered late, in any order, with failures, or with failures although the effect was carried out. Each seed is one
run.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from tests.support.agreements import home_of
from tests.support.heads import history, open_version
from weighbridge._core.resources import Version, VersionState
from weighbridge.errors import (
    AlreadyExists,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    LayoutError,
    ResourceExhausted,
    Unavailable,
    VersionFailed,
    WeighbridgeError,
)
from weighbridge_service.catalog.holding import HoldReasons
from weighbridge_service.plan.declarations import (
    Agreement,
    Declaration,
    Declarations,
    Home,
    KnownSet,
    numbers_of,
)
from weighbridge_service.plan.push_plan import PreparedPush
from weighbridge_service.plan.replica_placement import Spread
from weighbridge_service.push.machine import effects as do
from weighbridge_service.push.machine import events as on
from weighbridge_service.push.machine.answers import answer_abort, answer_declare, answer_seal, check_owned
from weighbridge_service.push.machine.phases import FINAL, TRANSITIONS, VISIBLE, Phase
from weighbridge_service.push.machine.shown import version_of, waits_for
from weighbridge_service.push.machine.state import Limits, Moment, PushState
from weighbridge_service.push.machine.transitions import step
from weighbridge_storage.documents.entries import Approval, OpenEntry, VersionEntry
from weighbridge_storage.head.head import Head
from weighbridge_storage.head.head_changes import publish
from weighbridge_storage.head.open_versions import (
    Said,
    claim_version,
    give_up_abandoned,
    give_up_version,
    renew_version,
)
from weighbridge_storage.head.requests import approve_version

STEPS = 200
LIMITS = Limits(receive_timeout=300.0, image_wait=60.0, lease=120.0)
FILES = ("a", "b", "c")


STORE = (
    do.Claim, do.Renew, do.LookAtHead, do.Confirm, do.FindOut, do.TellReplicas, do.HearReplicas, do.HandIn,
    do.CollectHandIns, do.Upload, do.UploadDigests, do.WriteManifestAndPublish,
)  # fmt: skip
"""Effects that need the object store."""


def planned(homes: tuple[int, ...]) -> PreparedPush:
    """A plan for ranks at these replicas; nothing looks into its copies."""
    streams: Any = dict.fromkeys(range(len(homes)))
    fills = dict.fromkeys(FILES, 10)
    owners = {file: i % (max(homes) + 1) for i, file in enumerate(FILES)}
    spread = None if max(homes) == 0 else Spread(homes, owners, {})
    return PreparedPush({}, streams, None, fills, {}, spread)  # type: ignore[arg-type]


def taken_agreement(agreed: Agreement, number: int, to: Home, ranks: int) -> Agreement:
    """The agreement of a replica that takes over a share: the same one, with no more bytes to push."""
    if agreed.prepared.spread is None:
        return Agreement(planned((0,) * ranks), (to,), agreed.claim)
    prepared = replace(agreed.prepared, spread=replace(agreed.prepared.spread, homes=(number,) * ranks))
    return replace(agreed, prepared=prepared).moved(number, to, agreed.handovers.get(number, 0) + 1)


@dataclass
class Push:
    """One replica's part in a version, with what its owner would keep."""

    state: PushState
    inflight: list[do.Awaited] = field(default_factory=list)
    arrived: set[int] = field(default_factory=set)
    held: bool = False
    history: list[on.Event] = field(default_factory=list)
    forgotten: bool = False

    @property
    def number(self) -> int:
        return self.state.opened.number

    def clone(self) -> Push:
        return replace(self, inflight=[*self.inflight], arrived={*self.arrived}, history=[*self.history])


@dataclass
class Replica:
    home: Home
    pushes: dict[int, Push] = field(default_factory=dict)
    taken: list[Push] = field(default_factory=list)
    known: KnownSet | None = None
    boots: int = 0

    @property
    def parts(self) -> list[Push]:
        """Its own parts in versions, and those that it has taken over beside them."""
        return [*self.pushes.values(), *self.taken]

    def parts_of(self, number: int) -> list[Push]:
        return [part for part in self.parts if part.number == number]


class World:
    """Replicas over one head.json."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.now = Moment(1000.0, 1_000_000)
        self.head = Head()
        self.replicas = [Replica(Home(f"host{i}:1", f"boot{i}.0")) for i in range(self.dice.choice([1, 2, 3]))]
        self.limits = replace(LIMITS, spreading=len(self.replicas) > 1)
        self.spread = self.dice.random() < 0.6
        self.numbers: dict[int, str] = {}
        self.told: dict[int, dict[int, Declaration]] = {}
        self.handed: dict[int, set[tuple[str, int]]] = {}
        self.uploaded: dict[int, set[tuple[str, str]]] = {}
        self.published: dict[int, str] = {}
        self.taken_over: set[tuple[Home, int, int | None]] = set()
        self.fault_rate = self.dice.choice([0.0, 0.1, 0.4])
        self.unrest = self.dice.choice([0.0, 0.0, 0.1, 1.0])
        self.pauses = [0.001, 0.01, 0.1, 0.3, 1.0, 5.0, 60.0]
        self.dirty: dict[int, int] = {}
        """Elements of each file of a version that are not finite."""
        self.counting = self.dice.random() < 0.5
        """Whether ranks count them."""
        self.said = self.dice.choice([Said(), Said(), Said(candidate=True), Said(allow_nonfinite=True)])
        """The options that all ranks give when they open a version."""

    def clone(self) -> World:
        """A copy of the world, to try an event on."""
        other = copy.copy(self)
        other.dice = random.Random()
        other.dice.setstate(self.dice.getstate())
        for name in ("numbers", "published", "dirty"):
            setattr(other, name, dict(getattr(self, name)))
        other.taken_over = {*self.taken_over}
        for name in ("told", "handed", "uploaded"):
            setattr(other, name, {number: copy.copy(each) for number, each in getattr(self, name).items()})
        other.replicas = [
            replace(
                replica,
                pushes={number: push.clone() for number, push in replica.pushes.items()},
                taken=[push.clone() for push in replica.taken],
            )
            for replica in self.replicas
        ]
        return other

    # --- the machine, with what is promised of each of its steps

    def post(self, replica: Replica, push: Push, event: on.Event) -> None:
        before = push.state
        after, effects = step(before, event, self.now)
        push.history.append(event)
        push.state = after
        if after.phase is not before.phase:
            assert after.phase in reachable(before.phase), (before.phase, event, after.phase)
        if before.phase in FINAL:
            assert after.phase is before.phase
            assert all(isinstance(effect, do.Release | do.Supersede) for effect in effects), effects
        if after.phase is Phase.HANDED_OVER:
            taken = (after.handed_to, push.number, after.share_number)
            assert taken in self.taken_over, "left with nobody who has it"
        started = [effect for effect in effects if isinstance(effect, do.Awaited)]
        assert len(set(started)) == len(started)
        assert not set(started) & set(push.inflight), "it is under way"
        assert after.phase in FINAL or set(started) <= after.running
        self.check(replica, push)
        for effect in effects:
            match effect:
                case do.Awaited():
                    push.inflight.append(effect)
                case do.WriteManifestAndPublish():
                    raise AssertionError
                case do.Remember(known):
                    replica.known = known
                case do.Supersede():
                    assert push.state.released, "one that is held takes no other's place"
                    for other in replica.parts:
                        if other.number < push.number:
                            self.post(replica, other, on.Superseded())
                case do.GiveUp():
                    self.give_up(replica, push, effect)
                case do.WantMemory():
                    for other in replica.parts:
                        if other.number < push.number:
                            self.post(replica, other, on.MemoryWanted())
                case do.Forget():
                    push.forgotten = True

    def check(self, replica: Replica, push: Push) -> None:
        state, number = push.state, push.number
        shown = version_of(state)
        if shown.state.visible and state.phase is not Phase.PUBLISHED:
            assert state.share is not None
            assert state.filled == state.share.files.keys(), "visible before its files are complete"
            assert state.sealed == state.share.ranks, "visible before its ranks have sealed"
            assert state.share.alone or state.others_complete
        if state.released:
            self.check_released(state)
        if state.phase is Phase.VERIFIED:
            assert state.verified_here
        if state.phase is Phase.PUBLISHED:
            assert state.agreed is not None
            assert self.published.get(number) == state.agreed.claim
            entry = history(self.head).find(number)
            assert entry is not None
            assert shown.nonfinite_elements == entry.nonfinite_elements, "not what other replicas say"
            assert (shown.ready_time_ms, shown.verified_time_ms, shown.durable_time_ms) == (
                entry.ready_ms,
                entry.verified_ms,
                entry.durable_ms,
            )
        if do.WriteManifestAndPublish() in state.running:
            assert state.agreed is not None
            wanted = {(state.agreed.claim, file + part) for file in FILES for part in ("", ".blake3")}
            assert wanted <= self.uploaded.get(number, set()), "published before everything is in the store"
            assert state.verified_here or not state.share.files  # type: ignore[union-attr]
        if state.phase not in FINAL:
            assert state.gave_up or state.running or state.wake_at is not None, "nothing leads out of this"
            assert list(waits_for(state)) or state.wake_at is not None
        else:
            assert not list(waits_for(state))
        for answer in (
            lambda: answer_declare(state, 0, "c0", "x"),
            lambda: answer_seal(state, 0),
            lambda: answer_abort(state),
        ):
            try:
                answered = answer()
            except WeighbridgeError:
                answered = None
                assert state.phase in FINAL or not isinstance(answer, LayoutError)
            if state.phase in FINAL and answer_raises_at_end(state):
                assert answered is None or state.phase is not Phase.PUBLISHED or answered is True

    def check_released(self, state: PushState) -> None:
        """Check that a version that ``live`` may name is not held for any reason reported so far."""
        number = state.opened.number
        entry = self.head.open.get(number) or history(self.head).find(number)
        if entry is None:  # it was given up, and the push has not learned that yet
            return
        approved = set() if entry.approval is None else {*entry.approval.reasons}
        assert not self.said.candidate or "candidate" in approved, "live while it is a candidate"
        known = self.counting or state.digested or state.phase is Phase.PUBLISHED
        if known and self.dirty[number] and not self.said.allow_nonfinite:
            assert "nonfinite" in approved, "live while it is known not to be finite"

    def check_latest(self) -> None:
        """``latest`` names the highest version of history that is not held, or was not, and moves to no other."""
        versions = history(self.head).versions()
        released = [number for number, entry in versions.items() if not entry.held]
        assert self.head.latest == max(released, default=0)
        Head.from_json(replace(self.head, generation=1).to_json())
        assert bool(self.head.requires) == any(entry.held for entry in (*versions.values(), *self.head.open.values()))

    # --- the world

    def approve(self) -> None:
        """Approve a visible held version, at a replica that receives it or at another one, and then once more."""
        found = self.some_push()
        if found is None:
            return
        replica, push = found
        version = version_of(push.state)
        if not version.state.visible or not version.held:
            return
        if push.number not in self.head.open and history(self.head).find(push.number) is None:
            return
        approval = Approval("somebody", self.now.unix_ms, reasons=version.held)
        before = history(self.head)
        self.head = approve_version(before, push.number, approval)
        assert approve_version(history(self.head), push.number, approval) == self.head, "approved again"
        self.check_latest()
        if self.dice.random() < 0.5:
            for part in replica.parts_of(push.number):
                self.post(replica, part, on.Approved(version.held))

    def give_up(self, replica: Replica, push: Push, effect: do.GiveUp) -> None:
        if self.faulty():
            return
        entry = self.head.open.get(push.number)
        known = history(self.head).find(push.number) or (entry is not None and entry.claim)
        if effect.unless_claimed and known:
            self.post(replica, push, on.LeftToOthers())
            return
        reason, now_ms = effect.error.message, self.now.unix_ms
        self.head = give_up_version(self.head, push.number, reason, now_ms, aborted=effect.aborted)

    def faulty(self) -> bool:
        return self.dice.random() < self.fault_rate

    def advance(self, seconds: float) -> None:
        self.now = Moment(self.now.seconds + seconds, self.now.unix_ms + round(seconds * 1000))

    def verdict(self, effect: do.Awaited, number: int) -> on.HeadSaid:
        there = history(self.head).find(number)
        if there is not None:
            return on.HeadSaid(effect, on.Verdict.PUBLISHED, there.write_id, entry=there)
        if number in self.head.open:
            opened = self.head.open[number]
            return on.HeadSaid(effect, on.Verdict.OPEN, opened.claim, opened=opened)
        failed = self.head.failed.get(number)
        verdict = on.Verdict.ABORTED if failed is not None and failed.aborted else on.Verdict.GIVEN_UP
        return on.HeadSaid(effect, verdict, reason="it was given up")

    def carry_out(self, replica: Replica, push: Push, effect: do.Awaited) -> on.Event:
        """Carry out an effect; its answer. Raises the errors of a real one."""
        state, number = push.state, push.number
        agreed = state.agreed
        match effect:
            case do.MakePlan():
                return on.Planned(planned(numbers_of(state.declarations.declared)))
            case do.AcquireImage():
                return on.ImageGranted()
            case do.LookAtHead(closing):
                if closing:
                    self.head = give_up_abandoned(self.head, self.now.unix_ms)
                return self.verdict(effect, number)
            case do.Confirm() | do.FindOut():
                return self.verdict(effect, number)
            case do.Renew():
                until = self.now.unix_ms + round(self.limits.lease * 1000)
                self.head = renew_version(self.head, number, until)
                return on.Renewed()
            case do.NameMissing():
                return on.TimedOut(("something",))
            case do.ProbeMemory():
                return on.MemoryStillMapped() if push.held else on.MemoryUnmapped()
            case do.TellReplicas():
                here = state.declarations.here
                self.told.setdefault(number, {}).update(here)
                return on.ReplicasTold(frozenset(here))
            case do.HearReplicas():
                others = [(r, d) for r, d in self.told.get(number, {}).items() if d.home != replica.home]
                return on.HeardElsewhere(others)
        assert agreed is not None
        match effect:
            case do.Claim():
                self.head = claim_version(self.head, number, agreed.claim)
                return on.Claimed()
            case do.Digest(file):
                return on.Digested(file, self.dirty[number])
            case do.CompareSample():
                return on.SampleCompared()
            case do.Upload(file):
                assert file in state.filled, "uploaded before it is complete"
                if file not in state.digested and self.dice.random() < 0.5:
                    assert file not in state.perhaps_unchanged, "it has no digests yet"
                    return on.PerhapsUnchanged(file)
                self.uploaded.setdefault(number, set()).add((agreed.claim, file))
                return on.Uploaded(file)
            case do.UploadDigests(file):
                assert file in state.digested
                self.uploaded.setdefault(number, set()).add((agreed.claim, f"{file}.blake3"))
                return on.DigestsUploaded(file)
            case do.HandOver(to):
                self.take_over(to, push, agreed)
                return on.HandedOver(to)
            case do.HandIn():
                self.handed.setdefault(number, set()).add((agreed.claim, state.share.me))  # type: ignore[union-attr]
                return on.HandedIn()
            case do.CollectHandIns():
                handed = self.handed.get(number, set())
                there = frozenset(r for claim, r in handed if claim == agreed.claim)
                return on.ReplicasHandedIn(there, dict.fromkeys(there, self.dirty[number]))
            case do.WriteManifestAndPublish():
                now_ms = self.now.unix_ms
                entry = VersionEntry(
                    number, 0, "r", 0, 30, 3, "", agreed.claim, ranks=state.opened.ranks, ready_ms=state.ready_ms or now_ms,
                    verified_ms=state.verified_ms or now_ms, durable_ms=now_ms,
                    nonfinite_elements=self.dirty[number] * len(FILES),
                    held=("nonfinite",) if self.dirty[number] and not state.holding.allows_nonfinite else (),
                )  # fmt: skip
                self.head = publish(history(self.head), entry)
                self.check_latest()
                assert self.published.setdefault(number, agreed.claim) == agreed.claim, "published twice"
                published = history(self.head).find(number)
                assert published is not None
                return on.Published(published)
        raise AssertionError(effect)

    def take_over(self, to: Home, push: Push, agreed: Agreement) -> None:
        """Make another replica the owner of a version, if it is alive and has not had it before."""
        replica = next((each for each in self.replicas if each.home == to), None)
        if replica is None:
            raise Unavailable("it cannot be reached")
        state, there = push.state, replica.parts_of(push.number)
        number = state.share_number or 0
        for each in there:
            check_owned(each.state, agreed.claim)
        if not any(agreed.alone or each.state.share_number == number for each in there):
            ranks = state.declarations.declared
            sent = [(ranks[rank].client_id, ranks[rank].digest) for rank in range(len(ranks))]
            begun = PushState.taken_over(
                replace(state.opened),
                Declarations.taken_over(state.opened, to, sent, taken_agreement(agreed, number, to, len(ranks))),
                number,
                self.limits,
                state.ready_ms,
                self.now,
                self.handed_over(state),
            )
            part = Push(begun, arrived=set(ranks))
            if there:
                replica.taken.append(part)
                self.post(replica, part, on.Superseded())
            else:
                replica.pushes[push.number] = part
            self.post(replica, part, on.Tick())
            moved = on.ShareMoved(number, to, agreed.handovers.get(number, 0) + 1)
            for each in there:
                self.post(replica, each, moved)
        self.taken_over.add((to, push.number, state.share_number))

    def handed_over(self, state: PushState) -> HoldReasons:
        """The hold reasons that a replica receives with a version that it takes over."""
        entry = replace(
            OpenEntry(state.opened.number, "r0", 0, "r", 1, 0, 0, "", 0),
            held=state.holding.opened,
            allow_nonfinite=state.holding.allows_nonfinite,
        )
        return HoldReasons.of(entry).with_elsewhere(state.share_number or 0, state.holding.known)

    def answer(self, replica: Replica, push: Push, effect: do.Awaited, *, store_away: bool = False) -> None:
        """Answer an effect in flight: correctly, with a failure, or with a failure although it was carried out."""
        push.inflight.remove(effect)
        landed = store_away or not self.faulty()
        try:
            if store_away and isinstance(effect, STORE):
                raise Unavailable("the store is away")
            if not landed and self.dice.random() < 0.5:
                raise self.some_failure(effect)
            event = self.carry_out(replica, push, effect)
            if not landed:
                raise self.some_failure(effect)
        except WeighbridgeError as error:
            if isinstance(effect, do.LookAtHead | do.Confirm | do.FindOut):
                event = on.HeadSaid(effect, on.Verdict.UNKNOWN)
            elif isinstance(effect, do.NameMissing):
                event = on.TimedOut(())
            elif isinstance(effect, do.ProbeMemory):
                event = on.MemoryStillMapped()
            else:
                event = on.EffectFailed(effect, error)
        self.post(replica, push, event)

    def some_failure(self, effect: do.Awaited) -> WeighbridgeError:
        kinds: list[type[WeighbridgeError]] = [Unavailable, DeadlineExceeded, ResourceExhausted, DataLoss]
        if isinstance(effect, do.MakePlan):
            kinds = [LayoutError, FailedPrecondition]
        elif self.dice.random() < 0.1:
            kinds = [VersionFailed, AlreadyExists]
        return self.dice.choice(kinds)("something went wrong")

    # --- what can happen

    def some_push(self) -> tuple[Replica, Push] | None:
        found = [(r, p) for r in self.replicas for p in r.parts]
        unfinished = [each for each in found if each[1].state.unfinished]
        if unfinished and self.dice.random() < 0.9:
            return self.dice.choice(unfinished)
        return self.dice.choice(found) if found else None

    def open(self) -> None:
        replica, request = self.dice.choice(self.replicas), f"r{self.dice.randrange(2)}"
        ranks = 2 if len(self.replicas) < 3 else 3
        for push in replica.pushes.values():
            failed = push.state.phase in (Phase.FAILED, Phase.ABORTED)
            if self.numbers[push.number] == request and failed:
                self.head = give_up_version(self.head, push.number, "it failed", self.now.unix_ms)
        lease_ms = round(self.limits.lease * 1000)
        next_number = self.head.next_version
        self.head, entry = open_version(
            self.head,
            request_id=request,
            step=0,
            run="r",
            ranks=ranks,
            now_ms=self.now.unix_ms,
            lease_ms=lease_ms,
            said=self.said,
        )
        if entry.number == next_number:
            assert entry.number not in self.numbers, "a number was given twice"
            self.numbers[entry.number] = request
            self.dirty[entry.number] = self.dice.choice([0, 0, 7])
        assert self.numbers[entry.number] == request
        if entry.number not in replica.pushes:
            self.begin(replica, entry)
        else:
            self.post(replica, replica.pushes[entry.number], on.Described(entry))

    def begin(self, replica: Replica, entry: Any) -> None:
        opened = Version("acme/m", entry.number, VersionState.OPEN, ranks=entry.ranks, create_time_ms=entry.created_ms)
        left = (entry.until_ms - self.now.unix_ms) / 1000
        known, holding = replica.known, HoldReasons.of(entry)
        state = PushState.begin(opened, replica.home, self.limits, known, left, self.now, holding)
        replica.pushes[entry.number] = push = Push(state)
        self.post(replica, push, on.Tick())

    def declare(self) -> None:
        found = self.some_push()
        if found is None:
            return
        replica, push = found
        rank = self.dice.randrange(push.state.opened.ranks)
        if self.dice.random() < 0.9:  # each rank pushes to a replica of its own, or all to one
            replica = self.replicas[rank % len(self.replicas) if self.spread else 0]
        entry = self.head.open.get(push.number)
        if push.number not in replica.pushes:
            if entry is None:
                return
            self.begin(replica, entry)
        client = f"c{rank}" if self.dice.random() < 0.95 else "stranger"
        digest = f"d{rank}" if self.dice.random() < 0.95 else "other"
        self.post(replica, replica.pushes[push.number], on.RankDeclared(rank, client, digest))

    def deliver(self) -> None:
        """A rank pushes all its bytes: they get to all replicas that put files together."""
        found = self.some_push()
        if found is None or found[1].state.agreed is None:
            return
        _, push = found
        agreed = push.state.agreed
        rank = self.dice.randrange(push.state.opened.ranks)
        parts = [
            (r, p)
            for r in self.replicas
            if (p := r.pushes.get(push.number)) is not None
            and p.state.agreed is not None
            and p.state.agreed.claim == agreed.claim
        ]
        if len(parts) < len(agreed.homes) or any(p.state.phase is not Phase.FILLING for _, p in parts):
            return
        for replica, part in parts:
            part.arrived.add(rank)
            if len(part.arrived) == push.state.opened.ranks:
                if not part.held:
                    self.post(replica, part, on.FilesFilled(frozenset(FILES)))
                else:
                    self.post(replica, part, on.MemoryMapped())
            if home_of(agreed, rank) == replica.home:
                self.post(replica, part, on.RankWhole(rank))

    def seal(self) -> None:
        found = self.some_push()
        if found is None:
            return
        replica, push = found
        rank = self.dice.randrange(push.state.opened.ranks)
        if rank in push.arrived:
            self.post(replica, push, self.sealing(push.number, rank))

    def sealing(self, number: int, rank: int) -> on.SealAsked:
        """A rank seals. The elements that are not finite are all in what rank 0 has pushed."""
        return on.SealAsked(rank, self.dirty[number] * len(FILES) if self.counting and rank == 0 else 0)

    def hold_or_release(self) -> None:
        found = self.some_push()
        if found is None:
            return
        replica, push = found
        if push.held:
            push.held = False
            if len(push.arrived) == push.state.opened.ranks:
                self.post(replica, push, on.FilesFilled(frozenset(FILES)))
        elif not push.state.filled:
            push.held = True

    def heartbeat(self) -> None:
        """Report to a replica the progress of another one, its loss, or by mistake its loss."""
        found = self.some_push()
        if found is None or (agreed := found[1].state.agreed) is None:
            return
        replica, push = found
        number = self.dice.randrange(len(agreed.homes))
        if self.dice.random() < 0.02 * self.unrest:
            self.post(replica, push, on.ReplicaLost(number, VersionFailed("a replica is gone")))
        else:
            self.hear(replica, push, number)

    def hear(self, replica: Replica, push: Push, number: int) -> None:
        """Report to a replica the progress of one that has a share, or its loss."""
        agreed = push.state.agreed
        assert agreed is not None
        if not any(r.home == agreed.homes[number] for r in self.replicas):
            self.post(replica, push, on.ReplicaLost(number, VersionFailed("a replica is gone")))
            return
        parts = [
            (r, part)
            for r in self.replicas
            for part in r.parts_of(push.number)
            if r is not replica
            and part.state.agreed is not None
            and (part.state.agreed.claim, part.state.share_number) == (agreed.claim, number)
        ]
        if not parts:
            return
        other, part = self.dice.choice(parts)
        state = part.state
        assert state.agreed is not None
        self.post(replica, push, on.ShareMoved(number, other.home, state.agreed.handovers.get(number, 0)))
        agreed = push.state.agreed
        if agreed is not None and agreed.homes[number] == other.home:
            if state.phase is Phase.PUBLISHED:
                self.post(replica, push, on.SaidPublished())
            elif state.phase in (Phase.FAILED, Phase.ABORTED):
                if state.phase is Phase.ABORTED:
                    self.post(replica, push, on.Aborted("a replica was told to"))
                self.post(replica, push, on.ReplicaLost(number, VersionFailed("a replica gave it up")))
            elif state.complete_here:
                said = on.ReplicaSaid(number, state.handed_in_here, state.holding.here)
                self.post(replica, push, said)

    def answer_some(self) -> None:
        waiting = [(r, p, effect) for r in self.replicas for p in r.parts for effect in p.inflight]
        if waiting:
            self.answer(*self.dice.choice(waiting))

    def tick(self) -> None:
        self.advance(self.dice.choice(self.pauses))
        for replica in self.replicas:
            for push in replica.parts:
                self.post(replica, push, on.Tick(self.dice.randrange(30), self.now.seconds - 1))

    def abort(self) -> None:
        found = self.some_push()
        if found is not None and self.dice.random() < 0.3:
            self.post(*found, on.Aborted("changed my mind"))
        elif self.head.open and self.dice.random() < 0.1:  # at a replica that does not receive it
            number = self.dice.choice(sorted(self.head.open))
            self.head = give_up_version(self.head, number, "changed my mind", self.now.unix_ms, aborted=True)

    def crash(self) -> None:
        if self.dice.random() < 0.1:
            replica = self.dice.choice(self.replicas)
            replica.boots += 1
            replica.pushes.clear()
            replica.taken.clear()
            replica.known = None
            replica.home = Home(replica.home.address, f"{replica.home.boot.split('.')[0]}.{replica.boots}")

    def break_some(self) -> None:
        found = self.some_push()
        if found is not None and self.dice.random() < 0.1:
            self.post(*found, on.Broken(DataLoss("bytes were lost")))

    def drain(self) -> None:
        found = self.some_push()
        if found is not None and self.dice.random() < (0.5 if found[1].state.phase in VISIBLE else 0.05):
            replica = found[0]
            others = tuple(each.home for each in self.replicas if each is not replica)
            for push in replica.parts:
                at = self.now.seconds + self.dice.choice([0.0, 1.0, 30.0])
                self.post(replica, push, on.Draining(others, at, at + 30.0))

    def nonsense(self) -> None:
        """Post a repeated event, an event of another push, or an answer to an effect that was never requested."""
        found = self.some_push()
        if found is None:
            return
        replica, push = found
        everything = [e for r in self.replicas for p in r.parts for e in p.history]
        told = (
            on.FilesFilled,
            on.SealAsked,
            on.RankWhole,
            on.ReplicaSaid,
            on.MemoryMapped,
        )  # by the data plane: true
        again = [e for e in everything if not isinstance(e, told)]
        event = self.dice.choice(
            [
                *again[-50:],
                on.Published(ENTRY),
                on.Claimed(),
                on.SampleCompared(),
                on.Digested("a", 0),
                on.Idle(),
                on.MemoryWanted(),
            ]
        )
        effect = on.answered_by(event)
        if effect is None and not isinstance(event, on.Tick | on.Draining | on.Superseded | on.Idle):
            return
        if effect not in push.state.running:
            self.post(replica, push, event)

    def act(self) -> None:
        unrest = self.unrest
        actions: list[tuple[float, Callable[[], None]]] = [
            (0.3, self.open), (5, self.declare), (6, self.deliver), (6, self.seal), (0.5, self.hold_or_release),
            (4, self.heartbeat), (30, self.answer_some), (2, self.tick), (unrest + 0.1, self.abort),
            (unrest, self.crash), (unrest, self.break_some), (unrest, self.drain), (2, self.nonsense), (1, self.approve),
        ]  # fmt: skip
        self.dice.choices([a for _, a in actions], [w for w, _ in actions])[0]()

    def make_ready(self) -> None:
        """A version to whose first replica all ranks have pushed everything, without a fault on the way."""
        replica, self.spread = self.replicas[0], False
        rate, self.fault_rate = self.fault_rate, 0.0
        ranks = self.dice.choice([1, 2])
        entry = self.open_first(ranks)
        self.begin(replica, entry)
        push = replica.pushes[entry.number]
        for rank in range(ranks):
            self.post(replica, push, on.RankDeclared(rank, f"c{rank}", f"d{rank}"))
        self.answer_until(replica, push, Phase.FILLING)
        if self.dice.random() < 0.5:  # the store is away from here on: not even a claim may be there
            self.fault_rate = rate
        push.arrived.update(range(ranks))
        self.post(replica, push, on.FilesFilled(frozenset(FILES)))
        for rank in range(ranks):
            self.post(replica, push, on.RankWhole(rank))
            self.post(replica, push, self.sealing(push.number, rank))
        self.answer_until(replica, push, Phase.READY)
        self.fault_rate = rate

    def make_ready_at_all(self) -> None:
        """A version to each of whose replicas a rank has pushed everything, without a fault on the way."""
        rate, self.fault_rate = self.fault_rate, 0.0
        entry = self.open_first(len(self.replicas))
        parts = []
        for rank, replica in enumerate(self.replicas):
            self.begin(replica, entry)
            push = replica.pushes[entry.number]
            parts.append((replica, push))
            self.post(replica, push, on.RankDeclared(rank, f"c{rank}", f"d{rank}"))
        while any(push.state.phase is not Phase.FILLING for _, push in parts):
            self.advance(1.0)
            for replica, push in parts:
                self.post(replica, push, on.Tick())
                for effect in list(push.inflight):
                    self.answer(replica, push, effect)
        for rank, (replica, push) in enumerate(parts):
            push.arrived.update(range(len(parts)))
            self.post(replica, push, on.FilesFilled(frozenset(FILES)))
            self.post(replica, push, on.RankWhole(rank))
            self.post(replica, push, self.sealing(push.number, rank))
        for replica, push in parts:
            for number, (_, other) in enumerate(parts):
                here = other.state.holding.here
                self.post(replica, push, on.ReplicaSaid(number, handed_in=False, nonfinite=here))
            self.answer_until(replica, push, Phase.READY)
        self.fault_rate = rate

    def open_first(self, ranks: int) -> OpenEntry:
        """The first version, open in head.json."""
        self.head, entry = open_version(
            self.head,
            request_id="r0",
            step=0,
            run="r",
            ranks=ranks,
            now_ms=self.now.unix_ms,
            lease_ms=round(self.limits.lease * 1000),
            said=self.said,
        )
        self.numbers[entry.number] = "r0"
        self.dirty[entry.number] = self.dice.choice([0, 0, 7])
        return entry

    def answer_until(self, replica: Replica, push: Push, phase: Phase) -> None:
        """Answer effects that lead to a phase, and no others."""
        needed = (do.MakePlan, do.AcquireImage, do.Confirm, do.HearReplicas, do.TellReplicas)
        while push.state.phase is not phase:
            effects = [each for each in push.inflight if isinstance(each, needed)]
            assert effects, push.state
            effect, rate = self.dice.choice(effects), self.fault_rate
            if not isinstance(effect, do.Confirm):  # any other could end the push
                self.fault_rate = 0.0
            self.answer(replica, push, effect)
            self.fault_rate = rate

    def act_when_ready(self) -> None:
        """Something that can happen once no rank has anything to push any more."""
        unrest = self.unrest
        actions: list[tuple[float, Callable[[], None]]] = [
            (10, self.answer_some), (2, self.tick), (2, self.drain), (2, self.nonsense), (4, self.heartbeat),
            (unrest, self.abort), (unrest, self.crash), (unrest, self.break_some), (1, self.approve),
        ]  # fmt: skip
        self.dice.choices([a for _, a in actions], [w for w, _ in actions])[0]()

    # --- that it ends

    def settle(self, *, store_away: bool) -> None:
        """Let every push end: ranks are silent from here on, replicas exchange heartbeats, and effects are answered.

        While the store is away, a visible version stays visible until another push needs its memory or a caller aborts
        it.
        """
        self.fault_rate = 0.0
        for _ in range(3000):
            waiting = [(r, p, e) for r in self.replicas for p in r.parts for e in p.inflight]
            for replica, push, effect in waiting:
                self.answer(replica, push, effect, store_away=store_away)
            unfinished = [
                p.state
                for r in self.replicas
                for p in r.parts
                if p.state.unfinished and not (store_away and p.state.may_be_dropped)
            ]
            if not unfinished:
                break
            if waiting:
                continue
            wakes = [state.wake_at for state in unfinished if state.wake_at is not None]
            self.advance(max(min(wakes) - self.now.seconds, 10.0))
            for replica in self.replicas:
                for push in replica.parts:
                    self.post(replica, push, on.Tick())
                    agreed = push.state.agreed
                    for number in range(0 if agreed is None else len(agreed.homes)):
                        self.hear(replica, push, number)
        for replica in self.replicas:
            for push in replica.parts:
                if store_away and push.state.may_be_dropped:
                    self.check_dropped(push.state)
                    continue
                assert not push.state.unfinished, (push.state.phase, list(waits_for(push.state)))
                if push.state.gave_up:
                    self.post(replica, push, on.Superseded())
                    assert push.state.phase is Phase.FAILED

    def check_dropped(self, state: PushState) -> None:
        """Check that a version that cannot be made durable ends on an abort, or when its memory is wanted."""
        superseded, _ = step(state, on.Superseded(), self.now)
        for before, event in ((state, on.Aborted("not wanted")), (superseded, on.MemoryWanted())):
            after, _ = step(before, event, self.now)
            if after.settling is not None:
                if do.FindOut() not in after.running:
                    after, _ = step(after, on.Tick(), Moment(self.now.seconds + 1e6, self.now.unix_ms))
                after, _ = step(after, on.HeadSaid(do.FindOut(), on.Verdict.UNKNOWN), self.now)
            handing_over = after.may_be_handed_over and after.settling is None
            assert after.gave_up or after.phase is Phase.FAILED or handing_over, after.phase


def reachable(phase: Phase) -> set[Phase]:
    """The phases that transitions lead to, one after another."""
    found: set[Phase] = set()
    new = set(TRANSITIONS[phase])
    while new - found:
        found |= new
        new = {after for each in found for after in TRANSITIONS[each]}
    return found


def settled_in_all_ways(world: World) -> None:
    """Everything ends, with the store there, and with one that is away and comes back."""
    world.clone().settle(store_away=False)
    waiting = world.clone()
    waiting.settle(store_away=True)
    waiting.settle(store_away=False)


def answer_raises_at_end(state: PushState) -> bool:
    return state.phase in FINAL


ENTRY = VersionEntry(1, 0, "r", 0, 30, 3, "", "claim")
