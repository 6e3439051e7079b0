"""Do the parts of a striped stream bring each byte once, in messages that cross the end of no stripe?"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighbridge._core.striping import MOST_CALLS, STRIPE_BYTES, Striping, default_connections

place = st.integers(0, 20 * STRIPE_BYTES)


@given(st.integers(1, MOST_CALLS), place, place)
def test_every_byte_is_brought_once_and_by_the_call_of_its_stripe(count: int, begin: int, length: int) -> None:
    end = begin + length
    messages = []
    for index in range(count):
        mine = list(Striping(count, index).messages(begin, end))
        assert mine == sorted(mine)
        for start, stop in mine:
            assert 0 < stop - start <= STRIPE_BYTES
            if count > 1:
                assert start // STRIPE_BYTES == (stop - 1) // STRIPE_BYTES
                assert start // STRIPE_BYTES % count == index
        messages += mine
    messages.sort()
    assert [start for start, _ in messages[1:]] == [stop for _, stop in messages[:-1]]
    assert (messages[0][0], messages[-1][1]) == (begin, end) if messages else not length


@given(st.integers(1, MOST_CALLS), st.integers(0, MOST_CALLS - 1), place)
def test_a_part_that_is_resumed_goes_on_where_it_stopped(count: int, index: int, position: int) -> None:
    striping = Striping(count, index % count)
    end = position + 3 * count * STRIPE_BYTES
    [first, *rest] = striping.messages(position, end)
    assert striping.after(position) == first[0]
    assert list(striping.messages(first[1], end)) == rest


@pytest.mark.parametrize(("cpus", "connections"), [(1, 1), (2, 1), (3, 1), (4, 2), (16, 2)])
def test_a_second_connection_is_for_machines_with_processors_to_spare(cpus: int, connections: int) -> None:
    assert default_connections(cpus) == connections
