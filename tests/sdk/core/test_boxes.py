"""Is the arithmetic on boxes right? Compared with numpy's view of the same regions."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.waiting import processor_seconds
from weighbridge._core.boxes import Box, first_overlap, gaps, row_major_boxes, strided_boxes, subtract
from weighbridge.errors import LayoutError

SHAPE = (4, 3, 5)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...] = SHAPE) -> Box:
    ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))


def mask(box: Box) -> np.ndarray:
    found = np.zeros(SHAPE, bool)
    found[tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))] = True
    return found


@given(boxes(), boxes())
def test_the_intersection_is_what_both_boxes_cover(a: Box, b: Box) -> None:
    common = a.intersect(b)
    assert np.array_equal(mask(a) & mask(b), mask(common) if common else np.zeros(SHAPE, bool))


@given(boxes(), st.lists(boxes(), max_size=4))
def test_what_is_left_after_subtraction_is_disjoint_and_exact(box: Box, others: list[Box]) -> None:
    left = subtract(box, others)
    expected = mask(box)
    for other in others:
        expected &= ~mask(other)
    assert np.array_equal(sum((mask(b).astype(int) for b in left), np.zeros(SHAPE, int)), expected.astype(int))


@given(st.lists(boxes(), max_size=6))
def test_an_overlap_is_found_if_and_only_if_there_is_one(several: list[Box]) -> None:
    found = first_overlap(several)
    count = sum((mask(b).astype(int) for b in several), np.zeros(SHAPE, int))
    assert (found is not None) == bool((count > 1).any())
    if found is not None:
        i, j, common = found
        assert i != j
        assert np.array_equal(mask(several[i]) & mask(several[j]), mask(common))


def windmill(rings: int, at: int = 0) -> list[Box]:
    """A square and rings of four boxes around it, each of which no straight cut can part: one, and four more a ring."""
    middle = at + rings
    made = [Box((middle, middle), (1, 1))]
    for ring in range(rings):
        low, high, length = middle - ring - 1, middle + ring + 1, 2 * ring + 2
        made += [
            Box((low, low), (1, length)),
            Box((low, high), (length, 1)),
            Box((high, low + 1), (1, length)),
            Box((low + 1, low), (length, 1)),
        ]
    return made


def test_boxes_that_no_cut_can_part_are_compared_with_each_other() -> None:
    boxes = windmill(60)
    assert sum(box.volume for box in boxes) == 121**2  # it fills a square
    assert first_overlap(boxes) is None
    several = [box for number in range(5) for box in windmill(40, at=1000 * number)]
    assert first_overlap(several) is None
    last = several[-1]
    found = first_overlap([*several, Box(last.offset, (1, 1))])
    assert found is not None
    assert found[2] == Box(last.offset, (1, 1))


@pytest.mark.parametrize("planted", [False, True], ids=["disjoint", "overlapping"])
def test_more_of_these_than_can_be_compared_are_refused_at_once(planted: bool) -> None:
    """Comparing them takes minutes, and any client that declares a layout could make the service do it."""
    boxes = windmill(1250)
    assert len(boxes) == 5001
    if planted:
        boxes.append(Box(boxes[-1].offset, (1, 1)))

    def refuse() -> None:
        with pytest.raises(LayoutError, match=f"{len(boxes)} boxes are interlocked"):
            first_overlap(boxes)

    assert processor_seconds(refuse) < 5.0


def spiral(count: int, side: int = 1 << 20) -> list[Box]:
    """Boxes that each take a row or a column of the rest: every cut separates one box from all others."""
    made = []
    x = y = 0
    for number in range(count):
        if number % 2:
            made.append(Box((x, y), (1, side - y)))
            x += 1
        else:
            made.append(Box((x, y), (side - x, 1)))
            y += 1
    return made


def test_boxes_of_which_each_cut_parts_but_one_are_refused_at_once() -> None:
    """A spiral of 20,000 boxes once took minutes."""
    assert first_overlap(spiral(500)) is None

    def refuse() -> None:
        with pytest.raises(LayoutError, match="20000 boxes are interlocked"):
            first_overlap(spiral(20_000))

    assert processor_seconds(refuse) < 20.0


@given(boxes(), st.lists(boxes(), max_size=6))
def test_gaps_are_what_subtraction_leaves(box: Box, others: list[Box]) -> None:
    inside = [common for other in others if (common := box.intersect(other)) is not None and common.volume]
    disjoint: list[Box] = []
    for other in inside:
        disjoint += subtract(other, disjoint)
    found = list(gaps(box, disjoint)) if box.volume else []
    expected = mask(box)
    for other in disjoint:
        expected &= ~mask(other)
    assert np.array_equal(sum((mask(b).astype(int) for b in found), np.zeros(SHAPE, int)), expected.astype(int))


@pytest.mark.parametrize("several", [windmill(30), [*spiral(60, 100)]], ids=["windmill", "spiral"])
def test_gaps_between_interlocked_boxes_are_found(several: list[Box]) -> None:
    whole = Box((0, 0), (100, 100))
    found = list(gaps(whole, several))
    assert sum(box.volume for box in (*found, *several)) == whole.volume
    assert first_overlap([*found, *several]) is None


def test_the_first_of_a_million_gaps_are_found_at_once() -> None:
    """Among 50,000 boxes on a diagonal.

    An earlier version made all gaps first and compared each with all others: an hour.
    """
    diagonal = [Box((n, n), (1, 1)) for n in range(50_000)]
    whole = Box((0, 0), (1 << 20, 1 << 20))
    found: list[Box] = []
    assert processor_seconds(lambda: found.extend(itertools.islice(gaps(whole, diagonal), 1000))) < 20.0
    assert len(found) == 1000


@given(st.integers(0, 60), st.integers(0, 60))
def test_a_range_of_a_row_major_array_is_few_boxes_in_order(start: int, stop: int) -> None:
    order = np.arange(60).reshape(SHAPE)
    found = row_major_boxes(SHAPE, start, stop)
    elements = [order[tuple(slice(o, e) for o, e in zip(b.offset, b.end, strict=True))].ravel() for b in found]
    assert np.array_equal(np.concatenate([*elements, []]), np.arange(start, max(start, stop)))
    assert len(found) <= 2 * len(SHAPE) - 1


def test_a_scalar_is_one_box() -> None:
    assert Box.whole(()).volume == 1
    assert row_major_boxes((), 0, 1) == [Box((), ())]
    assert Box((), ()).fits(())


@st.composite
def views(draw: st.DrawFn) -> np.ndarray:
    """Sliced and permuted views of an array that holds the indexes of its elements."""
    view = np.arange(120).reshape(2, 3, 4, 5)
    for axis, size in enumerate(view.shape):
        start, stop = sorted((draw(st.integers(0, size)), draw(st.integers(0, size))))
        view = np.moveaxis(np.moveaxis(view, axis, 0)[start : stop : draw(st.integers(1, 3))], 0, axis)
    view = view.transpose(draw(st.permutations(range(4))))
    return view[0] if len(view) and draw(st.booleans()) else view


@given(views(), st.integers(-5, 125), st.integers(-5, 125))
def test_the_boxes_of_a_range_of_memory_are_the_elements_of_a_view_that_lie_in_it(
    view: np.ndarray, start: int, stop: int
) -> None:
    strides = [stride // view.itemsize for stride in view.strides]
    first = int(view.flat[0]) if view.size else 0
    found = strided_boxes(view.shape, strides, start - first, stop - first)
    assert len(found) <= 2 * view.ndim - 1
    covered = np.zeros(view.shape, int)
    for box in found:
        assert box.fits(view.shape)
        covered[tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))] += 1
    assert np.array_equal(covered, ((view >= start) & (view < stop)).astype(int))
