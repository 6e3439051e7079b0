"""Is a misleading report of an engine refused, with the name of the field, or made harmless?"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from weighbridge._core.engines.facts import EngineReport
from weighbridge.errors import InvalidArgument
from weighbridge_service.engines.reports import checked_report

GOOD = EngineReport(
    "e1", "acme/smol", "vllm", "http://node7:8000", "live", 16, 17, "updating", "", "node7", 4711, beat=1,
    traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
)  # fmt: skip


def test_a_good_report_is_kept_as_it_is() -> None:
    assert checked_report(GOOD) == GOOD
    assert checked_report(EngineReport("e", "acme/smol:training", state="waiting"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("engine_id", ""),
        ("engine_id", "x" * 65),
        ("engine_id", "a\nb"),
        ("engine_id", "a\n"),
        ("engine_id", "\uff41"),
        ("kind", "v" * 33),
        ("kind", "VLLM\x1b[31m"),
        ("address", "x" * 256),
        ("address", "http://node 7"),
        ("address", "http://node7\r\n"),
        ("address", "http://nod\u202ee7"),
        ("host", "node7\x00"),
        ("ref", "a/b"),
        ("ref", "x" * 65),
        ("state", "happy"),
        ("state", ""),
        ("update_lane", "gr pc"),
        ("traceparent", "00-1-2-3"),
        ("version", 2**64 - 1),
        ("beat", 2**53 + 1),
        ("state_seconds", math.nan),
        ("state_seconds", math.inf),
        ("state_seconds", -1.0),
        ("update_age_seconds", 1e300),
        ("update_parts", {"stage": math.nan}),
        ("update_parts", {"wait": -math.inf}),
        ("update_parts", {"apply": 1e300}),
    ],
)
def test_what_cannot_be_is_refused_by_the_name_of_its_field(field: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=field.replace("_", ".")):
        checked_report(replace(GOOD, **{field: value}))  # type: ignore[arg-type]


@pytest.mark.parametrize("model", ["", "smol", "acme/../smol", "a" * 300 + "/b", "acme/smol\n"])
def test_a_model_that_none_can_be_is_refused(model: str) -> None:
    with pytest.raises(InvalidArgument):
        checked_report(replace(GOOD, model=model))


def test_an_error_is_one_plain_line_of_limited_length() -> None:
    said = checked_report(replace(GOOD, error="rank 1: \x1b[31mgone\r\n  - rank\u202e 2\x00:\tnot"))
    assert said.error == "rank 1: [31mgone - rank 2 : not"
    assert len(checked_report(replace(GOOD, error="word " * 100_000)).error) <= 1000


def test_parts_of_a_step_are_kept_by_the_names_of_the_table_and_none_that_the_service_measures() -> None:
    said = {"apply": 0.03, "first_token": 9.0, "receive": 9.0, "x" * 999: 1.0, "wait": -0.2}
    assert checked_report(replace(GOOD, update_parts=said)).update_parts == {"wait": -0.2, "apply": 0.03}
