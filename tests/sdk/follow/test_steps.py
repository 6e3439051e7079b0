"""Do the parts of a step that an agent measures add up to the whole, in its report, on the page, in metrics and in the
trace?
"""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from markupsafe import escape
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from tests.sdk.follow.test_mistakes import MODEL, Recording
from tests.support.raw_clients import TinyModel, tiny_folder
from tests.support.services import RunningService, running_service
from tests.support.traced import Traced, ids, turn_on
from tests.support.waiting import eventually
from weighbridge import EngineClient, EngineReporter, TrainerClient
from weighbridge._cli import commands
from weighbridge._cli.following import _line
from weighbridge._core.engines.step_parts import OF_AGENT, PARTS, readable_seconds
from weighbridge.follow import updates
from weighbridge.follow.agent import Followed, Follower
from weighbridge.follow.engines import EngineFailed, Prepared, Serving
from weighbridge.follow.updates import Laps, apply_prepared, update
from weighbridge_service.api.http.app import create_app
from weighbridge_service.exports.jobs import Exports


class Stamped(Recording):
    """An engine that records when each call began and ended."""

    def __init__(self) -> None:
        super().__init__(Serving(None))
        self.stamps: dict[str, tuple[float, float]] = {}
        self.went_on_ms = 0.0

    def _stamp(self, name: str, began_s: float) -> None:
        self.stamps[name] = began_s, time.monotonic()

    def serving(self) -> Serving:
        began_s = time.monotonic()
        self._stamp("serving", began_s)
        return super().serving()

    def prepare(self, version: int) -> Prepared:
        began_s = time.monotonic()
        prepared = super().prepare(version)
        self._stamp("prepare", began_s)
        return prepared

    def pause(self) -> None:
        self._stamp("pause", time.monotonic())

    def apply(self, version: int, label: str) -> None:
        began_s = time.monotonic()
        super().apply(version, label)
        self._stamp("apply", began_s)
        self._serving = Serving(version)

    def resume(self) -> None:
        self._stamp("resume", time.monotonic())
        self.went_on_ms = time.time() * 1000

    def answer_token(self) -> None:
        self._stamp("answer", time.monotonic())


@pytest.fixture
def source(tmp_path: Path) -> TinyModel:
    return tiny_folder(tmp_path / "hf")


@pytest.fixture
def running(tmp_path: Path, source: TinyModel) -> Iterator[RunningService]:
    with running_service(tmp_path / "store", report_every=0.5) as service:
        with TrainerClient(service.address) as trainer:
            trainer.import_folder(MODEL, source.folder, step=1).wait(timeout=60)
        yield service


@pytest.fixture
def client(running: RunningService) -> Iterator[EngineClient]:
    with EngineClient(running.address) as found:
        yield found


def counted(running: RunningService) -> dict[str, tuple[float, float]]:
    """The number of observations of each part, and the sum of their seconds."""
    samples = {
        (sample.name.rpartition("_")[2], sample.labels["part"]): sample.value
        for family in text_string_to_metric_families(running.metrics.text().decode())
        if family.name == "weighbridge_engine_step_seconds"
        for sample in family.samples
        if sample.name.endswith(("_count", "_sum"))
    }
    return {part: (count, samples["sum", part]) for (what, part), count in samples.items() if what == "count"}


def test_the_parts_of_a_step_add_up_and_report_page_metrics_and_command_line_have_the_same(
    running: RunningService, client: EngineClient
) -> None:
    engine = Stamped()
    with closing(EngineReporter(client, MODEL, kind="mine", ref="latest")) as reporter:
        eventually(lambda: client.engines(MODEL))
        assert counted(running) == {}
        done = next(Follower(client, MODEL, engine, reporter=reporter, ask_token=True).run())
        ended_s = time.monotonic()
        eventually(lambda: client.engines(MODEL)[0].update_version == 1)
        (found,) = client.engines(MODEL)
        seen_ms = time.time() * 1000
        parts, stamps = found.update_parts, engine.stamps
        assert list(parts) == [each.name for each in PARTS]
        assert {each.name: parts[each.name] for each in OF_AGENT} == done.parts

        # by the engine's clock: parts last at least as long as the calls, and no longer than the time between these
        still = parts["pause"] + parts["apply"] + parts["resume"]
        rounded = 1e-5
        assert (
            stamps["resume"][1] - stamps["pause"][0] - rounded
            <= still
            <= stamps["serving"][0] - stamps["prepare"][1] + rounded
        )
        assert parts["apply"] >= stamps["apply"][1] - stamps["apply"][0] - rounded
        assert parts["stage"] + parts["agree"] >= stamps["prepare"][1] - stamps["prepare"][0] - rounded
        assert parts["confirm"] <= stamps["answer"][0] - stamps["resume"][1] + rounded
        assert parts["confirm"] + parts["answer"] >= stamps["answer"][1] - stamps["resume"][1] - rounded
        assert parts["answer"] <= ended_s - stamps["serving"][1] + rounded
        assert done.pause_seconds == pytest.approx(still, abs=1e-3)
        # by the service's clock: from the opening of the version until the agent has reported
        version = client.version(MODEL, 1)
        assert sum(parts.values()) - parts["offer"] == pytest.approx(
            (found.update_time_ms - version.create_time_ms) / 1000, abs=2e-3
        )
        assert parts["open"] + parts["receive"] == pytest.approx(version.ready_seconds)
        # the clock of this process: the engine resumed before the reported end of the update, which was observed later
        assert engine.went_on_ms - 1 <= found.update_time_ms <= seen_ms + 1
        assert parts["hear"] > 0  # `latest` names it once it is durable

        eventually(lambda: "answer" in counted(running))  # the last one
        assert counted(running) == {name: (1, pytest.approx(seconds)) for name, seconds in parts.items()}
        reporter.say(state="serving")  # a repeated report is not counted again
        line = ["engines", MODEL, "--json", "--server", running.address]
        shown = json.loads(CliRunner().invoke(commands, line).output)
        assert shown[0]["update_parts"] == parts
        assert f"confirm {readable_seconds(parts['confirm'])}" in _line(done)
        service = running.service
        exports = Exports(service)
        http = TestClient(create_app(service, exports, running.metrics, running.health))
        for page in (f"/models/{MODEL}", f"/models/{MODEL}/versions/1"):
            text = http.get(page).text
            for each in PARTS:
                assert f"{each.name} {readable_seconds(parts[each.name])}" in text, (page, each.name)
            assert found.step_text in " ".join(re.sub("<[^>]*>", "", text).split()), page
        for each in PARTS:
            assert f'title="{escape(each.text)}"' in text
        assert http.get(f"/v1/models/{MODEL}/engines").json()["engines"][0]["update_parts"] == parts
        assert {count for count, _ in counted(running).values()} == {1}


def test_each_update_is_counted_once_and_one_that_failed_not(
    running: RunningService, client: EngineClient, source: TinyModel
) -> None:
    engine = Stamped()
    with closing(EngineReporter(client, MODEL, kind="mine", ref="latest")) as reporter:
        follower = Follower(client, MODEL, engine, reporter=reporter)
        follower.take_to(1)
        eventually(lambda: counted(running).get("apply", (0, 0))[0] == 1)
        assert "wait" not in counted(running)  # no event of the service had started the update
        assert "hear" not in counted(running)
        with TrainerClient(running.address) as trainer:
            number = trainer.push_folder(MODEL, source.folder, step=2).wait(timeout=60).number
        engine.apply = refuse  # type: ignore[method-assign]
        assert follower.take_to(number).parts == {}
        eventually(lambda: client.engines(MODEL)[0].state == "failing")
        del engine.apply
        follower.take_to(number)
        eventually(lambda: counted(running)["apply"][0] == 2)


def refuse(_version: int, _label: str) -> None:
    raise EngineFailed("made up")


class Watch:
    """A clock that is set by hand, in place of the module `time` of updates."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(updates, "time", SimpleNamespace(monotonic=lambda: self.now_s))

    def passes(self, seconds: float) -> Callable[..., None]:
        def step(*_: object) -> None:
            self.now_s += seconds

        return step


def test_several_engines_are_staged_when_the_slowest_is_and_stand_still_from_pause_to_resume(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = Watch(monkeypatch)
    engines = [Recording(Serving(None)) for _ in range(2)]
    first = engines[0]
    monkeypatch.setattr(first, "connect", watch.passes(0.05))
    monkeypatch.setattr(first, "pause", watch.passes(0.02))
    monkeypatch.setattr(first, "apply", watch.passes(0.03))
    monkeypatch.setattr(first, "resume", watch.passes(0.01))
    prepare = watch.passes(0.3)
    monkeypatch.setattr(first, "prepare", lambda number: (prepare(), Prepared(1, 0.25))[1])
    monkeypatch.setattr(engines[1], "prepare", lambda _number: Prepared(1, 0.2))
    done = update({"a": first, "b": engines[1]}, 7, "seven")
    assert done.parts == pytest.approx({"stage": 0.25, "agree": 0.1, "pause": 0.02, "apply": 0.03, "resume": 0.01})
    assert (done.prepare_seconds, done.pause_seconds) == pytest.approx((0.35, 0.06))


def test_an_engine_that_began_before_its_agent_heard_of_the_version_has_waited_less_than_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = Watch(monkeypatch)
    heard_s = watch.now_s
    watch.now_s += 0.02
    laps = Laps()
    laps.heard(heard_s)
    watch.now_s += 0.03
    laps.end_preparation(0.21, early_seconds=0.2)
    assert laps.parts == pytest.approx({"wait": -0.18, "stage": 0.21, "agree": 0.02})
    assert sum(laps.parts.values()) == pytest.approx(watch.now_s - heard_s)


def test_of_an_engine_that_began_early_without_news_only_what_has_passed_since_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = Watch(monkeypatch)
    laps = Laps()
    watch.now_s += 0.03
    laps.end_preparation(0.21, early_seconds=0.2)
    assert laps.parts == pytest.approx({"stage": 0.01, "agree": 0.02})


def test_what_ranks_say_beyond_what_has_passed_counts_as_no_more_than_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = Watch(monkeypatch)
    laps = Laps()
    watch.now_s += 0.1
    laps.end_preparation(4.0)  # prepared for an earlier try
    assert laps.parts == pytest.approx({"stage": 0.1, "agree": 0.0})


def test_an_engine_that_could_not_be_paused_has_no_part_for_applying(monkeypatch: pytest.MonkeyPatch) -> None:
    Watch(monkeypatch)
    engine = Recording(Serving(1))
    monkeypatch.setattr(engine, "pause", lambda: refuse(1, ""))
    laps = Laps()
    assert apply_prepared([engine], 7, "seven", laps) == ["made up"]
    assert list(laps.parts) == ["pause", "resume"]


def test_pause_apply_and_resume_are_spans_of_their_own_in_that_of_the_update(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced = Traced()
    turn_on(monkeypatch, traced)
    done = next(Follower(client, MODEL, Stamped()).run())
    ended = traced.ended()
    updated = ended["weighbridge.update"]
    assert updated.context is not None
    assert updated.attributes is not None
    ordered = [ended[f"weighbridge.{name}"] for name in ("prepare", "pause", "apply", "resume")]
    assert all(ids(span) == (updated.context.trace_id, updated.context.span_id) for span in ordered)
    ends = [(span.start_time or 0, span.end_time or 0) for span in ordered]
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(ends))
    for name in ("wait", "stage", "agree", "pause", "apply", "resume"):
        said = updated.attributes[f"weighbridge.{name}_seconds"]
        assert said == pytest.approx(done.parts[name], abs=1e-6)


def test_a_line_of_the_command_has_the_parts() -> None:
    parts = {"wait": 0.0, "stage": 0.2, "agree": 0.05, "pause": 0.02, "apply": 0.03, "resume": 0.01}
    assert _line(Followed(MODEL, 18, 18, 8_000_000, 0.25, 0.06, parts=parts)) == (
        f"{MODEL}@18: 8.0 MB prepared in 250 ms, engine paused for 60 ms "
        "(wait 0 ms, stage 200 ms, agree 50 ms, pause 20 ms, apply 30 ms, resume 10 ms)"
    )
