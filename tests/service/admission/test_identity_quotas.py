"""Has an identity what the policy gives it, not more and not less, and is everybody else left alone?"""

from __future__ import annotations

import random
import threading
from contextlib import ExitStack

import pytest

from weighbridge._core.striping import WHOLE, Striping
from weighbridge.errors import ResourceExhausted, Unavailable
from weighbridge_service.access.identities import EVERYBODY, Identity, IdentityLimits
from weighbridge_service.admission.identity_quotas import IdentityQuotas, Places, seconds_until_next
from weighbridge_service.admission.rates import Bucket

MB = 1_000_000


class Clock:
    """Seconds, moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def somebody(name: str = "a", **limits: int) -> Identity:
    return Identity(name, limits=IdentityLimits(**limits))


def test_a_bucket_holds_what_has_come_since_and_no_more_than_it_can() -> None:
    bucket = Bucket(5.0, 100.0)
    assert bucket.filled(101.5, rate=2.0, most=10.0) == Bucket(8.0, 101.5)
    assert bucket.filled(200.0, rate=2.0, most=10.0) == Bucket(10.0, 200.0)
    assert bucket.without(7.0) == Bucket(-2.0, 100.0)
    assert bucket.without(7.0).filled(101.0, rate=2.0, most=10.0) == Bucket(0.0, 101.0)


def test_a_bucket_says_when_it_will_hold_so_much() -> None:
    assert Bucket(5.0, 0.0).seconds_until(5.0, rate=2.0) == 0.0
    assert Bucket(5.0, 0.0).seconds_until(6.0, rate=2.0) == 0.5
    owing = Bucket(-3.0, 0.0)
    assert owing.filled(owing.seconds_until(1.0, rate=2.0), rate=2.0, most=9.0).level == 1.0


@pytest.mark.parametrize("seed", range(5))
def test_streams_of_an_identity_bring_its_bytes_a_second_whatever_the_size_of_their_messages(
    seed: int,
) -> None:
    clock, chance = Clock(), random.Random(seed)
    quotas, rate, seconds = IdentityQuotas(clock), 10 * MB, 30
    with ExitStack() as stack:
        streams = [stack.enter_context(quotas.streaming(somebody(streams=4, bytes_per_second=rate))) for _ in range(4)]
        due = dict.fromkeys(range(4), clock.now)
        size = {each: chance.randint(1, 1 << 20) for each in due}
        brought, largest = 0, 1 << 20
        while min(due.values()) < 1000.0 + seconds:
            each = min(due, key=lambda stream: due[stream])
            clock.now = max(due[each], clock.now)
            wait = streams[each].delay(size[each])
            if not wait:
                brought += size[each]
                size[each] = chance.randint(1, 1 << 20)
            due[each] = clock.now + wait
    # a second's worth may come at once at first, a message on top of what there is, and 5 ms are let pass
    assert rate * seconds <= brought + largest
    assert brought <= rate * (seconds + 1) + rate * 0.005 + largest


def test_what_has_come_before_its_length_was_known_is_waited_for_by_what_comes_next() -> None:
    clock = Clock()
    quotas = IdentityQuotas(clock)
    with quotas.streaming(somebody(streams=1, bytes_per_second=MB)) as stream:
        assert stream.delay() == 0.0
        stream.count(3 * MB)
        assert stream.delay() == pytest.approx(2.0, abs=0.01)
        clock.now += 2.0
        assert stream.delay() == 0.0


def test_a_slow_identity_delays_no_other_and_who_has_no_limit_never_waits() -> None:
    clock = Clock()
    quotas = IdentityQuotas(clock)
    with (
        quotas.streaming(somebody("a", streams=1, bytes_per_second=MB)) as slow,
        quotas.streaming(somebody("b", streams=1, bytes_per_second=MB)) as other,
        quotas.streaming(EVERYBODY) as free,
    ):
        slow.count(100 * MB)
        assert slow.delay(1) > 90
        assert other.delay(MB) == 0.0
        assert [free.delay(MB) for _ in range(100)] == [0.0] * 100


def test_a_stream_that_has_ended_is_not_waited_for() -> None:
    quotas = IdentityQuotas(Clock())
    failed = threading.Event()
    with quotas.streaming(somebody(streams=1, bytes_per_second=MB)) as stream:
        stream.count(3600 * MB)

        def wait() -> None:
            with pytest.raises(Unavailable):
                stream.wait(1)
            failed.set()

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        stream.end()
        assert failed.wait(30)


def test_there_are_as_many_streams_as_the_identity_may_have_and_a_place_is_free_when_one_ends() -> None:
    quotas, a, b = IdentityQuotas(Clock()), somebody("a", streams=2), somebody("b", streams=1)
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(quotas.streaming(a))
        second.enter_context(quotas.streaming(a))
        with pytest.raises(ResourceExhausted, match="a has 2 streams") as refused, quotas.streaming(a):
            pass
        assert refused.value.retry_after
        with quotas.streaming(b):
            pass
        second.close()
        with quotas.streaming(a):
            assert quotas.use_of(a).streams == 2
    assert quotas.use_of(a).streams == 0


def test_who_is_refused_streams_without_end_is_put_off_and_nobody_else_is() -> None:
    clock = Clock()
    quotas, a, b = IdentityQuotas(clock), somebody("a", streams=1), somebody("b", streams=1)

    def refused(times: int) -> None:
        for _ in range(times):
            with pytest.raises(ResourceExhausted), quotas.streaming(a):
                pass

    with quotas.streaming(a):
        refused(100)
        assert quotas.put_off(a) == 0.0
        refused(1000)
        assert quotas.put_off(a) == 1.0
    with pytest.raises(ResourceExhausted, match="a has 1 stream") as told:
        quotas.check_put_off(a)
    assert told.value.retry_after
    for other in (b, EVERYBODY, somebody("c")):
        assert quotas.put_off(other) == 0.0
        quotas.check_put_off(other)
    clock.now += 1.1
    quotas.check_put_off(a)
    assert quotas.put_off(a) == 0.0


def test_the_first_part_of_a_stream_keeps_places_for_the_others() -> None:
    there, asked = Places(), [Striping(3, index) for index in range(3)]
    begun = there.begun(asked[0], limit=4, now=0.0, whole=True)
    assert begun is not None
    there, given = begun
    assert given == asked[0]
    another = there.begun(asked[0], limit=4, now=0.0, whole=True)
    assert another is not None
    assert another[1] == WHOLE, "there are too few places: one brings all of it"
    there = another[0]
    assert there.begun(WHOLE, limit=4, now=0.0, whole=True) is None, "two are kept"
    for part in asked[1:]:
        begun = there.begun(part, limit=4, now=1.0, whole=True)
        assert begun is not None
        there = begun[0]
    assert there == Places(held=4)
    assert there.begun(asked[1], limit=4, now=1.0, whole=True) is None


def test_places_that_are_kept_for_parts_that_do_not_come_are_free_again() -> None:
    begun = Places().begun(Striping(2, 0), limit=2, now=0.0, whole=True)
    assert begun is not None
    assert begun[0].begun(WHOLE, limit=2, now=4.9, whole=True) is None
    assert begun[0].begun(WHOLE, limit=2, now=5.1, whole=True) == (Places(held=2), WHOLE)


def test_a_part_that_goes_on_where_it_broke_does_not_become_another_one() -> None:
    part = Striping(4, 0)
    assert Places(held=3).begun(part, limit=4, now=0.0, whole=False) == (Places(held=4), part)


def test_within_any_hour_there_are_no_more_versions_than_the_limit_and_the_error_says_when_the_next_may_be() -> None:
    clock = Clock()
    quotas, trainer = IdentityQuotas(clock), somebody(versions_per_hour=5)
    chance, opened = random.Random(1), []
    for _ in range(2000):
        clock.now += chance.randint(0, 600)
        if len(opened) >= 5 and clock.now < opened[-5] + 3600:
            with pytest.raises(ResourceExhausted) as refused, quotas.opening(trainer):
                pass
            assert refused.value.retry_after == opened[-5] + 3600 - clock.now
            clock.now += refused.value.retry_after
        with quotas.opening(trainer):
            opened.append(clock.now)
    assert all(later - first >= 3600 for first, later in zip(opened, opened[5:], strict=False))
    assert len(opened) == 2000


@pytest.mark.parametrize(
    ("times", "limit", "now", "expected"),
    [
        ([], 1, 0.0, 0.0),
        ([10.0], 1, 20.0, 3590.0),
        ([10.0, 30.0], 2, 40.0, 3570.0),
        ([10.0, 30.0], 3, 40.0, 0.0),
        ([10.0, 30.0, 50.0], 2, 60.0, 3570.0),
        ([10.0], 1, 3610.0, 0.0),
    ],
)
def test_the_next_may_be_an_hour_after_the_one_that_is_as_many_back(
    times: list[float], limit: int, now: float, expected: float
) -> None:
    assert seconds_until_next(times, limit, now) == expected


def test_a_version_that_was_not_opened_or_was_open_is_not_counted() -> None:
    quotas, trainer = IdentityQuotas(Clock()), somebody(versions_per_hour=1)
    with pytest.raises(ZeroDivisionError), quotas.opening(trainer):
        raise ZeroDivisionError
    with quotas.opening(trainer) as opening:
        opening.new = False
    with quotas.opening(trainer):
        pass
    with pytest.raises(ResourceExhausted), quotas.opening(trainer):
        pass
    assert quotas.use_of(trainer).versions_per_hour == 1


def test_of_two_that_open_versions_at_one_time_one_alone_gets_the_last() -> None:
    quotas, trainer = IdentityQuotas(Clock()), somebody(versions_per_hour=1)
    with quotas.opening(trainer), pytest.raises(ResourceExhausted), quotas.opening(trainer):
        pass


def test_use_says_how_much_of_a_second_is_taken() -> None:
    clock = Clock()
    quotas, engine = IdentityQuotas(clock), somebody(streams=3, bytes_per_second=MB)
    with quotas.streaming(engine) as stream:
        stream.count(MB // 2)
        assert quotas.use_of(engine).bytes_per_second == MB // 2
        stream.count(5 * MB)
        assert quotas.use_of(engine).bytes_per_second == MB
        clock.now += 10
        assert quotas.use_of(engine).bytes_per_second == 0
