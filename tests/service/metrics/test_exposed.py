"""Does `/metrics` of a running service have every declared metric, with values that match the events?"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from tests.support.promtool import promtool
from tests.support.raw_clients import TinyModel, tiny_folder
from tests.support.services import RunningService, running_service
from tests.support.waiting import eventually
from weighbridge import EngineClient, EngineReporter, TrainerClient
from weighbridge.errors import VersionFailed
from weighbridge_service.api.http.app import create_app
from weighbridge_service.exports.jobs import Exports
from weighbridge_service.metrics import declared
from weighbridge_service.metrics.declared import Kind

MODEL = "acme/tiny"


@pytest.fixture
def source(tmp_path: Path) -> TinyModel:
    return tiny_folder(tmp_path / "hf")


@pytest.fixture
def service(tmp_path: Path, source: TinyModel) -> Iterator[RunningService]:
    with running_service(tmp_path / "store", {MODEL: source.files}) as running:
        yield running


def figures(service: RunningService) -> dict[tuple[str, tuple[str, ...]], float]:
    """Each sample, by its name and the values of its labels."""
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(service.metrics.text().decode())
        for sample in family.samples
    }


def push(service: RunningService, source: TinyModel, step: int) -> int:
    state = {name: torch.from_numpy(array.copy()) for name, array in source.arrays.items()}
    with TrainerClient(service.address) as trainer:
        handle = trainer.push_state_dict(MODEL, state, step=step, rank=0, world_size=1)
        return handle.wait("durable", timeout=60).number


def test_what_is_exposed_is_what_is_declared_and_promtool_has_nothing_against_it(
    service: RunningService, source: TinyModel
) -> None:
    push(service, source, 1)
    with EngineClient(service.address) as engine:
        for _ in engine.pull(f"{MODEL}@latest"):
            pass
        with closing(EngineReporter(engine, MODEL, kind="vllm", ref="latest")):
            eventually(engine.engines)
    text = service.metrics.text()
    exposed = {
        family.name + ("_total" if family.type == "counter" else ""): (family.type, family.documentation)
        for family in text_string_to_metric_families(text.decode())
        if not family.name.endswith("_created")
    }
    assert exposed == {each.name: (each.kind.value, each.text) for each in declared.ALL}
    labels = {
        sample.name: {*sample.labels}
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }
    for metric in declared.ALL:
        part, extra = ("_bucket", {"le"}) if metric.kind is Kind.HISTOGRAM else ("", set())
        if metric.name + part in labels:  # a labelled metric has no samples before its first event
            assert labels[metric.name + part] == {*metric.labels} | extra
    promtool("check", "metrics", text=text)


def test_a_push_that_becomes_durable_is_counted_with_its_durations(service: RunningService, source: TinyModel) -> None:
    before = figures(service)
    assert before["weighbridge_pushes_total", ("published",)] == 0
    begun = time.monotonic()
    for step in (1, 2):
        push(service, source, step)
    eventually(lambda: figures(service)["weighbridge_pushes_total", ("published",)] == 2)
    took = time.monotonic() - begun  # the last phase ends behind what the trainer waits for
    after = figures(service)
    assert after["weighbridge_push_ready_seconds_count", ()] == 2
    assert after["weighbridge_push_durable_seconds_count", ()] == 2
    ready, durable = (after[f"weighbridge_push_{what}_seconds_sum", ()] for what in ("ready", "durable"))
    assert 0 < ready <= durable <= took
    phases = [
        after["weighbridge_push_phase_seconds_sum", (phase,)]
        for phase in ("open", "planned", "filling", "sealed", "ready", "verified")
    ]
    assert all(seconds >= 0 for seconds in phases)
    assert 0 < sum(phases) <= took
    assert after["weighbridge_grpc_call_seconds_count", ("SealRank",)] == 2


def test_http_requests_are_counted_by_route_and_status_with_the_seconds_until_they_are_answered(
    service: RunningService,
) -> None:
    exports = Exports(service.service)
    begun = time.monotonic()
    with closing(exports):
        http = TestClient(create_app(service.service, exports, service.metrics, service.health))
        statuses = [
            http.get(path).status_code
            for path in (
                "/v1/models",
                f"/v1/models/{MODEL}/gate",
                f"/v1/models/{MODEL}/gate",
                "/v1/models/acme/nobody/gate",
                "/v1/nowhere",
            )
        ]
    took = time.monotonic() - begun
    assert statuses == [200, 200, 200, 404, 404]
    found = figures(service)
    assert {key[1]: value for key, value in found.items() if key[0] == "weighbridge_http_requests_total"} == {
        ("list_models", "200"): 1,
        ("get_gate", "200"): 2,
        ("get_gate", "404"): 1,
    }
    assert found["weighbridge_http_request_seconds_count", ("get_gate",)] == 3
    assert 0 < found["weighbridge_http_request_seconds_sum", ("get_gate",)] <= took


def test_a_push_whose_rank_is_missing_is_seen_waiting_and_then_as_a_failure_with_its_reason(
    tmp_path: Path, source: TinyModel
) -> None:
    settings = {"receive_timeout": 2.0}
    with running_service(tmp_path / "other", {MODEL: source.files}, **settings) as service:
        state = {name: torch.from_numpy(array.copy()) for name, array in source.arrays.items()}
        seen: list[tuple[float, float]] = []

        def waits() -> bool:
            now = figures(service)
            seen.append((now["weighbridge_push_waiting_ranks", ()], now["weighbridge_push_silent_seconds", ()]))
            return seen[-1][0] == 2 and seen[-1][1] > 0.2

        with TrainerClient(service.address) as trainer:
            from threading import Thread

            errors: list[BaseException] = []

            def rank() -> None:
                try:
                    trainer.push_state_dict(MODEL, state, step=1, rank=0, world_size=3)
                except VersionFailed as error:
                    errors.append(error)

            pushing = Thread(target=rank)
            pushing.start()
            eventually(waits)
            pushing.join(60)
        assert errors
        after = figures(service)
        assert after["weighbridge_pushes_total", ("failed",)] == 1
        assert after["weighbridge_push_failures_total", ("VERSION_FAILED",)] == 1
        assert after["weighbridge_push_waiting_ranks", ()] == 0
        assert after["weighbridge_push_silent_seconds", ()] == 0


def test_engines_are_told_by_model_standing_and_state_until_they_have_been_updated_and_after_that(
    service: RunningService, source: TinyModel
) -> None:
    push(service, source, 1)
    number = push(service, source, 2)
    with EngineClient(service.address) as engine:
        reporter = EngineReporter(engine, MODEL, kind="vllm", ref="latest", version=number - 1)
        with closing(reporter):
            behind = ("weighbridge_engines", (MODEL, "behind", "waiting"))
            eventually(lambda: behind in figures(service))
            before = figures(service)
            assert before[behind] == 1
            assert before["weighbridge_engine_behind_versions", (MODEL,)] == 1
            assert before["weighbridge_engine_behind_seconds", (MODEL,)] >= 0
            assert before["weighbridge_engine_silent_seconds", (MODEL,)] < 60
            reporter.say(
                version=number, state="serving", update_version=number, update_prepare_seconds=2.5, update_pause_seconds=0.5
            )  # fmt: skip
            current = ("weighbridge_engines", (MODEL, "current", "serving"))
            eventually(lambda: current in figures(service))
            after = figures(service)
        assert behind not in after
        assert after["weighbridge_engine_behind_versions", (MODEL,)] == 0
        assert after["weighbridge_engine_behind_seconds", (MODEL,)] == 0
        assert after["weighbridge_engine_update_seconds", (MODEL, "prepare")] == 2.5
        assert after["weighbridge_engine_update_seconds", (MODEL, "pause")] == 0.5


def test_proofs_are_counted_by_outcome_and_engines_by_their_last_verdict(
    service: RunningService, source: TinyModel
) -> None:
    number = push(service, source, 1)
    with EngineClient(service.address) as engine:
        reporter = EngineReporter(engine, MODEL, kind="vllm", ref="latest", version=number)
        with closing(reporter):
            unasked = ("weighbridge_engines_proved", (MODEL, "not asked"))
            eventually(lambda: unasked in figures(service))
            reporter.say(proved_version=number, proof="failed", proofs=1, failed_proofs=1, proof_error="rank 1 has different bytes in a", proof_seconds=0.5)  # fmt: skip
            eventually(lambda: figures(service)["weighbridge_engine_proofs_total", ("failed",)] == 1)
            assert unasked not in figures(service)
            assert figures(service)["weighbridge_engines_proved", (MODEL, "failed")] == 1
            reporter.say(proved_version=number, proof="proved", proofs=2, proof_seconds=0.25)
            eventually(lambda: figures(service)["weighbridge_engine_proofs_total", ("proved",)] == 1)
            after = figures(service)
            (seen,) = engine.engines(MODEL)
    assert after["weighbridge_engine_proofs_total", ("failed",)] == 1
    assert after["weighbridge_engine_proof_seconds", (MODEL,)] == 0.25
    assert after["weighbridge_engine_proof_age_seconds", (MODEL,)] < 60
    assert seen.proof_text == f"{number} proved in 250 ms, 1 of 2 have failed"
    assert (seen.proof_error, seen.failed_proofs) == ("rank 1 has different bytes in a", 1)
    assert seen.proof_time_ms > 0
