"""Is the base of an adapter's version kept under all pushes, collections and deletions that come between its writes?"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.heads import head_with, history, open_version, published
from tests.support.rounds import first_seed, rounds
from weighbridge._core.metadata import BaseVersion
from weighbridge._core.resources import Retention
from weighbridge.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from weighbridge_service.catalog.bases import Bases
from weighbridge_service.catalog.catalog import Catalog
from weighbridge_storage.documents.entries import OpenEntry, PinEntry
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.head.head import PINNED, Head
from weighbridge_storage.head.head_changes import delete_model, delete_versions, forget_versions
from weighbridge_storage.head.open_versions import give_up_version
from weighbridge_storage.head.pins import doubt, is_on, pin, pinned_by, unpin
from weighbridge_storage.head.retention import decide, retire
from weighbridge_storage.stores.local import LocalStore

SMOL, ALICE, BOB = ModelName("acme", "smol"), ModelName("acme", "alice"), ModelName("acme", "bob")
RUNS = rounds("PIN_RUNS")
BASES = range(1, 3)
"""Versions of the base that may be deleted; the next one is the latest."""


def _pin(version: int, adapter: ModelName = ALICE, by: str = "", doubt: str = "") -> PinEntry:
    return PinEntry(version, str(adapter), by, doubt)


def _pinned(head: Head, *pins: PinEntry, most: int = 10) -> Head:
    for each in pins:
        head = pin(history(head), each, most)
    return head


def test_a_pin_is_read_back_and_needs_a_release_that_knows_pins() -> None:
    head = replace(_pinned(head_with(1, 2), _pin(2, BOB, "b"), _pin(1)), generation=1)
    again = Head.from_json(head.to_json())
    assert again.pins == (_pin(1), _pin(2, BOB, "b"))
    assert PINNED in again.requires
    assert PINNED not in head_with(1, 2).requires


def test_pins_out_of_order_or_of_versions_that_there_never_were_are_refused() -> None:
    with pytest.raises(InvalidArgument):
        replace(head_with(1, 2), pins=(_pin(2), _pin(1)))
    with pytest.raises(InvalidArgument):
        replace(head_with(1, 2), pins=(_pin(3),))


def test_a_pin_goes_by_the_mark_of_who_has_doubted_it_last_and_stays_if_it_was_asked_for_since() -> None:
    head = _pinned(head_with(1, 2), _pin(1), _pin(2))
    here = [(1, str(ALICE))]
    assert unpin(head, here, "mine") == head
    doubted = doubt(head, here, "mine")
    assert doubted.pins == (_pin(1, doubt="mine"), _pin(2))
    assert unpin(doubted, here, "mine").pins == (_pin(2),)
    assert unpin(doubted, [(2, str(ALICE))], "mine") == doubted
    asked = _pinned(doubted, _pin(1))
    assert asked.pins == head.pins
    assert unpin(asked, here, "mine") == asked
    again = doubt(asked, here, "another's")
    assert unpin(again, here, "mine") == again


def test_a_push_to_a_base_that_is_pinned_already_writes_no_head_but_its_own(tmp_path: Path) -> None:
    world = World(tmp_path, random.Random(1))
    world.store.between = lambda: None
    list(world.push(ALICE, number=1, given_up=False))
    base, own = world.heads.read(SMOL), world.heads.read(ALICE)
    list(world.push(ALICE, number=1, given_up=False))
    assert world.heads.read(SMOL) == base
    assert world.heads.read(ALICE) != own
    world.bases.release(SMOL)
    assert world.heads.read(SMOL) == base, "a pin that is needed is not written anew"


def test_a_collection_looks_at_so_many_pins_and_leaves_the_others_for_the_next_ones(tmp_path: Path) -> None:
    world = World(tmp_path, random.Random(1))
    world.store.between = lambda: None
    for model in (ALICE, BOB):
        for number in BASES:
            list(world.push(model, number=number, given_up=True))
    assert [world.bases.release(SMOL, most=1) for _ in range(2)] == [1, 1]
    assert world.bases.release(SMOL, number=BASES[0]) + world.bases.release(SMOL, number=BASES[1]) == 2
    found = world.heads.read(SMOL)
    assert found is not None
    assert not found[0].pins


def test_a_version_that_is_not_there_is_not_pinned() -> None:
    with pytest.raises(NotFound, match="version 3"):
        _pinned(head_with(1, 2), _pin(3))
    gone = delete_versions(history(head_with(1, 2)), [1], 7)
    with pytest.raises(NotFound, match="version 1"):
        _pinned(gone, _pin(1))


def test_an_identity_has_as_many_pins_as_it_may_and_leaves_others_theirs() -> None:
    head = _pinned(head_with(1, 2), _pin(1, by="a"), _pin(2, by="a"), most=2)
    with pytest.raises(ResourceExhausted, match="a may have adapters on 2 versions"):
        _pinned(head, _pin(1, BOB, by="a"), most=2)
    assert len(_pinned(head, _pin(1, BOB, by="b"), _pin(2, by="a"), most=2).pins) == 3


def test_a_pinned_version_is_kept_and_its_deletion_names_the_adapters() -> None:
    head = replace(_pinned(head_with(1, 2, 3), _pin(1), _pin(1, BOB)), retention=Retention(keep_last=1))
    decision = decide(head, history(head).versions(), 1)
    assert decision.retired == (2,)
    assert [each.rules for each in decision.kept] == [("adapters",), ("keep_last",)]
    with pytest.raises(FailedPrecondition, match="version 1 is the base of acme/alice, acme/bob"):
        delete_versions(history(head), [1], 7)
    with pytest.raises(FailedPrecondition, match="acme/alice"):
        delete_model(head, 7)
    forced = delete_versions(history(head), [1], 7, forced=True)
    assert forced.recent[1].retired
    assert not forced.pins
    assert delete_model(head, 7, forced=True).deleted
    assert pinned_by(head, 1) == ("acme/alice", "acme/bob")


def test_refusals_count_adapters_that_the_caller_does_not_see() -> None:
    head = _pinned(head_with(1, 2), _pin(1), _pin(1, BOB))
    for refused in (
        lambda **options: delete_versions(history(head), [1], 7, **options),
        lambda **options: delete_model(head, 7, **options),
    ):
        with pytest.raises(FailedPrecondition) as some:
            refused(sees=lambda name: name == str(BOB))
        assert some.value.message.endswith("the base of acme/bob and 1 adapter that you may not see")
        with pytest.raises(FailedPrecondition) as none:
            refused(sees=lambda _: False)
        assert none.value.message.endswith("the base of 2 adapters that you may not see")


class Interrupted(LocalStore):
    """Lets others take a turn before each reading and after each writing of a head."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.between: Callable[[], None] = lambda: None

    def get(self, key: str) -> Any:
        if key.endswith("head.json"):
            self.between()
        return super().get(key)

    def put(self, key: str, *args: Any, **options: Any) -> Any:
        done = super().put(key, *args, **options)
        if key.endswith("head.json"):
            self.between()
        return done


class World:
    """A base and two adapters in one store, and those that push, collect and delete, each of which may be interrupted
    by the others.
    """

    def __init__(self, root: Path, chance: random.Random) -> None:
        self.store, self.chance, self.clock = Interrupted(root), chance, 1000
        self.catalog = Catalog(self.store)
        self.bases = Bases(self.catalog)
        self.heads = self.catalog.heads
        self.depth = 0
        self.forced: set[int] = set()
        self.pushes: list[Iterator[None]] = []
        for model in (ALICE, BOB):
            self.heads.update(
                model,
                lambda head: (replace(head, files_id="f", registration={"adapter": True}), None),
                create=True,
            )
        base = replace(head_with(*BASES, BASES[-1] + 1), files_id="f", retention=Retention(keep_last=1))
        self.heads.update(SMOL, lambda head: (replace(base, generation=head.generation), None), create=True)
        self.store.between = self._interrupt

    def _interrupt(self) -> None:
        if self.depth < 2 and self.chance.random() < 0.15:
            self.depth += 1
            for _ in range(self.chance.randrange(1, 5)):
                self.turn()
            self.depth -= 1

    def push(self, adapter: ModelName, number: int | None = None, given_up: bool | None = None) -> Iterator[None]:
        """A version of an adapter from its opening to its end, and perhaps to its deletion."""
        number = number or self.chance.choice((*BASES, BASES[-1] + 1))
        given_up = self.chance.random() < 0.3 if given_up is None else given_up

        def opened(head: Head) -> tuple[Head, OpenEntry]:
            return open_version(
                head,
                request_id=f"{adapter} {head.next_version}",
                step=1,
                run="r",
                ranks=1,
                lease_ms=10**9,
                now_ms=1,
                base=BaseVersion(str(SMOL), number, "0" * 64),
            )

        entry = self.heads.update(adapter, opened)
        yield
        try:
            self.bases.pin(adapter, entry)
        except NotFound:
            given_up = True
        yield
        if given_up:
            self.heads.update(adapter, lambda head: (give_up_version(head, entry.number, "", 1), None))
            return
        self.heads.update(adapter, lambda head: (published(head, entry.number), None))
        yield
        if self.chance.random() < 0.5:
            with_latest = self.heads.read(adapter)
            assert with_latest is not None
            if with_latest[0].latest == entry.number:
                return
            self.heads.edit(adapter, lambda there: (delete_versions(there, [entry.number], 5), None))
            yield
            self.heads.edit(adapter, lambda there: (forget_versions(there, [entry.number]), None))

    def turn(self) -> None:
        """One step of one of them, drawn at random."""
        match self.chance.randrange(8):
            case 0:
                self.bases.release(SMOL)
            case 1 if self.chance.random() < 0.1:
                self.heads.edit(SMOL, lambda there: (retire(there, 1)[0], None))
            case 2:
                self.bases.renew(self.chance.choice((ALICE, BOB)))
            case 3 if self.chance.random() < 0.05:
                number = self.chance.choice(BASES)
                self.forced.add(number)
                self.heads.edit(SMOL, lambda there: (delete_versions(there, [number], 5, forced=True), None))
            case 4:
                number = self.chance.choice(BASES)
                with suppress(FailedPrecondition):
                    self.heads.edit(SMOL, lambda there: (delete_versions(there, [number], 5), None))
            case _:
                if len(self.pushes) < 4 and self.chance.random() < 0.5:
                    self.pushes.append(self.push(self.chance.choice((ALICE, BOB))))
                elif self.pushes:
                    push = self.pushes.pop(self.chance.randrange(len(self.pushes)))
                    if next(push, push) is not push:
                        self.pushes.append(push)

    def check(self) -> None:
        """Every version of an adapter that is part of history has its base, unless that was deleted by force."""
        base = self.heads.history(SMOL)
        assert base is not None
        for model in (ALICE, BOB):
            adapter = self.heads.history(model)
            assert adapter is not None
            for number, entry in adapter.versions().items():
                on = BaseVersion.of(entry.metadata)
                assert on is not None
                assert base.durable(on.number) is not None or on.number in self.forced, f"{model}@{number}"

    def finish(self) -> None:
        """All pushes end undisturbed; after one more collection there is a pin for each base that is in use, and no
        other.
        """
        self.store.between = lambda: None
        for push in self.pushes:
            list(push)
        self.check()
        self.bases.release(SMOL)
        base = self.heads.history(SMOL)
        assert base is not None
        pinned = {(each.version, each.adapter) for each in base.head.pins}
        used = {
            (number, str(model))
            for model in (ALICE, BOB)
            for number in (*BASES, BASES[-1] + 1)
            if self._uses(model, number)
        }
        assert pinned == {(number, model) for number, model in used if base.durable(number) is not None}

    def _uses(self, model: ModelName, number: int) -> bool:
        adapter = self.heads.history(model)
        assert adapter is not None
        return is_on(adapter, str(SMOL), number)


@pytest.mark.parametrize("before", range(1, 8))
def test_a_push_in_the_middle_of_a_release_keeps_its_base(before: int, tmp_path: Path) -> None:
    """``before`` says before which reading, or after which writing, of a head in the release the push opens its version
    and pins: there are seven.
    """
    world = World(tmp_path, random.Random(1))
    world.store.between = lambda: None
    first = world.push(ALICE, number=1, given_up=True)
    list(first)
    second, seen = world.push(ALICE, number=1, given_up=False), 0

    def between() -> None:
        nonlocal seen
        seen += 1
        if seen == before:
            next(second), next(second)

    world.store.between = between
    world.bases.release(SMOL)
    world.store.between = lambda: None
    assert seen >= before
    next(second)
    with pytest.raises(FailedPrecondition, match="is the base of acme/alice"):
        world.heads.edit(SMOL, lambda there: (delete_versions(there, [1], 5), None))
    world.check()


def test_no_interleaving_takes_the_base_from_under_an_adapter_or_leaves_a_pin(tmp_path: Path) -> None:
    for run in range(RUNS):
        seed = first_seed() * 100_000 + run
        world = World(tmp_path / str(run), random.Random(seed))
        try:
            for _ in range(60):
                world.turn()
                if not world.depth:
                    world.check()
            world.finish()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
