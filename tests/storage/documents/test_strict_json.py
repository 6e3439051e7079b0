"""Does the reader of stored documents refuse what is invalid, and keep fields that it does not know?"""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighbridge.errors import DataLoss, FailedPrecondition
from weighbridge_storage.documents import strict_json

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), values, max_size=5))
def test_fields_that_nobody_took_are_written_back_as_they_were(unknown: dict[str, object]) -> None:
    document = {**unknown, "known": 7}
    fields = strict_json.decode(json.dumps(document).encode(), "it")
    assert fields.integer("known") == 7
    assert "known" not in fields
    rest = fields.rest()
    fields.end()
    assert json.loads(strict_json.encode({"known": 7, **rest})) == document


def test_a_format_is_refused_with_the_program_to_use() -> None:
    strict_json.decode(b'{"format": 3}', "it").check_format(3)
    with pytest.raises(FailedPrecondition, match=r"it has format 2.*reads format 3") as caught:
        strict_json.decode(b'{"format": 2}', "it").check_format(3)
    assert caught.value.fix == "use a Weighbridge that reads format 2"
    with pytest.raises(FailedPrecondition, match=r"it has format 4.*reads format 3"):
        strict_json.decode(b'{"format": 4}', "it").check_format(3)
    for text in (b"{}", b'{"format": 0}', b'{"format": "3"}', b'{"format": true}'):
        with pytest.raises(DataLoss):
            strict_json.decode(text, "it").check_format(3)


def test_a_required_feature_that_is_lacking_is_refused_by_name() -> None:
    text = b'{"requires": ["deltas", "signed"]}'
    assert strict_json.decode(text, "it").required(frozenset({"deltas", "signed", "more"})) == (
        "deltas",
        "signed",
    )
    with pytest.raises(FailedPrecondition, match="it requires 'signed'") as caught:
        strict_json.decode(text, "it").required(frozenset({"deltas"}))
    assert "deltas" not in caught.value.message
    assert caught.value.fix == "use a newer Weighbridge"
    for malformed in (b"{}", b'{"requires": "deltas"}', b'{"requires": [7]}', b'{"requires": [["x"]]}'):
        with pytest.raises(DataLoss):
            strict_json.decode(malformed, "it").required(frozenset())


@pytest.mark.parametrize("number", ["1e400", "-1e400", "NaN", "Infinity"])
def test_numbers_that_could_not_be_written_back_are_data_loss(number: str) -> None:
    with pytest.raises(DataLoss):
        strict_json.decode(f'{{"unknown": [{number}]}}'.encode(), "it")
