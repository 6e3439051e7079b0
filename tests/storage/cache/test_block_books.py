"""Do the books of blocks keep the budget, whatever is pinned, and give up first what was not used for longest?"""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from weighbridge_storage.cache.block_books import Block, BlockBooks
from weighbridge_storage.memory.regions import PAGE

BUDGET = 4 * PAGE


class Cache:
    """One owner's blocks of one page, which are there as soon as they are pinned."""

    def __init__(self) -> None:
        self.there: dict[Any, Block[str]] = {}
        self.gone: list[int] = []
        self.books: BlockBooks[str] = BlockBooks(BUDGET, lambda block: self.gone.append(block.key[1]))

    def pin(self, *numbers: int, ahead: bool = False) -> list[Block[str]] | None:
        wanted = [Block("o", self.there, ("f", n), n * PAGE, PAGE - n) for n in numbers]
        blocks = self.books.pin(wanted, ahead=ahead)
        for block in blocks or ():
            block.begun = block.arrived = True
            block.ended.set()
        return blocks

    def use(self, *numbers: int) -> None:
        for block in self.pin(*numbers) or ():
            self.books.unpin(block, ahead=False)


def test_what_was_not_used_for_longest_goes_first() -> None:
    cache = Cache()
    for number in (1, 2, 3, 4, 1, 5, 6):
        cache.use(number)
    assert cache.gone == [2, 3]
    assert (cache.books.hits, cache.books.misses) == (1, 6)


def test_what_nobody_will_ask_for_again_goes_before_all_others() -> None:
    cache = Cache()
    cache.use(1, 2, 3, 4)
    cache.books.first_to_go(cache.there["f", 3])
    cache.use(5)
    assert cache.gone == [3]


def test_what_is_pinned_stays_and_a_request_that_does_not_fit_beside_it_changes_nothing() -> None:
    cache = Cache()
    pinned = cache.pin(1, 2, 3)
    assert pinned is not None
    assert cache.pin(4, 5) is None
    assert sorted(number for _, number in cache.there) == [1, 2, 3]
    cache.books.unpin(pinned[1], ahead=False)
    assert cache.pin(4, 5) is not None
    assert cache.gone == [2]


def test_blocks_that_are_only_asked_for_ahead_take_at_most_half() -> None:
    cache = Cache()
    assert cache.pin(1, 2, ahead=True) is not None
    assert cache.pin(3, ahead=True) is None
    assert cache.pin(1, ahead=True) is not None, "it has its room already"
    assert cache.pin(3, 4) is not None


def test_a_suspect_block_goes_as_soon_as_nobody_has_it_pinned() -> None:
    cache = Cache()
    [block] = cache.pin(1) or []
    [same] = cache.pin(1) or []
    assert same is block
    block.suspect = True
    cache.books.unpin(block, ahead=False)
    assert cache.gone == []
    cache.books.unpin(block, ahead=False)
    assert cache.gone == [1]
    assert cache.books.used == 0


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True), st.booleans(), st.integers(0, 3))
    )
)
def test_the_books_balance_after_any_pins(steps: list[tuple[list[int], bool, int]]) -> None:
    cache, held = Cache(), list[tuple[Block[str], bool]]()
    for numbers, ahead, released in steps:
        held += [(block, ahead) for block in cache.pin(*numbers, ahead=ahead) or ()]
        for _ in range(min(released, len(held))):
            block, was_ahead = held.pop(0)
            cache.books.unpin(block, ahead=was_ahead)
        assert cache.books.used == len(cache.there) * PAGE <= BUDGET
        assert all(cache.there.get(block.key) is block for block, _ in held)
    for block, was_ahead in held:
        cache.books.unpin(block, ahead=was_ahead)
    assert cache.pin(10, 11, 12, 13) is not None, "nothing stays pinned"
