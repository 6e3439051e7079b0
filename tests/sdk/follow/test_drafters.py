"""Does an agent take an engine to the versions that two refs name, the policy's and its drafter's, in one update or in
none?
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import CliRunner

from tests.sdk.follow.test_mistakes import MODEL, Recording
from tests.sdk.follow.test_started_again import Said
from tests.support.json_servers import json_server
from tests.support.raw_clients import TinyModel, tiny_folder
from tests.support.services import RunningService, running_service
from tests.support.signing import new_key
from tests.support.waiting import eventually
from weighbridge import EngineClient, Signatures, Signer, TrainerClient, Trusted
from weighbridge._cli import commands
from weighbridge._cli.following import _line
from weighbridge._reporting.reporter import EngineReporter
from weighbridge.errors import FailedPrecondition, InvalidArgument
from weighbridge.follow.agent import Followed, Follower
from weighbridge.follow.engines import Prepared, Serving, serving_of
from weighbridge.follow.status import Status
from weighbridge.follow.vllm import VllmServer

DRAFTER = "acme/tiny-eagle"


class Refs:
    """A service whose refs come to name versions, one after the other."""

    def __init__(self, *news: tuple[str, int]) -> None:
        self._news = news

    def watch_refs(self, refs: list[tuple[str, str]]) -> Iterator[tuple[str, SimpleNamespace]]:
        assert refs == [(DRAFTER, "latest"), (MODEL, "live")]
        for model, number in self._news:
            ref = dict(refs)[model]
            yield ref, SimpleNamespace(model=model, number=number, traceparent="", metadata={})

    def version(self, model: str, ref: str) -> SimpleNamespace:
        return SimpleNamespace(number=[number for each, number in self._news if each == model][-1])


class Drafted(Recording):
    """An engine with a drafter of its own."""

    def __init__(self, serving: Serving, unfit: str = "") -> None:
        super().__init__(serving)
        self.draft = ""
        self._unfit = unfit

    def prepare(self, version: int) -> Prepared:
        self.asked.append(f"prepare {version} {self.draft}".strip())
        if self.draft == self._unfit != "":
            raise FailedPrecondition(f"{self.draft} has nothing for drafter.fc")
        return Prepared(1, 0.0)

    def apply(self, version: int, label: str) -> None:
        self.asked.append("apply")
        self._serving = Serving(version, model=MODEL, draft=self.draft or self._serving.draft)


def followed(engine: Any, *news: tuple[str, int], said: Said | None = None, **settings: Any) -> list[Followed]:
    follower = Follower(
        cast("Any", Refs(*news)),
        MODEL,
        engine,
        "live",
        retry_seconds=0.0,
        reporter=cast("Any", said),
        draft=(DRAFTER, "latest"),
        **settings,
    )
    return list(follower.run())


def test_neither_version_is_taken_before_both_are_named_and_then_each_move_of_a_ref_takes_both() -> None:
    engine, said = Drafted(Serving(None)), Said()
    lines = followed(engine, (MODEL, 1), (DRAFTER, 4), (MODEL, 2), (DRAFTER, 5), said=said)
    pairs = [(1, f"{DRAFTER}@4"), (2, f"{DRAFTER}@4"), (2, f"{DRAFTER}@5")]
    assert [each for each in engine.asked if "prepare" in each] == [f"prepare {n} {d}" for n, d in pairs]
    assert [(each.serves, each.drafter, each.error) for each in lines] == [(n, d, "") for n, d in pairs]
    served = [each for each in said.changes if each.get("state") == "serving"]
    assert [(each["version"], each["drafter"]) for each in served] == pairs
    assert _line(lines[-1]).startswith(f"{MODEL}@2 + {DRAFTER}@5: ")


def test_an_engine_that_has_both_is_left_alone_and_one_with_another_drafter_is_not() -> None:
    for draft, asked in ((f"{DRAFTER}@4", []), (f"{DRAFTER}@3", [f"prepare 1 {DRAFTER}@4"])):
        engine = Drafted(Serving(1, model=MODEL, draft=draft))
        [line] = followed(engine, (DRAFTER, 4), (MODEL, 1))
        assert (line.serves, line.drafter, line.error) == (1, f"{DRAFTER}@4", "")
        assert [each for each in engine.asked if "prepare" in each] == asked


def test_a_drafter_that_does_not_fit_keeps_the_policy_back_unless_it_may_be_left_behind() -> None:
    bad, good = f"{DRAFTER}@5", f"{DRAFTER}@4"
    engine = Drafted(Serving(1, model=MODEL, draft=good), unfit=bad)
    lines = followed(engine, (DRAFTER, 5), (MODEL, 2))
    assert "apply" not in engine.asked
    assert {(each.serves, each.drafter) for each in lines} == {(1, good)}
    assert all("has nothing for drafter.fc" in each.error for each in lines)

    engine, said = Drafted(Serving(1, model=MODEL, draft=good), unfit=bad), Said()
    news = (DRAFTER, 5), (MODEL, 2), (DRAFTER, 6)
    left, taken = followed(engine, *news, said=said, leaves_draft=True)[-2:]
    assert (left.serves, left.drafter, left.error) == (2, good, "")
    assert f"{bad} was left out: {bad} has nothing for drafter.fc" in left.stale
    assert (taken.serves, taken.drafter, taken.stale) == (2, f"{DRAFTER}@6", "")
    assert f"{bad} was left out" in next(e["error"] for e in said.changes if e.get("update_version") == 2)


def test_an_engine_whose_driver_takes_no_drafter_is_refused_at_once() -> None:
    with pytest.raises(InvalidArgument, match="does not accept a drafter"):
        followed(Recording(Serving(None)))


def test_what_ranks_say_of_both_versions_is_read() -> None:
    ranks = {"rank 0": Status(served=f"{MODEL}@2 + {DRAFTER}@5", waiting=f"{MODEL}@3 + {DRAFTER}@6")}
    assert serving_of(ranks, MODEL) == Serving(2, model=MODEL, waiting=3, draft=f"{DRAFTER}@5")
    apart = {**ranks, "rank 1": Status(served=f"{MODEL}@2 + {DRAFTER}@4")}
    assert serving_of(apart, MODEL).version is None, "ranks that draft by different versions differ"


def test_workers_of_vllm_get_both_versions() -> None:
    both, said = f"{MODEL}@2 + {DRAFTER}@5", []
    worker = {
        "served": both,
        "prepared": both,
        "engines": 1,
        "ranks": 1,
        "engine": 0,
        "rank": 0,
        "failed": "",
    }

    def answer(path: str, body: Any) -> tuple[int, Any]:
        said.append((path, body))
        return 200, {"results": [worker]}

    with json_server(answer) as url:
        engine = VllmServer(url, MODEL, "service:1")
        engine.draft = f"{DRAFTER}@5"
        engine.connect()
        engine.prepare(2)
        engine.apply(2, f"{MODEL}@2")
        engine.draft = f"{DRAFTER}@6"
        with pytest.raises(FailedPrecondition, match="not all ranks serve"):
            engine.apply(2, f"{MODEL}@2")
    orders = [body["args"] for _, body in said if body and body.get("method", "").endswith(("prepare", "apply"))]
    assert orders == [["2", f"{DRAFTER}@5"], ["2", f"{DRAFTER}@5"], ["2", f"{DRAFTER}@6"]]
    assert [body for path, body in said if path == "/update_weight_version"] == [{"new_version": both}]


@pytest.fixture
def source(tmp_path: Any) -> TinyModel:
    return tiny_folder(tmp_path / "hf")


@pytest.fixture
def running(tmp_path: Any, source: TinyModel) -> Iterator[RunningService]:
    with running_service(tmp_path / "store") as service, TrainerClient(service.address) as trainer:
        for model in (MODEL, DRAFTER):
            trainer.import_folder(model, source.folder, step=1).wait(timeout=60)
        yield service


def test_where_signatures_are_required_a_drafter_without_one_keeps_both_back(
    running: RunningService, tmp_path: Any
) -> None:
    keys, engine = new_key(tmp_path, "release"), Drafted(Serving(None))
    with EngineClient(running.address) as client:
        Signatures(client).sign(MODEL, 1, signer=Signer(keys.key))
        steps = Follower(
            client,
            MODEL,
            engine,
            required=[Trusted.of_file(keys.public)],
            signed_seconds=0.05,
            draft=(DRAFTER, "latest"),
        ).run()
        refused = next(steps)
        assert f"{DRAFTER}@1" in refused.error
        assert "it has no signature" in refused.error
        assert [each for each in engine.asked if each != "connect"] == []
        Signatures(client).sign(DRAFTER, 1, signer=Signer(keys.key))
        taken = next(steps)
    assert (taken.serves, taken.drafter, taken.error) == (1, f"{DRAFTER}@1", "")


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--draft", f"{DRAFTER}@7"], "is one version, which never changes"),
        (["--draft", MODEL], "which is the model that the engine answers by"),
        (["--draft", f"{DRAFTER}:training"], f"engines cannot load training states: follow {DRAFTER}"),
        (["--draft", DRAFTER, "--engine", "sglang"], "--engine sglang does not support --draft"),
    ],
)
def test_the_command_refuses_what_is_no_ref_of_another_model(more: list[str], why: str) -> None:
    done = CliRunner().invoke(commands, ["follow", MODEL, "--server", "127.0.0.1:9", *more])
    assert done.exit_code == 2
    assert why in done.output


def test_the_list_of_engines_names_both_versions(running: RunningService) -> None:
    with EngineClient(running.address) as client:
        reporter = EngineReporter(client, MODEL, kind="vllm", version=1)
        reporter.say(state="serving", drafter=f"{DRAFTER}@1")
        eventually(lambda: any(each.drafter for each in client.engines(MODEL)))
        done = CliRunner().invoke(commands, ["engines", MODEL, "--server", running.address])
        reporter.close()
    assert f"1 + {DRAFTER}@1" in done.output
