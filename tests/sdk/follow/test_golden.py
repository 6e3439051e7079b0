"""Are golden prompts kept with the version that they are of, asked of engines that get it, and is an engine that drifts
from them known?
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from starlette.testclient import TestClient
from transformers import PreTrainedModel

from tests.support.golden_engines import StandIn, Vllm, logprobs_of
from tests.support.reference import tiny_config, tiny_model
from tests.support.services import RunningService, running_service
from tests.support.signing import new_key
from tests.support.waiting import eventually
from tests.support.word_models import make_folder
from weighbridge import EngineClient, EngineReporter, GoldenPrompt, Signatures, Signer, TrainerClient, Trusted
from weighbridge._cli import commands
from weighbridge._core.engines.golden import PROMPTS, GoldenPrompts
from weighbridge.errors import FailedPrecondition, InvalidArgument, PermissionDenied
from weighbridge.follow.agent import Followed, Follower
from weighbridge.follow.engines import EngineFailed
from weighbridge.follow.golden import ABOVE, NO_BOUND, WITHIN, GoldenChecks, ask
from weighbridge.follow.sglang import SglangServer
from weighbridge.follow.vllm import VllmServer
from weighbridge.integrations.transformers.golden import golden_prompts, written_prompts
from weighbridge_service.api.http.app import create_app
from weighbridge_service.exports.jobs import Exports

MODEL = "tests/golden"
CONFIG = tiny_config("llama", tied=False, head_dim=8)
TOKENS = [[5, 17, 99, 3, 4, 77], [1, 2, 3]]
EXACT = 1e-4


def golden(model: PreTrainedModel) -> list[GoldenPrompt]:
    """By the model's loss, and not by the code under test."""
    return [GoldenPrompt(tuple(each), tuple(logprobs_of(model, each))) for each in TOKENS]


@dataclass
class Place:
    """A service with versions of two models' weights, and what transformers computes with each."""

    running: RunningService
    trainer: TrainerClient
    client: EngineClient
    models: dict[int, PreTrainedModel]
    folders: dict[int, Path]

    def push(self, seed: int, **options: object) -> int:
        pushed = self.trainer.push_folder(MODEL, self.folders[seed], **options)  # type: ignore[arg-type]
        return pushed.wait("durable", timeout=60).number


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, PreTrainedModel], dict[int, Path]]:
    root = tmp_path_factory.mktemp("golden")
    models = {seed: tiny_model(CONFIG, seed) for seed in (1, 2)}
    for seed, model in models.items():
        model.save_pretrained(root / str(seed))
    return models, {seed: root / str(seed) for seed in models}


@pytest.fixture
def place(tmp_path: Path, weights: tuple[dict[int, PreTrainedModel], dict[int, Path]]) -> Iterator[Place]:
    models, folders = weights
    with (
        running_service(tmp_path / "store", local_socket=str(tmp_path / "lane.sock")) as running,
        TrainerClient(running.address) as trainer,
        EngineClient(running.address) as client,
    ):
        trainer.register_model(MODEL, folders[1])
        yield Place(running, trainer, client, models, folders)


def command(place: Place, *arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(commands, [*arguments, "--server", place.running.address])
    assert done.exit_code == code, (done.output, done.exception)
    return done.output


def test_log_probabilities_that_are_computed_are_those_of_transformers_own_loss(place: Place) -> None:
    model = place.models[1]
    model.train()
    found = golden_prompts(model, TOKENS)
    assert model.training
    model.eval()
    for prompt, wanted in zip(found, golden(model), strict=True):
        assert prompt.logprobs == pytest.approx(wanted.logprobs, abs=2e-5)
    with pytest.raises(InvalidArgument, match="token 4000 is outside the vocabulary of 128"):
        golden_prompts(model, [[1, 4000]])


def test_golden_prompts_belong_to_one_version_at_every_replica(place: Place, tmp_path: Path) -> None:
    first = place.push(1, golden=golden(place.models[1]), max_drift=0.05, metadata={"reward": 0.5})
    second = place.push(2)
    metadata = place.client.version(MODEL, first).metadata
    assert GoldenPrompts.from_metadata(metadata) == GoldenPrompts(tuple(golden(place.models[1])), 0.05)
    assert metadata["reward"] == 0.5
    assert GoldenPrompts.from_metadata(place.client.version(MODEL, second).metadata) is None
    imported = place.trainer.import_folder(MODEL, place.folders[1], golden=golden(place.models[1]))
    third = imported.wait("durable", timeout=60).number
    with running_service(tmp_path / "store") as other, EngineClient(other.address) as client:
        assert client.version(MODEL, first).metadata == metadata
        assert GoldenPrompts.from_metadata(client.version(MODEL, third).metadata) == GoldenPrompts(
            tuple(golden(place.models[1]))
        )


def test_where_signatures_are_required_the_prompts_that_count_are_those_that_were_signed(
    place: Place, tmp_path: Path
) -> None:
    number = place.push(1, golden=golden(place.models[1]), max_drift=EXACT)
    keys = new_key(tmp_path)
    trusted = (Trusted.of_file(keys.public),)
    version = place.client.version(MODEL, number)
    forged = replace(version, metadata=GoldenPrompts(tuple(golden(place.models[2]))).metadata())
    with StandIn(place.models[1]).serving() as url:
        engine, checks = Vllm(url, MODEL), GoldenChecks()
        assert checks.check(place.client, engine, version, trusted).verdict == "not answered"
        Signatures(place.client).sign(MODEL, number, signer=Signer(keys.key))
        assert checks.check(place.client, engine, forged, trusted).verdict == WITHIN
        assert checks.check(place.client, engine, forged).verdict == NO_BOUND


def test_a_training_state_behind_weights_has_none(place: Place) -> None:
    model = tiny_model(CONFIG, 3)
    pushed = place.trainer.push_state_dict(MODEL, model, step=1, state={"epoch": 1}, golden=golden(model))
    pushed.wait(timeout=60)
    assert pushed.training is not None
    pushed.training.wait(timeout=60)
    assert PROMPTS in place.client.version(MODEL, pushed.number).metadata
    assert PROMPTS not in place.client.version(f"{MODEL}:training", pushed.training.number).metadata


@pytest.mark.parametrize(
    ("tokens", "logprobs", "message"),
    [
        ((1,), (), "has 1 token"),
        ((1, 2, 3), (-1.0,), "of 3 tokens has 1 log probability"),
        ((1, -2), (-1.0,), "token 1 of a golden prompt is -2"),
        ((1, 2), (float("nan"),), "token 1 of a golden prompt is nan"),
        ((1, 2), (-float("inf"),), "is -inf"),
        ((1, 2), (-(10**400),), "token 1 of a golden prompt is -1000"),
        ((10**400, 2), (-1.0,), "token 0 of a golden prompt is 1000"),
        ((1, 2), (0.7,), "above 0"),
        ((1, 2), (torch.tensor(-1.0),), "token 1 of a golden prompt is tensor"),
    ],
)
def test_what_is_no_golden_prompt_is_refused_by_name(
    tokens: tuple[int, ...], logprobs: tuple[float, ...], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        GoldenPrompt(tokens, logprobs)


def test_what_metadata_has_no_room_for_is_refused_before_anything_is_pushed(place: Place) -> None:
    long = GoldenPrompt(tuple(range(100)) * 2, (-1.23456,) * 199)
    for given, message in (
        ([long] * 3, "600 tokens.*4096"),
        ([long] * 17, "17 golden prompts"),
        ([(1, 2)], "is a tuple"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            place.push(1, golden=given)
    with pytest.raises(InvalidArgument, match="max_drift applies only"):
        place.push(1, max_drift=0.1)
    with pytest.raises(InvalidArgument, match=PROMPTS):
        place.push(1, metadata={PROMPTS: "[[1, 2]]"})
    assert place.client.versions(MODEL) == []


@pytest.mark.parametrize(
    "text",
    ["[[[1,2],[-1" + "0" * 400 + "]]]", "[[[1,2],[NaN]]]", "[" * 4000, '{"a": 1}', "[[[1,2,3],[-1]]]", "7"],
    ids=["huge", "nan", "nested", "object", "few", "number"],
)
def test_metadata_of_any_client_that_is_no_golden_prompt_ends_no_agent_and_no_page(
    place: Place, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    with monkeypatch.context() as patched:  # as a client of another kind, which checks nothing
        patched.setattr(GoldenPrompts, "from_metadata", lambda _metadata: None)
        number = place.push(1, metadata={PROMPTS: text})
    engine = Vllm("http://127.0.0.1:1", MODEL)
    done = next(follow(place, engine, GoldenChecks()))
    assert (done.version, done.error, done.golden) == (number, "", "not answered")
    service = place.running.service
    http = TestClient(create_app(service, Exports(service), place.running.metrics, place.running.health))
    for page in (f"/models/{MODEL}", f"/models/{MODEL}/versions/{number}"):
        assert http.get(page).status_code == 200
    assert str(number) in command(place, "versions", MODEL)


def test_options_of_many_pushes_take_none(tmp_path: Path) -> None:
    from weighbridge.integrations.transformers.trainer_callback import PushCallback

    with pytest.raises(InvalidArgument, match="golden is for one version"):
        PushCallback(MODEL, "127.0.0.1:1", golden=[GoldenPrompt((1, 2), (-1.0,))])


def engine_of(kind: str, url: str) -> VllmServer | SglangServer:
    return VllmServer(url, MODEL, "service:1") if kind == "vllm" else SglangServer(url, "service:1", MODEL)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("fault", ["none", "other weights", "scales", "swapped", "stale cache"])
def test_an_engine_that_computes_with_anything_else_is_above_a_bound_that_a_right_one_keeps(
    kind: str, fault: str, weights: tuple[dict[int, PreTrainedModel], dict[int, Path]]
) -> None:
    wanted = GoldenPrompts(tuple(golden(weights[0][1])), EXACT)
    model = tiny_model(CONFIG, 2 if fault == "other weights" else 1)
    layer = model.model.layers[1].mlp
    with torch.no_grad():
        if fault == "scales":
            layer.down_proj.weight.mul_(1.05)
        elif fault == "swapped":
            gate, up = layer.gate_proj.weight.clone(), layer.up_proj.weight.clone()
            layer.gate_proj.weight.copy_(up)
            layer.up_proj.weight.copy_(gate)
    stale = weights[0][2] if fault == "stale cache" else None
    with StandIn(model, stale).serving() as url:
        drift = ask(engine_of(kind, url), MODEL, 1, wanted)
    assert drift.verdict == (WITHIN if fault == "none" else ABOVE)
    if fault == "none":
        assert drift.largest < EXACT
        assert drift.wrong_text == ""
    elif fault == "stale cache":
        assert max(each.largest for each in drift.prompts) < EXACT
        assert "prompt 0 (" in drift.wrong_text
        assert "with cached prefixes" in drift.wrong_text


def follow(
    place: Place,
    engine: Vllm,
    checks: GoldenChecks,
    reporter: EngineReporter | None = None,
    ref: str = "latest",
) -> Iterator[Followed]:
    return Follower(
        place.client,
        MODEL,
        engine,
        ref,
        retry_seconds=0.01,
        look_seconds=0.02,
        golden=checks,
        reporter=reporter,
    ).run()


def test_an_agent_asks_after_each_update_and_says_what_came_of_it_to_all(place: Place) -> None:
    engine = StandIn(place.models[1])

    def change(number: int) -> None:
        engine.model = place.models[2]

    with (
        engine.serving() as url,
        closing(EngineReporter(place.client, MODEL, kind="vllm", ref="latest")) as reporter,
    ):
        driver = Vllm(url, MODEL, change)
        driver.has = place.push(1, golden=golden(place.models[1]), max_drift=EXACT)
        updates = follow(place, driver, GoldenChecks(), reporter)
        done = next(updates)
        assert (done.error, done.golden) == ("", WITHIN)
        assert done.drift is not None
        assert done.drift < EXACT

        second = place.push(2, golden=golden(place.models[2]))
        done = next(updates)
        assert (done.version, done.error, done.golden) == (second, "", NO_BOUND)
        eventually(lambda: place.client.engines(MODEL)[0].golden_version == second)
        [seen] = place.client.engines(MODEL)
        assert seen.golden == NO_BOUND
        assert seen.golden_drift == pytest.approx(done.drift)
        assert f"{second} no bound (drift" in command(place, "engines", MODEL)
        service = place.running.service
        http = TestClient(create_app(service, Exports(service), place.running.metrics, place.running.health))
        assert f"golden prompts of {seen.golden_text}" in http.get(f"/models/{MODEL}").text
        assert "2 prompts of 9 tokens" in http.get(f"/models/{MODEL}/versions/{second}").text
        [told] = http.get(f"/v1/models/{MODEL}/engines").json()["engines"]
        assert (told["golden"], told["golden_version"]) == (NO_BOUND, second)
        assert 0 < told["golden_mean_drift"] <= told["golden_drift"] == seen.golden_drift
        assert ("weighbridge_engine_golden_drift", MODEL) in {
            (sample.name, sample.labels.get("model"))
            for metric in place.running.metrics.collect()
            for sample in metric.samples
        }

        third = place.push(2)
        done = next(updates)
        assert (done.version, done.error, done.golden, done.drift) == (third, "", "", None)
        eventually(lambda: place.client.engines(MODEL)[0].golden == "")
        assert place.client.engines(MODEL)[0].golden_text == "", "never passed what it was not asked"


def test_an_engine_above_the_bound_is_failing_names_the_prompts_and_is_brought_the_version_again(
    place: Place,
) -> None:
    number = place.push(1, golden=golden(place.models[1]), max_drift=EXACT)
    engine = StandIn(place.models[2])
    with (
        engine.serving() as url,
        closing(EngineReporter(place.client, MODEL, kind="vllm", ref="latest")) as reporter,
    ):
        driver = Vllm(url, MODEL)
        updates = follow(place, driver, GoldenChecks(), reporter)
        done = next(updates)
        assert done.golden == ABOVE
        assert done.error.startswith(f"golden prompts of version {number} are above the bound of 0.0001: prompt 0 (")
        eventually(lambda: place.client.engines(MODEL)[0].state == "failing")
        assert place.client.engines(MODEL)[0].error == done.error
        engine.model = place.models[1]
        done = next(updates)
        assert (done.error, done.golden) == ("", WITHIN)
        assert driver.applied == [number, number]


def test_the_bound_of_the_agent_counts_instead_of_the_versions(place: Place) -> None:
    place.push(1, golden=golden(place.models[1]), max_drift=EXACT)
    with StandIn(place.models[2]).serving() as url:
        done = next(follow(place, Vllm(url, MODEL), GoldenChecks(max_drift=100.0)))
        assert (done.error, done.golden) == ("", WITHIN)
        done = next(follow(place, Vllm(url, MODEL), GoldenChecks(asks=False)))
        assert (done.error, done.golden, done.drift) == ("", "", None)


def test_an_engine_that_sleeps_is_asked_when_it_is_awake_and_has_not_passed_before(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    place.push(1, golden=golden(place.models[1]), max_drift=EXACT, candidate=True)
    place.client.set_ref(MODEL, "canary", 1)
    engine = StandIn(place.models[1], asleep=True)
    with engine.serving() as url:
        updates = follow(place, Vllm(url, MODEL), GoldenChecks(approves=True), ref="canary")
        done = next(updates)
        assert (done.error, done.golden, done.drift) == ("", "not answered", None)
        assert "the engine sleeps" in caplog.text
        assert place.client.version(MODEL, 1).held == ("candidate",)
        engine.asleep = False
        done = next(updates)
        assert (done.error, done.golden) == ("", WITHIN)
        assert place.client.version(MODEL, 1).held == ()
    assert caplog.text.count("the engine sleeps") == 1


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_an_engine_that_sleeps_is_sent_no_prompt(
    weights: tuple[dict[int, PreTrainedModel], dict[int, Path]], kind: str
) -> None:
    engine = StandIn(weights[0][1], asleep=True)
    with engine.serving() as url:
        with pytest.raises(FailedPrecondition, match="the engine sleeps"):
            engine_of(kind, url).answer([1, 2])
        assert not {"/generate", "/v1/completions"} & {path for path, _ in engine.asked}
        engine.asleep = False
        assert engine_of(kind, url).answer([1, 2])


def test_an_engine_that_is_paused_is_sent_no_prompt_that_would_wait_until_it_goes_on(
    weights: tuple[dict[int, PreTrainedModel], dict[int, Path]],
) -> None:
    engine = StandIn(weights[0][1], paused=True)
    with engine.serving() as url:
        with pytest.raises(FailedPrecondition, match="the engine is paused"):
            engine_of("vllm", url).answer([1, 2])
        assert "/v1/completions" not in {path for path, _ in engine.asked}
        engine.paused = False
        assert engine_of("vllm", url).answer([1, 2])


def test_a_version_that_a_wake_up_has_brought_again_is_asked_again(place: Place) -> None:
    number = place.push(1, golden=golden(place.models[1]), max_drift=EXACT)
    engine = StandIn(place.models[1])
    with engine.serving() as url:
        driver = Vllm(url, MODEL)
        updates = follow(place, driver, GoldenChecks())
        assert next(updates).golden == WITHIN
        engine.asked.clear()
        driver.brought += 1  # as a rank says it behind a wake-up from level 2
        done = next(updates)
        assert (done.version, done.serves, done.golden, done.nbytes) == (number, number, WITHIN, 0)
        assert "/v1/completions" in {path for path, _ in engine.asked}
        assert driver.applied == [number]


def test_a_version_that_waits_for_the_wake_up_is_asked_behind_it(place: Place) -> None:
    number = place.push(1, golden=golden(place.models[1]), max_drift=EXACT)
    engine = StandIn(place.models[1], asleep=True)
    with engine.serving() as url:
        driver = Vllm(url, MODEL)

        def sleeps_on(version: int) -> None:
            driver.has, driver.waiting = None, version

        driver._change = sleeps_on
        updates = follow(place, driver, GoldenChecks())
        done = next(updates)
        assert (done.waits, done.error, done.golden) == (True, "", "")
        assert engine.asked == []
        engine.asleep, driver.has, driver.waiting = False, number, None
        done = next(updates)
        assert (done.version, done.serves, done.golden) == (number, number, WITHIN)


@pytest.mark.parametrize("right", [True, False])
def test_a_candidate_reaches_live_by_a_canary_alone_that_keeps_the_bound(place: Place, right: bool) -> None:
    live = place.push(1)
    number = place.push(2, golden=golden(place.models[2]), candidate=True)
    place.client.set_ref(MODEL, "canary", number)
    with StandIn(place.models[2 if right else 1]).serving() as url:
        updates = follow(place, Vllm(url, MODEL), GoldenChecks(max_drift=EXACT, approves=True), ref="canary")
        done = next(updates)
    version = place.client.version(MODEL, number)
    assert place.client.version(MODEL, "live").number == (number if right else live)
    if right:
        assert version.approved_note.startswith("golden prompts: drift ")
    else:
        assert "above the bound" in done.error
        assert version.held == ("candidate",)


def test_without_a_bound_or_with_elements_that_are_not_finite_nothing_is_approved(place: Place, tmp_path: Path) -> None:
    first = place.push(1, golden=golden(place.models[1]), candidate=True)
    broken = tiny_model(CONFIG, 1)
    with torch.no_grad():
        broken.lm_head.weight[127, 0] = float("inf")
    broken.save_pretrained(tmp_path / "broken")
    place.folders = {**place.folders, 9: tmp_path / "broken"}
    second = place.push(9, golden=golden(place.models[1]), candidate=True, max_drift=EXACT)
    with StandIn(place.models[1]).serving() as url:
        for number in (first, second):
            place.client.set_ref(MODEL, "canary", number)
            next(follow(place, Vllm(url, MODEL), GoldenChecks(approves=True), ref="canary"))
            assert "candidate" in place.client.version(MODEL, number).held


def test_a_candidate_that_is_held_for_more_by_now_is_not_approved(place: Place) -> None:
    number = place.push(1, golden=golden(place.models[1]), candidate=True, max_drift=EXACT)
    then = place.client.version(MODEL, number)
    with pytest.MonkeyPatch.context() as patched, StandIn(place.models[1]).serving() as url:
        checks, engine = GoldenChecks(approves=True), Vllm(url, MODEL)
        now = replace(then, held=("candidate", "nonfinite"))
        patched.setattr(place.client, "version", lambda *_: now)
        assert checks.check(place.client, engine, then).verdict == WITHIN
        patched.undo()
        assert place.client.version(MODEL, number).held == ("candidate",)
        checks.check(place.client, engine, then)
    assert place.client.version(MODEL, number).held == ()


def test_an_agent_that_may_not_approve_says_so_and_goes_on(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionDenied("canary may not approve", fix="let its policy have approve:tests/golden")

    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(place.client, "approve", refuse)
    number = place.push(1, golden=golden(place.models[1]), candidate=True, max_drift=EXACT)
    place.client.set_ref(MODEL, "canary", number)
    with StandIn(place.models[1]).serving() as url:
        done = next(follow(place, Vllm(url, MODEL), GoldenChecks(approves=True), ref="canary"))
    assert (done.error, done.golden) == ("", WITHIN)
    assert f"version {number} was not approved: canary may not approve" in caplog.text


def test_the_command_makes_them_pushes_take_them_and_engines_are_asked(place: Place, tmp_path: Path) -> None:
    plain = place.push(1)
    out = command(place, "golden", f"{MODEL}@{plain}", code=1)
    assert "has no golden prompts" in out
    file = tmp_path / "golden.json"
    command(
        place,
        "golden",
        f"{MODEL}@{plain}",
        "--make",
        "2",
        "--tokens",
        "9",
        "--out",
        str(file),
        "--max-drift",
        "0.01",
    )
    made = GoldenPrompts.read(file)
    assert [len(each.tokens) for each in made.prompts] == [9, 9]
    for each in made.prompts:
        wanted = logprobs_of(place.models[1], list(each.tokens))
        assert each.logprobs == pytest.approx(wanted, abs=2e-5)
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(TOKENS))
    said = json.loads(command(place, "golden", f"{MODEL}@{plain}", "--prompts", str(ids), "--json"))
    assert [each["tokens"] for each in said["prompts"]] == TOKENS
    command(place, "push", str(place.folders[1]), MODEL, "--step", "2", "--golden", str(file))
    said = json.loads(command(place, "golden", f"{MODEL}@{plain + 1}", "--json"))
    assert said == made.to_json()
    assert "2 prompts of 18 tokens" in command(place, "show", f"{MODEL}@{plain + 1}")
    with StandIn(place.models[1]).serving() as url:
        out = command(place, "golden", f"{MODEL}@{plain + 1}", "--url", url)
        assert "within bound of 0.01" in out
        asked = [
            "golden",
            f"{MODEL}@{plain}",
            "--from",
            str(file),
            "--url",
            url,
            "--engine",
            "sglang",
            "--json",
        ]
        assert json.loads(command(place, *asked))["drift"] < EXACT
    with StandIn(place.models[2]).serving() as url:
        said = json.loads(command(place, "golden", f"{MODEL}@{plain + 1}", "--url", url, "--json", code=1))
        assert said["verdict"] == ABOVE
        assert said["drift"] > 0.01
        assert len(said["prompts"]) == 2


def test_the_command_refuses_an_engine_that_says_that_it_serves_another_version(place: Place) -> None:
    """Near weights may keep the bound: an update that failed must not pass for one."""
    number = place.push(1, golden=golden(place.models[1]), max_drift=EXACT)
    engine = StandIn(place.models[1])
    with engine.serving() as url:
        asked = ["golden", f"{MODEL}@{number}", "--url", url]
        for served, code, text in (
            (f"{MODEL}@{number}", 0, "within bound"),
            ("", 0, "within bound"),
            (f"{MODEL}@{number + 1}", 1, f"the engine serves version {number + 1}, not {number}"),
            ("acme/other@3", 1, f"the engine serves acme/other, not {MODEL}"),
        ):
            engine.served = served
            assert text in command(place, *asked, code=code)
        engine.served = None
        said = command(place, *asked)
    assert "within bound" in said
    assert "does not report which version it serves" in said


def test_texts_become_prompts_by_the_versions_own_tokenizer(place: Place, tmp_path: Path) -> None:
    make_folder(tmp_path / "words", 1)
    place.trainer.import_folder("tests/words", tmp_path / "words").wait("durable", timeout=60)
    texts = tmp_path / "texts.txt"
    texts.write_text("w5 w17 w99\n\nw1 w2\n")
    said = json.loads(command(place, "golden", "tests/words", "--prompts", str(texts), "--json"))
    assert [each["tokens"] for each in said["prompts"]] == [[5, 17, 99], [1, 2]]


def test_without_transformers_the_command_says_what_to_install(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.push(1)
    monkeypatch.setitem(sys.modules, "transformers", None)
    said = command(place, "golden", MODEL, "--make", "1", code=1)
    assert "pip install 'weighbridge[transformers]'" in said


def test_prompts_that_a_model_writes_are_the_same_again_and_of_its_vocabulary() -> None:
    model = tiny_model(CONFIG, 1)
    first = written_prompts(model, 3, 12, seed=5)
    assert first == written_prompts(model, 3, 12, seed=5)
    assert [len(each) for each in first] == [12] * 3
    assert all(0 <= token < CONFIG.vocab_size for each in first for token in each)


def test_an_engine_is_asked_with_its_key(
    weights: tuple[dict[int, PreTrainedModel], dict[int, Path]],
) -> None:
    with StandIn(weights[0][1], key="s3cret").serving() as url:
        with pytest.raises(EngineFailed, match="Unauthorized"):
            VllmServer(url, MODEL, "service:1").answer([1, 2])
        VllmServer(url, MODEL, "service:1", api_key="s3cret").answer([1, 2])


def test_an_agent_cannot_approve_by_prompts_that_it_does_not_ask() -> None:
    with pytest.raises(InvalidArgument, match="not to be sent any"):
        GoldenChecks(asks=False, approves=True)
    with pytest.raises(InvalidArgument, match="bound of drift is -1"):
        GoldenChecks(max_drift=-1.0)
