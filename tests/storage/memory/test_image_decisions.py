"""Images are admitted within what there is, in the order in which they were asked for, and all that can fit are."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.images import acquire
from tests.support.rounds import rounds
from tests.support.waiting import eventually
from weighbridge.errors import ResourceExhausted
from weighbridge_storage.memory.image_books import HeldFor, ImageOwner
from weighbridge_storage.memory.image_decisions import (
    NO_SPACE,
    Decision,
    GiveBack,
    Headroom,
    Later,
    Make,
    Refuse,
    Reuse,
    Space,
    decide,
    without_free,
)
from weighbridge_storage.memory.image_pool import ImagePool, ImageRequest
from weighbridge_storage.memory.images import Image
from weighbridge_storage.memory.memory_limits import UNLIMITED
from weighbridge_storage.memory.regions import PAGE, Region

MIB = 1 << 20
sizes = st.integers(1, 40)
spaces = st.builds(
    lambda budget, in_use, free, available, more: Space(
        budget, in_use, tuple(free), available, in_use + sum(free) + available + more
    ),
    st.integers(0, 60),
    st.integers(0, 60),
    st.lists(sizes, max_size=4),
    st.integers(0, 60),
    st.integers(0, 20),
)


@given(sizes, spaces, spaces)
def test_what_is_made_is_within_the_budget_and_what_the_machine_has(nbytes: int, memory: Space, disk: Space) -> None:
    decision: Decision = decide(nbytes, memory, disk)
    if isinstance(decision, GiveBack):
        space = without_free(memory if decision.in_memory else disk, decision.count)
        memory, disk = (space, disk) if decision.in_memory else (memory, space)
        again = decide(nbytes, memory, disk)
        assert again == Make(decision.in_memory)
        decision = again
    if isinstance(decision, Make):
        space = memory if decision.in_memory else disk
        assert space.in_use + sum(space.free) + nbytes <= space.budget
        assert nbytes <= space.available
    if isinstance(decision, Reuse):
        assert nbytes <= (memory if decision.in_memory else disk).free[decision.index]


@given(sizes, spaces, spaces)
def test_disk_is_for_what_memory_has_no_room_for(nbytes: int, memory: Space, disk: Space) -> None:
    decision = decide(nbytes, memory, disk)
    alone = decide(nbytes, memory, NO_SPACE)
    if isinstance(alone, Reuse | Make | GiveBack):
        assert decision == alone
    elif isinstance(decision, Reuse | Make | GiveBack):
        assert not decision.in_memory


@given(sizes, spaces, spaces)
def test_only_what_could_never_fit_is_refused(nbytes: int, memory: Space, disk: Space) -> None:
    decision = decide(nbytes, memory, disk)
    empty = [Space(each.budget, 0, (), each.most, each.most) for each in (memory, disk)]
    if isinstance(decision, Refuse):
        assert decide(nbytes, *empty) == Refuse()
    if isinstance(decision, Later):
        assert isinstance(decide(nbytes, *empty), Make)


BUDGET, MACHINE = 100, 120
"""In pages."""


class AdmissionInAnyOrder(RuleBasedStateMachine):
    """A pool in which versions ask for images, get tired of waiting and give images back, and others take memory, in
    any order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = ImagePool(BUDGET * PAGE, memory_room=self._room)
        self.others = 0
        self.line: list[tuple[int, ImageRequest]] = []
        self.held: dict[int, Image] = {}
        self.asked = 0
        self.admitted: list[int] = []

    def _room(self) -> Headroom:
        usage = self.pool.usage()
        used = (usage.memory_in_use + usage.memory_free) // PAGE
        return Headroom((MACHINE - self.others - used) * PAGE, MACHINE * PAGE)

    @rule(pages=st.integers(1, 110))
    def ask(self, pages: int) -> None:
        self.asked += 1
        request = self.pool.queue({"a": pages * PAGE}, ImageOwner("acme/m", self.asked))
        self.line.append((self.asked, request))
        self._try(self.asked, request, too_large=pages > BUDGET)

    def _try(self, number: int, request: ImageRequest, *, too_large: bool = False) -> bool:
        """Try to take an image; returns whether the request was admitted."""
        image, refused = None, False
        try:
            image = request.take()
        except ResourceExhausted as error:
            refused = "can never be received" in error.message
        assert refused is too_large
        if refused:
            self.line.remove((number, request))
            self.pool.leave(request)
        if image is None:
            return False
        self.line.remove((number, request))
        self.held[number] = image
        self.admitted.append(number)
        return True

    @precondition(lambda self: self.line)
    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        """Waiting requests try again, in any order."""
        for entry in data.draw(st.permutations(self.line)):
            self._try(*entry)

    @precondition(lambda self: self.line)
    @rule(data=st.data())
    def get_tired(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.line))
        self.line.remove(entry)
        self.pool.leave(entry[1])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.held.pop(data.draw(st.sampled_from(sorted(self.held)))).release()

    @rule(pages=st.integers(0, 60))
    def others_take(self, pages: int) -> None:
        usage = self.pool.usage()
        self.others = min(pages, MACHINE - (usage.memory_in_use + usage.memory_free) // PAGE)

    @invariant()
    def nothing_is_overdrawn(self) -> None:
        usage = self.pool.usage()
        held = sum(image.region.capacity for image in self.held.values())
        assert usage.memory_in_use == held
        assert usage.memory_in_use + usage.memory_free <= BUDGET * PAGE
        assert usage.memory_in_use + usage.memory_free + self.others * PAGE <= MACHINE * PAGE

    @invariant()
    def first_come_first_served(self) -> None:
        assert self.admitted == sorted(self.admitted)

    def teardown(self) -> None:
        """Requests that still wait are admitted when the others are done."""
        self.others = 0
        while self.line:
            for number in list(self.held):
                self.held.pop(number).release()
            before = len(self.line)
            for entry in list(self.line):
                self._try(*entry)
            assert len(self.line) < before
        for image in self.held.values():
            image.release()
        self.pool.trim()


TestAdmissionInAnyOrder = AdmissionInAnyOrder.TestCase
TestAdmissionInAnyOrder.settings = settings(max_examples=rounds("ADMISSIONS"), stateful_step_count=30, deadline=None)


def _taking(pool: ImagePool, nbytes: int, name: str, done: list[str]) -> threading.Thread:
    """Thread that waits for an image, records that it has come, and releases it."""

    def take() -> None:
        with pool.queue({"a": nbytes}, ImageOwner(name, 1)) as request:
            image = request.take(30)
        done.append(name)
        image.release()

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    eventually(lambda: any(waiting.owner.model == name for waiting in pool.waiting()))
    return thread


def test_a_small_image_does_not_overtake_a_large_one_that_waits() -> None:
    pool = ImagePool(4 * MIB)
    held = [acquire(pool, {"a": 2 * MIB}, ImageOwner("acme/held", n)) for n in (1, 2)]
    done: list[str] = []
    threads = [_taking(pool, 4 * MIB, "acme/large", done), _taking(pool, MIB, "acme/small", done)]
    held[0].release()
    with pytest.raises(ResourceExhausted, match=r"acme/large@1, which needs 4\.2 MB, comes first"):
        acquire(pool, {"a": MIB})
    assert done == []
    assert [waiting.owner.model for waiting in pool.waiting()] == ["acme/large", "acme/small"]
    held[1].release()
    for thread in threads:
        thread.join(30)
    assert done == ["acme/large", "acme/small"]
    assert pool.waiting() == []


def test_who_gives_up_waiting_lets_the_next_one_in() -> None:
    pool = ImagePool(4 * MIB)
    held = acquire(pool, {"a": 2 * MIB}, ImageOwner("acme/held", 7))
    done: list[str] = []
    with pool.queue({"a": 4 * MIB}, ImageOwner("acme/large", 1)) as request:
        thread = _taking(pool, MIB, "acme/small", done)
        with pytest.raises(
            ResourceExhausted, match=r"acme/large@1 found no room within 0 s: 4\.2 MB do not fit"
        ) as caught:
            request.take(0.1)
        assert caught.value.details[0].startswith("acme/held@7: 2.1 MB of memory, being received, for 0 s")
        assert "--memory-budget 6MiB" in caught.value.fix
    thread.join(30)
    assert done == ["acme/small"]
    held.release()


def test_what_can_never_fit_is_refused_at_once_also_behind_others() -> None:
    pool = ImagePool(4 * MIB)
    held = acquire(pool, {"a": 4 * MIB}, ImageOwner("acme/held", 1))
    done: list[str] = []
    thread = _taking(pool, MIB, "acme/next", done)
    with (
        pool.queue({"a": 5 * MIB}, ImageOwner("acme/huge", 1)) as request,
        pytest.raises(ResourceExhausted, match=r"acme/huge@1 can never be received here: 5\.2 MB do not fit"),
    ):
        request.take(30)
    held.release()
    thread.join(30)


def test_a_request_that_asks_again_keeps_its_place_and_knows_whether_to() -> None:
    pool = ImagePool(4 * MIB)
    held = acquire(pool, {"a": 4 * MIB})
    with (
        pool.queue({"a": 3 * MIB}) as first,
        pool.queue({"a": MIB}) as second,
        pool.queue({"a": 5 * MIB}) as huge,
    ):
        for request in (first, second, first):
            with pytest.raises(ResourceExhausted) as caught:
                request.take()
            assert caught.value.retry_after is not None
        with pytest.raises(ResourceExhausted) as caught:
            huge.take()
        assert caught.value.retry_after is None
        held.release()
        with pytest.raises(ResourceExhausted, match="comes first"):
            second.take()
        images = [first.take(), second.take()]
    assert [image.sizes["a"] for image in images] == [3 * MIB, MIB]


def test_memory_that_the_machine_lacks_is_not_taken_whatever_the_budget_says() -> None:
    left = [3 * MIB]
    pool = ImagePool(UNLIMITED, memory_room=lambda: Headroom(left[0], 64 * MIB))
    with pytest.raises(ResourceExhausted, match=r"the machine has 3\.1 MB more"):
        acquire(pool, {"a": 4 * MIB})
    left[0] = 4 * MIB
    assert acquire(pool, {"a": 4 * MIB}).region.in_memory


def test_memory_that_is_reserved_and_not_yet_taken_is_not_promised_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(capacity: int, folder: str | None, on_allocated: object) -> Region:
        begun.set()
        assert go_on.wait(20)
        return Region(capacity, folder)

    monkeypatch.setattr("weighbridge_storage.memory.image_pool.Region", slow)
    pool = ImagePool(
        UNLIMITED, memory_room=lambda: Headroom(6 * MIB, 64 * MIB)
    )  # as if the kernel had counted nothing yet
    made: list[bool] = []
    thread = threading.Thread(target=lambda: made.append(acquire(pool, {"a": 4 * MIB}).region.in_memory))
    thread.start()
    assert begun.wait(20)
    assert [holding.use for holding in pool.holdings()] == [HeldFor.MAKING]
    with pytest.raises(ResourceExhausted, match=r"the machine has 2\.1 MB more"):
        acquire(pool, {"a": 4 * MIB})
    go_on.set()
    thread.join(20)
    assert made == [True]


def test_free_memory_is_given_back_where_the_machine_has_no_other(tmp_path: object) -> None:
    regions: list[int] = []
    pool = ImagePool(
        UNLIMITED,
        recall=lambda region: regions.remove(region.capacity),  # is asked just before a region is closed
        memory_room=lambda: Headroom(10 * MIB - sum(regions), 64 * MIB),
    )
    first = acquire(pool, {"a": 8 * MIB})
    regions.append(first.region.capacity)
    first.release()
    second = acquire(pool, {"a": 9 * MIB})
    assert second.region.in_memory
    assert pool.usage().memory_free == 0


def test_holders_are_named_with_what_they_hold_it_for() -> None:
    pool = ImagePool(UNLIMITED)
    image = acquire(pool, {"a": 1}, ImageOwner("acme/m", 3))
    assert [(h.owner.number, h.use) for h in pool.holdings()] == [(3, HeldFor.RECEIVING)]
    image.freeze()
    assert [h.use for h in pool.holdings()] == [HeldFor.READY]
    with image.hold(), image.hold():
        image.release()
        [holding] = pool.holdings()
        assert (holding.use, holding.readers, holding.nbytes) == (HeldFor.READERS, 2, PAGE)
        assert str(holding).startswith("acme/m@3: 4.1 kB of memory, kept by 2 readers, for 0 s")
    assert pool.holdings() == []
