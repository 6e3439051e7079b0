"""Is the memory of files on their way bounded however many readers stop taking, and does none of them keep another from
getting on?
"""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from weighbridge_service.admission.piece_room import SMALLEST_BYTES, PieceRoom

MIB = 1 << 20
FILE = 1 << 30


def test_hundreds_of_readers_that_stop_share_the_room_and_each_next_one_gets_a_piece() -> None:
    room, readers = PieceRoom(256 * MIB, 4 * MIB), 500
    with ExitStack() as stack:
        for _ in range(readers):
            reader = stack.enter_context(room.reader())
            assert reader.take(FILE) >= SMALLEST_BYTES  # on its way
            assert reader.take(FILE) >= SMALLEST_BYTES  # read ahead
        assert room.held <= 256 * MIB + 2 * readers * SMALLEST_BYTES
    assert room.held == 0


def test_a_few_readers_get_pieces_of_full_size() -> None:
    room = PieceRoom(256 * MIB, 4 * MIB)
    with ExitStack() as stack:
        taken = [stack.enter_context(room.reader()).take(FILE) for _ in range(48)]
    assert set(taken) == {4 * MIB}


@pytest.mark.parametrize("left", [0, 1, 1000])
def test_the_end_of_a_file_takes_what_it_has(left: int) -> None:
    with PieceRoom(MIB, MIB).reader() as reader:
        assert reader.take(left) == left


def test_what_has_gone_makes_room() -> None:
    room = PieceRoom(MIB, MIB)
    with room.reader() as reader:
        for _ in range(100):
            assert reader.take(SMALLEST_BYTES) == SMALLEST_BYTES
            reader.give_back(SMALLEST_BYTES)
        assert room.held == 0


def test_a_reader_that_fails_gives_back_what_it_had() -> None:
    room = PieceRoom(MIB, MIB)

    def fails() -> None:
        with room.reader() as reader:
            reader.take(1000)
            raise ConnectionError

    with pytest.raises(ConnectionError):
        fails()
    assert room.held == 0
