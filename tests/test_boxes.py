"""Is the arithmetic on boxes right? Compared with numpy's view of the same regions."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from weighbridge.boxes import Box, first_overlap, row_major_boxes, subtract

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
    assert np.array_equal(
        sum((mask(b).astype(int) for b in left), np.zeros(SHAPE, int)), expected.astype(int)
    )


@given(st.lists(boxes(), max_size=6))
def test_an_overlap_is_found_if_and_only_if_there_is_one(several: list[Box]) -> None:
    found = first_overlap(several)
    count = sum((mask(b).astype(int) for b in several), np.zeros(SHAPE, int))
    assert (found is not None) == bool((count > 1).any())
    if found is not None:
        i, j, common = found
        assert i != j
        assert np.array_equal(mask(several[i]) & mask(several[j]), mask(common))


@given(st.integers(0, 60), st.integers(0, 60))
def test_a_range_of_a_row_major_array_is_few_boxes_in_order(start: int, stop: int) -> None:
    order = np.arange(60).reshape(SHAPE)
    found = row_major_boxes(SHAPE, start, stop)
    elements = [
        order[tuple(slice(o, e) for o, e in zip(b.offset, b.end, strict=True))].ravel() for b in found
    ]
    assert np.array_equal(np.concatenate([*elements, []]), np.arange(start, max(start, stop)))
    assert len(found) <= 2 * len(SHAPE) - 1


def test_a_scalar_is_one_box() -> None:
    assert Box.whole(()).volume == 1
    assert row_major_boxes((), 0, 1) == [Box((), ())]
    assert Box((), ()).fits(())
