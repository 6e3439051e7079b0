"""Is metadata kept as it was given, within bounds, and compared as one expects?"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from weighbridge._core.metadata import Condition, all_hold, checked_metadata, conditions, parse_value
from weighbridge._transport import wire
from weighbridge.errors import InvalidArgument

SAID = {
    "reward": 0.71,
    "note": "größer als zuvor",
    "ok": True,
    "no": False,
    "epoch": -3,
    "big": 2**63 - 1,
    "zero": 0,
    "typed": "10",
    "yes": "True",
    "nan": "NaN",
}


def test_metadata_comes_back_from_the_wire_as_it_was_given() -> None:
    back = wire.metadata_from_proto(wire.metadata_to_proto(SAID))
    assert back == SAID
    assert {key: type(value) for key, value in back.items()} == {key: type(v) for key, v in SAID.items()}


def test_numbers_of_numpy_are_numbers() -> None:
    given = {
        "a": np.float64(0.5),
        "b": np.float32(0.5),
        "c": np.int64(3),
        "d": np.bool_(True),
        "e": np.array(7),
    }
    kept = checked_metadata(given)
    assert kept == {"a": 0.5, "b": 0.5, "c": 3, "d": True, "e": 7}
    assert [type(value) for value in kept.values()] == [float, float, int, bool, int]


@pytest.mark.parametrize(
    "wrong",
    [
        {"reward": math.nan},
        {"reward": math.inf},
        {"reward": torch.tensor(1.0)},
        {"reward": np.float32("nan")},
        {"reward": np.ones(1)},
        {"reward": None},
        {"reward": [1]},
        {"steps": 2**63},
        {"note": "two\nlines"},
        {"note": "\x1b[31m"},
        {"": 1},
        {"k" * 65: 1},
        {"a b": 1},
        {"a=b": 1},
        {7: 1},
        {f"k{i}": i for i in range(33)},
        {"note": "x" * 4096},
    ],
)
def test_what_cannot_be_kept_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidArgument):
        checked_metadata(wrong)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.71", 0.71),
        ("3", 3),
        ("-1e3", -1000.0),
        ("true", True),
        ("True", True),
        ("FALSE", False),
        ('"3"', "3"),
        ("x y", "x y"),
        ("null", "null"),
        ("[1]", "[1]"),
        ("", ""),
    ],
)
def test_a_value_is_read_as_it_is_typed(text: str, value: Any) -> None:
    found = parse_value(text)
    assert (found, type(found)) == (value, type(value))


def test_a_number_that_is_not_finite_is_no_value() -> None:
    for text in ("NaN", "Infinity", "-Infinity", "1e999"):
        with pytest.raises(InvalidArgument):
            parse_value(text)


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("reward>=0.71", True),
        ("reward > 0.71", False),
        ("reward<1", True),
        ("reward=0.71", True),
        ("reward==0.71", True),
        ("reward!=0.7", True),
        ("epoch<=-3", True),
        ("big=9223372036854775807", True),
        ("ok=true", True),
        ("ok=1", False),
        ("ok!=1", True),
        ("ok>false", False),
        ("note>=größer", True),
        ('note="größer als zuvor"', True),
        ("note>1", False),
        ("ok=True", True),
        ("typed>9", True),
        ("typed<10.5", True),
        ('typed>"9"', False),
        ("yes=TRUE", True),
        ("nan<1", False),
        ("loss<1", False),
        ("loss!=1", False),
    ],
)
def test_a_comparison_is_true_of_what_it_says(text: str, holds: bool) -> None:
    assert Condition.parse(text).holds(SAID) is holds


def test_several_comparisons_must_all_be_true() -> None:
    assert all_hold(conditions(["reward>0.5", "ok=true"]), SAID)
    assert not all_hold(conditions(["reward>0.5", "ok=false"]), SAID)
    assert all_hold([], {})


@pytest.mark.parametrize("text", ["", "reward", ">=1", "a b=1", "reward~1", "=", "k" * 65 + "=1", "x" * 5000 + "=1"])
def test_what_compares_nothing_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="compares nothing"):
        Condition.parse(text)
