"""Pickles that are made to take much memory: is what they describe bounded by their length?"""

from __future__ import annotations

import pickle
import tracemalloc
from contextlib import suppress

from tests.support.alone import alone
from weighbridge._trainers.torch_dist.pickles import allow, read_pickle
from weighbridge.errors import DataLoss

NBYTES, MOST = 40_000, 26
"""Length of a pickle, and how many times that it may take."""
ALLOWED = allow("a.b")


def _of(unit: bytes) -> bytes:
    """A list of as many of these as there is room for."""
    return b"\x80\x02](" + unit * (NBYTES // len(unit)) + b"e."


def _dict_of_many() -> bytes:
    items = b"".join(b"J" + number.to_bytes(4, "little") + b"N" for number in range(NBYTES // 6))
    return b"\x80\x02}(" + items + b"u."


UNITS = {
    "sets": b"\x8f", "dicts": b"}", "dicts of one": b"}K\x01Ns", "dicts of one, apart": b"}K\x01Ns" + b"N0" * 4,
    "lists of one": b"]Na", "tuples of one": b"N\x85", "tuples of two": b"NN\x86", "tuples of three": b"NNN\x87",
    "tuples": b"(Nt", "instances": b"ca\nb\n)\x81", "references": b"NQ", "texts": b"\x8c\x05a\xf0\x9f\x98\x80",
    "numbers": b"J\x01\x02\x03\x04",
}  # fmt: skip


@alone
def test_what_a_pickle_describes_is_bounded_by_its_length() -> None:
    read_pickle(pickle.dumps({"warm": ["up"]}), ALLOWED, "it")
    times_its_length = {}
    for name, made in {
        **{name: _of(unit) for name, unit in UNITS.items()},
        "a dict of many": _dict_of_many(),
    }.items():
        tracemalloc.start()
        with suppress(DataLoss):
            read_pickle(made, ALLOWED, "it")
        times_its_length[name] = tracemalloc.get_traced_memory()[1] / len(made)
        tracemalloc.stop()
    assert max(times_its_length.values()) < MOST, times_its_length
