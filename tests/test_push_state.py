"""Does a push keep its promises in every order of events, with faults?

A model of the world around the state machine: replicas, ranks, a head.json that is changed by the real pure functions, and effects
that are answered late, in any order, with failures, or with failures of what was done all the same. Each seed is one run.

``WEIGHBRIDGE_SESSION_RUNS=10000`` makes as many runs; ``WEIGHBRIDGE_SESSION_SEED`` chooses the first one's seed.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tests.heads import history
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
from weighbridge.resources import Version, VersionState
from weighbridge_service.push import effects as do
from weighbridge_service.push import events as on
from weighbridge_service.push.declarations import (
    Agreement,
    Declaration,
    Declarations,
    Home,
    KnownSet,
    numbers_of,
)
from weighbridge_service.push.machine import LONGEST_PAUSE, step
from weighbridge_service.push.push_plan import PreparedPush
from weighbridge_service.push.replica_placement import Spread
from weighbridge_service.push.state import (
    FINAL,
    TRANSITIONS,
    VISIBLE,
    Limits,
    Moment,
    Phase,
    PushState,
    answer_abort,
    answer_declare,
    answer_seal,
    check_owned,
    version_of,
    waits_for,
)
from weighbridge_storage.entries import OpenEntry, VersionEntry
from weighbridge_storage.head import Head
from weighbridge_storage.head_changes import (
    claim_version,
    give_up_abandoned,
    give_up_version,
    open_version,
    publish,
    renew_version,
)

RUNS = int(os.environ.get("WEIGHBRIDGE_SESSION_RUNS", "300"))
FIRST_SEED = int(os.environ.get("WEIGHBRIDGE_SESSION_SEED", "1"))
BATCHES = 10
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
    """What a replica that takes a share over goes by: the same agreement, in which nothing is pushed any more."""
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
        self.replicas = [
            Replica(Home(f"host{i}:1", f"boot{i}.0")) for i in range(self.dice.choice([1, 2, 3]))
        ]
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

    def clone(self) -> World:
        """The same world, for seeing what becomes of it."""
        other = copy.copy(self)
        other.dice = random.Random()
        other.dice.setstate(self.dice.getstate())
        for name in ("numbers", "published"):
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
            assert all(isinstance(effect, do.Release) for effect in effects), effects
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
            assert state.share.alone or state.owners_complete
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

    # --- the world

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
            return on.HeadSaid(effect, on.Verdict.OPEN, self.head.open[number].claim)
        failed = self.head.failed.get(number)
        verdict = on.Verdict.ABORTED if failed is not None and failed.aborted else on.Verdict.GIVEN_UP
        return on.HeadSaid(effect, verdict, reason="it was given up")

    def carry_out(self, replica: Replica, push: Push, effect: do.Awaited) -> on.Event:
        """Do what an effect says; gives its answer. Raises what a real one would."""
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
                return on.MemoryStillHeld() if push.held else on.MemoryReleased()
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
                return on.Digested(file, 1)
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
                return on.ReplicasHandedIn(frozenset(r for claim, r in handed if claim == agreed.claim))
            case do.WriteManifestAndPublish():
                now_ms = self.now.unix_ms
                entry = VersionEntry(
                    number, 0, "r", 0, 30, 3, "", agreed.claim, ranks=state.opened.ranks, ready_ms=state.ready_ms or now_ms,
                    verified_ms=state.verified_ms or now_ms, durable_ms=now_ms, nonfinite_elements=len(FILES),
                )  # fmt: skip
                self.head = publish(history(self.head), entry)
                assert self.published.setdefault(number, agreed.claim) == agreed.claim, "published twice"
                there = history(self.head).find(number)
                assert there is not None
                return on.Published(there)
        raise AssertionError(effect)

    def take_over(self, to: Home, push: Push, agreed: Agreement) -> None:
        """Another replica owns a version from now on, if it is there and has not had it before."""
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
                Declarations.taken_over(
                    state.opened, to, sent, taken_agreement(agreed, number, to, len(ranks))
                ),
                number,
                self.limits,
                state.ready_ms,
                self.now,
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

    def answer(self, replica: Replica, push: Push, effect: do.Awaited, *, store_away: bool = False) -> None:
        """Answer an effect that is under way: as it should be, with a failure, or with one although it was done."""
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
                event = on.MemoryStillHeld()
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
        )
        if entry.number == next_number:
            assert entry.number not in self.numbers, "a number was given twice"
            self.numbers[entry.number] = request
        assert self.numbers[entry.number] == request
        if entry.number not in replica.pushes:
            self.begin(replica, entry)

    def begin(self, replica: Replica, entry: Any) -> None:
        opened = Version(
            "acme/m", entry.number, VersionState.OPEN, ranks=entry.ranks, create_time_ms=entry.created_ms
        )
        left = (entry.until_ms - self.now.unix_ms) / 1000
        state = PushState.begin(opened, replica.home, self.limits, replica.known, left, self.now)
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
        self.post(replica, replica.pushes[push.number], on.Declared(rank, client, digest))

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
                    self.post(replica, part, on.MemoryHeld())
            if agreed.home_of(rank) == replica.home:
                self.post(replica, part, on.RankWhole(rank))

    def seal(self) -> None:
        found = self.some_push()
        if found is None:
            return
        replica, push = found
        rank = self.dice.randrange(push.state.opened.ranks)
        if rank in push.arrived:
            self.post(replica, push, on.SealAsked(rank))

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
        """A replica hears how far another one is, that it is gone, or by mistake that it is."""
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
        """A replica hears how far one that has a share is, or that it is gone."""
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
                self.post(replica, push, on.ReplicaSaid(number, handed_in=state.handed_in_here))

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
        """Events that come again, of another push, or that answer what nobody has asked."""
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
            on.MemoryHeld,
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
            (unrest, self.crash), (unrest, self.break_some), (unrest, self.drain), (2, self.nonsense),
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
            self.post(replica, push, on.Declared(rank, f"c{rank}", f"d{rank}"))
        self.answer_until(replica, push, Phase.FILLING)
        if self.dice.random() < 0.5:  # the store is away from here on: not even a claim may be there
            self.fault_rate = rate
        push.arrived.update(range(ranks))
        self.post(replica, push, on.FilesFilled(frozenset(FILES)))
        for rank in range(ranks):
            self.post(replica, push, on.RankWhole(rank))
            self.post(replica, push, on.SealAsked(rank))
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
            self.post(replica, push, on.Declared(rank, f"c{rank}", f"d{rank}"))
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
            self.post(replica, push, on.SealAsked(rank))
        for replica, push in parts:
            for number in range(len(parts)):
                self.post(replica, push, on.ReplicaSaid(number, handed_in=False))
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
        )
        self.numbers[entry.number] = "r0"
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
            (unrest, self.abort), (unrest, self.crash), (unrest, self.break_some),
        ]  # fmt: skip
        self.dice.choices([a for _, a in actions], [w for w, _ in actions])[0]()

    # --- that it ends

    def settle(self, *, store_away: bool) -> None:
        """From here on no rank is heard of any more, but replicas hear each other, and effects are answered: every push ends.

        As long as the store is away, what is visible stays so, and is ended by whoever needs its memory or wants it given up.
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
        """A version that cannot be made durable ends if somebody says so."""
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


@pytest.mark.parametrize("batch", range(BATCHES))
def test_every_order_of_events_keeps_all_promises_and_comes_to_an_end(batch: int) -> None:
    seen: set[Phase] = set()
    for seed in range(FIRST_SEED + batch, FIRST_SEED + RUNS, BATCHES):
        world = World(seed)
        world.open()
        looks = {world.dice.randrange(STEPS) for _ in range(2)}
        try:
            for turn in range(STEPS):
                world.act()
                seen.update(p.state.phase for r in world.replicas for p in r.parts)
                if turn in looks:
                    settled_in_all_ways(world)
            world.settle(store_away=False)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    if RUNS >= 30 * BATCHES:
        assert seen >= set(Phase) - {Phase.HANDED_OVER}, "a run that does not come this far shows nothing"


@pytest.mark.parametrize("batch", range(BATCHES))
def test_a_version_that_is_ready_outlives_replicas_that_leave_in_every_order_of_events(batch: int) -> None:
    """Replicas leave when the version is ready, be it that ranks have pushed to one or to each; those that take it over may leave, too."""
    seen: set[Phase] = set()
    calm, shares = 0, 0
    for seed in range(FIRST_SEED + batch, FIRST_SEED + RUNS, BATCHES):
        world = World(seed)
        if len(world.replicas) == 1:
            continue
        if seed // BATCHES % 2:  # nothing goes wrong but that replicas leave
            world.fault_rate = world.unrest = 0.0
            world.pauses.remove(60.0)  # long enough for a lease to end while its renewal is not answered
        try:
            if seed // BATCHES % 4 < 2:
                world.make_ready()
            else:
                world.make_ready_at_all()
            for turn in range(60):
                world.act_when_ready()
                seen.update(p.state.phase for r in world.replicas for p in r.parts)
                if turn == 30:
                    settled_in_all_ways(world)
            without_faults = not world.fault_rate and not world.unrest and 60.0 not in world.pauses
            world.settle(store_away=False)
            if without_faults:
                assert world.published, "lost although nothing went wrong"
                calm += bool(world.taken_over)
                shares += any(r.taken for r in world.replicas)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    if RUNS >= 30 * BATCHES:
        assert Phase.HANDED_OVER in seen, "a run that does not come this far shows nothing"
        assert calm
        assert shares


def spread_push(homes: tuple[int, ...]) -> PushState:
    """A push of one rank at each replica, of which the first is this one, when everything is here and sealed."""
    replicas = [Home(f"host{i}:1", "boot") for i in range(max(homes) + 1)]
    opened = Version("acme/m", 1, VersionState.OPEN, ranks=len(homes))
    limits = replace(LIMITS, spreading=True)
    state = PushState.begin(opened, replicas[0], limits, None, 120.0, NOW)
    elsewhere = [(r, Declaration(f"c{r}", "d", replicas[h])) for r, h in enumerate(homes) if h]
    state, _ = step(state, on.Declared(0, "c0", "d"), NOW)
    state, _ = step(state, on.HeardElsewhere(elsewhere), NOW)
    for event in (
        on.Planned(planned(homes)), on.ImageGranted(), on.Claimed(), on.FilesFilled(frozenset(FILES)), on.RankWhole(0),
        on.SealAsked(0),
    ):  # fmt: skip
        state, _ = step(state, event, NOW)
    assert state.phase is Phase.SEALED
    return state


ENTRY = VersionEntry(1, 0, "r", 0, 30, 3, "", "claim")
NOW = Moment(1000.0, 1_000_000)
GONE = VersionFailed("host1:1 is gone")


def test_a_push_over_replicas_is_ready_when_every_owner_has_said_that_its_files_are_complete() -> None:
    state = spread_push((0, 1, 2))
    state, effects = step(state, on.ReplicaSaid(1, handed_in=False), NOW)
    assert do.Confirm() not in effects
    state, effects = step(state, on.ReplicaSaid(1, handed_in=False), NOW)
    assert do.Confirm() not in effects
    state, effects = step(state, on.ReplicaSaid(2, handed_in=True), NOW)
    assert do.Confirm() in effects
    state, effects = step(state, on.HeadSaid(do.Confirm(), on.Verdict.OPEN), NOW)
    assert state.phase is Phase.READY
    assert do.NotifyReplicas() not in effects, "they have heard that this part is complete"


def test_other_replicas_are_told_at_once_when_a_part_is_complete_and_when_it_ends() -> None:
    replicas = [Home("host0:1", "boot"), Home("host1:1", "boot")]
    opened = Version("acme/m", 1, VersionState.OPEN, ranks=2)
    state = PushState.begin(opened, replicas[0], replace(LIMITS, spreading=True), None, 120.0, NOW)
    told = []
    for event in (
        on.Declared(0, "c0", "d"),
        on.HeardElsewhere([(1, Declaration("c1", "d", replicas[1]))]),
        on.Planned(planned((0, 1))),
        on.ImageGranted(),
        on.FilesFilled(frozenset(FILES)),
        on.RankWhole(0),
        on.SealAsked(0),
        on.Broken(DataLoss("bytes were lost")),
    ):
        state, effects = step(state, event, NOW)
        if do.NotifyReplicas() in effects:
            told.append(type(event))
    # the first one makes the replicas known to each other
    assert told == [on.Planned, on.SealAsked, on.Broken]


@pytest.mark.parametrize("ready", [False, True])
def test_the_loss_of_an_owner_fails_a_version_unless_its_files_are_in_the_store(ready: bool) -> None:
    def before(handed_in: bool) -> PushState:
        state = spread_push((0, 1))
        if ready or handed_in:
            state, _ = step(state, on.ReplicaSaid(1, handed_in=handed_in), NOW)
        if ready:
            state, _ = step(state, on.HeadSaid(do.Confirm(), on.Verdict.OPEN), NOW)
            assert state.phase is Phase.READY
        return state

    state, effects = step(before(False), on.ReplicaLost(1, GONE), NOW)
    assert version_of(state).state is VersionState.FAILED
    assert "host1:1 is gone" in version_of(state).error
    assert any(isinstance(effect, do.GiveUp) for effect in effects)
    state, _ = step(before(True), on.ReplicaLost(1, GONE), NOW)
    assert state.phase is not Phase.FAILED


def test_the_loss_of_a_replica_that_owns_nothing_matters_as_long_as_it_has_bytes_to_pass_on() -> None:
    state = spread_push((0, 1, 2, 3))  # of four replicas, the last owns none of three files
    lost, _ = step(state, on.ReplicaLost(3, GONE), NOW)
    assert lost.phase is Phase.FAILED
    state, _ = step(state, on.ReplicaSaid(3, handed_in=False), NOW)
    kept, _ = step(state, on.ReplicaLost(3, GONE), NOW)
    assert kept.phase is Phase.SEALED


def test_a_replica_that_hears_that_a_version_is_published_looks_at_the_head_at_once() -> None:
    state = spread_push((0, 1))
    look = do.LookAtHead(closing=True)
    if look not in state.running:
        state, _ = step(state, on.Tick(), Moment(NOW.seconds + 10, NOW.unix_ms))
    state, _ = step(state, on.HeadSaid(look, on.Verdict.OPEN), NOW)
    assert look not in state.running
    state, effects = step(state, on.SaidPublished(), NOW)
    assert look in effects


def filled_alone(limits: Limits = LIMITS) -> tuple[PushState, tuple[do.Effect, ...]]:
    """A version of which one replica alone has got all bytes from one rank, which has not sealed; and what that has led to."""
    home = Home("host0:1", "boot0")
    opened = Version("acme/m", 1, VersionState.OPEN, ranks=1, create_time_ms=1)
    state = PushState.begin(opened, home, limits, None, 120.0, NOW)
    for event in (on.Declared(0, "c0", "d0"), on.Planned(planned((0,))), on.ImageGranted(), on.RankWhole(0)):
        state, _ = step(state, event, NOW)
    return step(state, on.FilesFilled(frozenset(FILES)), NOW)


def ready_alone(limits: Limits = LIMITS) -> PushState:
    """A version that one replica alone has received from one rank."""
    state, _ = filled_alone(limits)
    for event in (on.HeadSaid(do.Confirm(), on.Verdict.OPEN), on.SealAsked(0)):
        state, _ = step(state, event, NOW)
    assert state.phase is Phase.READY
    return state


def test_a_rank_that_seals_soon_after_the_last_byte_does_not_wait_for_the_store() -> None:
    state, effects = filled_alone()
    assert do.Confirm() in effects
    state, _ = step(state, on.HeadSaid(do.Confirm(), on.Verdict.OPEN), NOW)
    assert state.phase is Phase.FILLING
    state, effects = step(state, on.SealAsked(0), NOW)
    assert state.phase is Phase.READY
    assert do.Confirm() not in effects


def test_what_the_head_said_long_before_the_last_rank_seals_does_not_count() -> None:
    state, _ = filled_alone()
    state, _ = step(state, on.HeadSaid(do.Confirm(), on.Verdict.OPEN), NOW)
    later = Moment(NOW.seconds + 2, NOW.unix_ms + 2000)
    state, effects = step(state, on.SealAsked(0), later)
    assert state.phase is Phase.SEALED
    assert do.Confirm() in effects
    state, _ = step(state, on.HeadSaid(do.Confirm(), on.Verdict.OPEN), later)
    assert state.phase is Phase.READY


def test_what_is_left_when_all_bytes_are_here_waits_until_ranks_need_not_wait_any_more() -> None:
    state, _ = filled_alone()
    state, effects = step(state, on.Claimed(), NOW)
    assert not [effect for effect in effects if isinstance(effect, do.Upload | do.Digest)]
    ready = ready_alone()
    assert {do.Digest(file) for file in FILES} <= ready.running
    _, effects = step(ready, on.Claimed(), NOW)
    assert {do.Upload(file) for file in FILES} <= set(effects)


def test_a_file_is_uploaded_beside_its_digests_unless_these_are_needed_to_tell_whether_it_has_changed() -> (
    None
):
    state, effects = step(ready_alone(), on.Claimed(), NOW)
    assert {do.Upload(file) for file in FILES} <= set(effects)
    state, effects = step(state, on.PerhapsUnchanged("a"), NOW)
    assert do.Upload("a") not in effects
    state, effects = step(state, on.Uploaded("b"), NOW)
    assert do.UploadDigests("b") not in effects
    state, effects = step(state, on.Digested("a", 0), NOW)
    assert {do.Upload("a"), do.UploadDigests("a")} <= set(effects)


def test_what_went_wrong_for_a_while_is_not_said_any_more_when_it_is_over() -> None:
    away = Unavailable("the store is away")
    state, _ = step(ready_alone(), on.EffectFailed(do.Claim(), away), NOW)
    assert version_of(state).error == "not durable yet: the store is away"
    state, _ = step(state, on.EffectFailed(do.Digest("a"), away), NOW)
    later = Moment(NOW.seconds + 1000, NOW.unix_ms)
    state, _ = step(state, on.Tick(), later)
    state, _ = step(state, on.Claimed(), later)
    assert version_of(state).error, "the other one is not over"
    state, _ = step(state, on.Digested("a", 0), later)
    assert version_of(state).error == ""


def test_a_version_that_is_visible_is_tried_to_be_made_durable_for_days() -> None:
    state, now = ready_alone(), NOW
    assert do.Claim() in state.running
    tries = []
    while now.seconds < NOW.seconds + 3 * 86_400:
        state, effects = step(state, on.EffectFailed(do.Claim(), Unavailable("the store is away")), now)
        assert state.phase is Phase.READY
        assert version_of(state).error == "not durable yet: the store is away"
        assert state.wake_at is not None
        now = Moment(max(state.not_before[do.Claim()], now.seconds), now.unix_ms)
        state, effects = step(state, on.Tick(), now)
        assert do.Claim() in effects
        tries.append(now.seconds)
    assert tries[1] - tries[0] < 5 < tries[-1] - tries[-2] <= LONGEST_PAUSE


def test_memory_of_a_version_that_cannot_be_made_durable_goes_to_a_newer_one_when_that_waits_for_it() -> None:
    state, _ = step(ready_alone(), on.MemoryWanted(), NOW)
    assert state.phase is Phase.READY
    failing, _ = step(state, on.EffectFailed(do.Claim(), Unavailable("the store is away")), NOW)
    kept, _ = step(failing, on.MemoryWanted(), NOW)
    assert kept.phase is Phase.READY, "it is the newest that is visible"
    superseded, _ = step(failing, on.Superseded(), NOW)
    assert superseded.phase is Phase.READY, "nobody needs its memory"
    ended, effects = step(superseded, on.MemoryWanted(), NOW)
    assert ended.phase is Phase.FAILED
    assert do.ReleaseImage() in effects
    assert "its memory was needed for a newer version: the store is away" in version_of(ended).error


def test_a_version_that_waits_for_memory_says_so_to_older_ones() -> None:
    opened = Version("acme/m", 2, VersionState.OPEN, ranks=1)
    state = PushState.begin(opened, Home("host0:1", "boot0"), LIMITS, None, 120.0, NOW)
    state, _ = step(state, on.Declared(0, "c0", "d0"), NOW)
    state, _ = step(state, on.Planned(planned((0,))), NOW)
    full = ResourceExhausted("no room")
    full.retry_after = 1.0
    state, effects = step(state, on.EffectFailed(do.AcquireImage(), full), NOW)
    assert do.WantMemory() in effects
    assert state.phase is Phase.PLANNED


def test_a_visible_version_can_be_given_up_only_if_something_keeps_it_from_becoming_durable() -> None:
    state = ready_alone()
    after, _ = step(state, on.Aborted("not wanted"), NOW)
    assert not after.gave_up
    with pytest.raises(FailedPrecondition, match="visible already"):
        answer_abort(after)
    failing, _ = step(state, on.EffectFailed(do.Claim(), Unavailable("the store is away")), NOW)
    after, effects = step(failing, on.Aborted("not wanted"), NOW)
    assert after.gave_up
    assert after.phase is Phase.READY, "it stays visible until a newer one is"
    assert answer_abort(after) is True
    assert any(isinstance(effect, do.GiveUp) for effect in effects)


def test_a_push_that_cannot_find_out_how_it_ended_does_not_ask_for_ever() -> None:
    state = replace(ready_alone(), hurrying=True)
    for event in (
        on.Claimed(),
        on.SampleCompared(),
        *(on.Digested(file, 0) for file in FILES),
        *(on.Uploaded(file) for file in FILES),
        *(on.DigestsUploaded(file) for file in FILES),
        on.EffectFailed(do.WriteManifestAndPublish(), Unavailable("the store is away")),
    ):
        state, effects = step(state, event, NOW)
    assert do.FindOut() in effects
    state, effects = step(state, on.EffectFailed(do.FindOut(), Unavailable("it cannot be read")), NOW)
    assert state.gave_up
    assert version_of(state).error == "not durable yet: the store is away"
    assert do.FindOut() not in effects
