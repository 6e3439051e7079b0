"""Does an agent say that an engine's drafter is stale, and tell the engine whether it may become so?"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.sdk.follow.test_mistakes import MODEL
from tests.sdk.follow.test_started_again import Restarted, Said, followed
from tests.support.json_servers import json_server
from weighbridge._cli.following import _engine, _line
from weighbridge.follow.engines import EngineFailed, Serving, StaleDrafter, serving_of
from weighbridge.follow.sglang import SglangServer
from weighbridge.follow.status import Status
from weighbridge.follow.wanted import Wanted

STALE = "the drafter acme/eagle (eagle3) is stale"


def test_what_one_rank_says_of_its_drafter_is_what_the_engine_says() -> None:
    ranks = {"rank 0": Status(served=f"{MODEL}@2"), "rank 1": Status(served=f"{MODEL}@2", stale=STALE)}
    assert serving_of(ranks, MODEL) == Serving(2, model=MODEL, stale=STALE)


def test_an_update_that_leaves_a_drafter_behind_is_reported_with_that_and_is_no_failure() -> None:
    class Stale(Restarted):
        def serving(self) -> Serving:
            found = super().serving()
            return Serving(found.version, found.broken, found.model, found.instances, found.waiting, stale=STALE)

    said = Said()
    first, *_ = followed(Stale(Serving(2, model=MODEL, instances=("b",))), said)
    assert (first.serves, first.error, first.stale) == (2, "", STALE)
    assert _line(first).endswith(STALE)
    [served] = [each for each in said.changes if each.get("state") == "serving" and each.get("update_version") == 2]
    assert served["error"] == STALE


@pytest.mark.parametrize("given", [None, "refuse", "allow"])
def test_an_engine_is_told_whether_its_drafter_may_become_stale_if_the_user_has_said_so(
    given: StaleDrafter | None,
) -> None:
    said: list[Any] = []

    def answer(_path: str, body: Any) -> tuple[int, Any]:
        said.append(body)
        return 500, {}

    with json_server(answer) as url:
        engine = _engine("vllm", url, MODEL, "service:1", None, None, None, "", given)
        with pytest.raises(EngineFailed, match="refused"):
            engine.connect()
    [info] = [json.loads(each["args"][0]) for each in said if each]
    assert info.get("stale_drafter") == given


def test_a_server_of_sglang_is_told_so_with_each_version() -> None:
    engine = _engine("sglang", None, MODEL, "service:1", None, None, None, "", "allow")
    assert isinstance(engine, SglangServer)
    assert Wanted.from_json(engine._order(3)).stale_drafter == "allow"
