"""Does a live SGLang server start from the service, follow it to other versions, and answer with the version that it
reports despite failures?

Its text is compared with that of transformers on the same files.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import random
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from tests.support.engine_faults import KEEP, NEXT, RESTORE, WRONG, install, order, told
from tests.support.golden_engines import logprobs_of
from tests.support.killable_service import KillableService
from tests.support.reference import tiny_config, tiny_model
from tests.support.rounds import first_seed, rounds
from tests.support.sglang_engines import HAS_PLUGINS, PYTHON, environment, needs_sglang, quiet_port, update
from weighbridge import EngineClient, GoldenPrompt, TrainerClient
from weighbridge._cli import commands
from weighbridge._core.engines.facts import FAILED, PROVED
from weighbridge._core.engines.golden import GoldenPrompts
from weighbridge.errors import FailedPrecondition, WeighbridgeError
from weighbridge.follow.engines import EngineFailed
from weighbridge.follow.golden import ABOVE, WITHIN, ask
from weighbridge.follow.proving import prove, prove_by_load
from weighbridge.follow.sglang import SglangServer

pytestmark = [needs_sglang, pytest.mark.slow, pytest.mark.timeout(900)]

MODEL, OTHER = "tests/live", "tests/other"
PROMPT = [5, 9, 30, 77, 101]
TOKENS = 12


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KillableService]:
    service = KillableService(tmp_path_factory.mktemp("store"))
    service.start()
    yield service
    service.kill()


@pytest.fixture(autouse=True)
def running(service: KillableService, texts: object) -> None:
    """Each test begins with a service that runs."""
    service.kill()
    service.start()


@pytest.fixture(scope="module")
def texts(service: KillableService, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[int]]:
    """The tokens that transformers generates, by version of the model."""
    found = {}
    with TrainerClient(service.address) as trainer:
        for seed in (1, 2, 3):
            model = tiny_model(tiny_config("qwen3", tied=False), seed)
            folder = tmp_path_factory.mktemp("model")
            model.save_pretrained(folder)
            if seed == 1:
                trainer.register_model(MODEL, folder)
            version = trainer.push_folder(MODEL, folder, step=seed).wait(timeout=60)
            said = model.generate(torch.tensor([PROMPT]), max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
            found[version.number] = said[0, len(PROMPT) :].tolist()
        folder = tmp_path_factory.mktemp("other")
        tiny_model(tiny_config("qwen3", tied=False, vocab_size=256), 4).save_pretrained(folder)
        trainer.register_model(OTHER, folder)
        trainer.push_folder(OTHER, folder).wait(timeout=60)
    assert len({tuple(text) for text in found.values()}) == 3
    return found


class Engine:
    """A live server, and its driver."""

    def __init__(self, url: str, service: str) -> None:
        self.url = url
        self.driver = self.of(service, MODEL)

    def of(self, service: str, model: str) -> SglangServer:
        return SglangServer(self.url, service, model, timeout=120)

    def says(self, adapter: str | None = None) -> tuple[list[int], str]:
        """The tokens that the engine generates from the prompt, with an adapter if named, and the version that it
        reports for them.
        """
        body = {
            "input_ids": PROMPT,
            "lora_path": adapter,
            "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True},
        }
        request = urllib.request.Request(
            f"{self.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            found: dict[str, Any] = json.load(response)
        return found["output_ids"], found["meta_info"]["weight_version"]


def first_version(service: KillableService, folder: Path) -> str:
    """The source from which a server starts: the service, or a folder with the same files if this release has no
    plug-ins.
    """
    if HAS_PLUGINS:
        return f"weighbridge://{service.address}/{MODEL}@1"
    tiny_model(tiny_config("qwen3", tied=False), 1).save_pretrained(folder)
    return str(folder)


def with_faults(variables: dict[str, str], folder: Path) -> dict[str, str]:
    """Variables of a server that faults can be put into."""
    return {**variables, "PYTHONPATH": f"{install(folder / 'plugin')}:{variables['PYTHONPATH']}"}


@contextmanager
def live(service: KillableService, tp: int, log: Path, *options: str) -> Iterator[Engine]:
    port = quiet_port()
    with log.open("w") as file:
        process = subprocess.Popen(
            [
                *(Path(PYTHON).with_name("sglang"), "serve", "--port", str(port), "--tp-size", str(tp)),
                *(
                    "--model-path",
                    first_version(service, log.with_name("first")),
                    "--served-model-name",
                    MODEL,
                ),
                *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
                # SGLang counts as its own what other processes take of the memory while it loads; the tokens bound what
                # it takes itself
                *("--mem-fraction-static", "0.5", "--max-total-tokens", "2048", "--disable-overlap-schedule"),
                *("--skip-tokenizer-init", "--skip-server-warmup"),
                *options,
            ],
            env=with_faults(environment(tp, log.parent), log.parent),
            cwd=log.parent,  # in a checkout, Python could import a build folder as the package
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 600
        while True:
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"{url}/model_info", timeout=5).close()
                break
            except OSError:
                time.sleep(0.5)
        yield Engine(url, service.address)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def engine(
    request: pytest.FixtureRequest,
    service: KillableService,
    texts: object,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Engine]:
    with live(service, request.param, tmp_path_factory.mktemp("engine") / "log") as started:
        if not HAS_PLUGINS:
            update(started.driver, 1)
        yield started


@pytest.mark.skipif(not HAS_PLUGINS, reason="faults come by a plug-in")
def test_a_server_is_proved_and_each_fault_in_it_is_found_and_named(engine: Engine, service: KillableService) -> None:
    kinds, chance = ("flip", "swap_rows", "stale", "skip", "half", "record"), random.Random(first_seed())
    ask, names, served = engine.driver.evidence, [*engine.driver.evidence()], 1
    update(engine.driver, served)
    with EngineClient(service.address) as client:
        for number in range(rounds("ENGINE_FAULTS")):
            kind, at = kinds[number % len(kinds)], chance.randrange(len(names))
            seed = chance.randrange(1 << 30)
            told(ask, order(KEEP))
            if kind in ("stale", *NEXT):
                served = 3 - served
            wrong = told(ask, order(kind, rank=at, seed=seed)) if kind in NEXT else {}
            if kind in ("stale", *NEXT):
                update(engine.driver, served)
            if kind == "record":
                assert prove(client, ask, MODEL, served).verdict == PROVED, "by the same record"
                proof = prove_by_load(engine.driver, MODEL, served)
            else:
                name = "lm_head.weight" if kind == "stale" else ""
                said = order(WRONG) if kind in NEXT else order(kind, rank=at, seed=seed, name=name)
                wrong = told(ask, said)
                proof = prove(client, ask, MODEL, served)
            assert {each for each, found in wrong.items() if found} == {names[at]}, kind
            assert {each: sorted(rank.wrong) for each, rank in proof.ranks.items()} == wrong
            assert proof.verdict == FAILED
            told(ask, order(RESTORE))
            if kind in NEXT:
                update(engine.driver, served)
            clean = prove(client, ask, MODEL, served)
            assert (clean.verdict, [*clean.ranks]) == (PROVED, names)
        proof = prove_by_load(engine.driver, MODEL, served)
        assert (proof.verdict, proof.wrong_text) == (PROVED, "")
        line = ["prove", MODEL, "--url", engine.url, "--server", service.address, "--json"]
        found = json.loads(CliRunner().invoke(commands, line).stdout)
        assert (found["verdict"], found["version"], [*found["ranks"]]) == (PROVED, served, names)


@pytest.mark.skipif(not HAS_PLUGINS, reason="this release calls no plug-in before it reads a model's configuration")
def test_a_server_starts_from_the_service_and_says_what_transformers_says(
    engine: Engine, texts: dict[int, list[int]]
) -> None:
    assert engine.says()[0] == texts[1]
    assert engine.driver.serving().version == 1


def test_after_an_update_it_says_what_transformers_says_on_the_new_weights(
    engine: Engine, texts: dict[int, list[int]]
) -> None:
    for version in (2, 1, 3, 1):
        update(engine.driver, version)
        assert engine.says() == (texts[version], f"{MODEL}@{version}")
        assert engine.driver.serving().version == version


def test_golden_prompts_keep_the_bound_after_each_update_and_another_version_or_prefixes_of_it_do_not(
    engine: Engine, service: KillableService
) -> None:
    tokens = [[number * 37 % 128 for number in range(start, start + 20)] for start in (1, 50)]
    golden = {}
    for seed in (1, 2):
        model = tiny_model(tiny_config("qwen3", tied=False), seed)
        prompts = (GoldenPrompt(tuple(each), tuple(logprobs_of(model, each))) for each in tokens)
        golden[seed] = GoldenPrompts(tuple(prompts), 1e-3)
    for version in (2, 1, 2):
        update(engine.driver, version)
        found = ask(engine.driver, MODEL, version, golden[version])
        assert (found.verdict, found.wrong_text) == (WITHIN, "")
        assert ask(engine.driver, MODEL, 3 - version, golden[3 - version]).verdict == ABOVE
    # lets requests go on with what old weights have computed, and so leaves the cache of prefixes as it is
    keeping = SglangServer(engine.url, service.address, MODEL, timeout=120, pause_mode="in_place")
    update(keeping, 1)
    stale = ask(keeping, MODEL, 1, golden[1])
    assert stale.verdict == ABOVE
    assert max(each.largest for each in stale.prompts) < 1e-3
    assert "with cached prefixes" in stale.wrong_text
    update(engine.driver, 2)


def test_requests_under_way_wait_out_an_update_and_are_answered(engine: Engine, texts: dict[int, list[int]]) -> None:
    update(engine.driver, 1)
    answers: list[tuple[list[int], str]] = []
    askers = [threading.Thread(target=lambda: answers.append(engine.says())) for _ in range(4)]
    for asker in askers:
        asker.start()
    update(engine.driver, 2)
    for asker in askers:
        asker.join()
    assert len(answers) == 4
    assert engine.says() == (texts[2], f"{MODEL}@2")


def test_bytes_that_are_prepared_need_no_service(
    engine: Engine, service: KillableService, texts: dict[int, list[int]]
) -> None:
    update(engine.driver, 1)
    engine.driver.prepare(2)
    assert engine.says() == (texts[1], f"{MODEL}@1")
    service.kill()
    engine.driver.pause()
    engine.driver.apply(2, f"{MODEL}@2")
    engine.driver.resume()
    assert engine.says() == (texts[2], f"{MODEL}@2")


def test_a_service_that_dies_leaves_the_engine_the_version_it_has(
    engine: Engine, service: KillableService, texts: dict[int, list[int]]
) -> None:
    update(engine.driver, 1)
    service.kill()
    engine.driver.pause()
    with pytest.raises(EngineFailed, match="the engine keeps version 1"):
        engine.driver.apply(2, f"{MODEL}@2")
    engine.driver.resume()
    assert engine.says() == (texts[1], f"{MODEL}@1")
    assert engine.driver.serving().version == 1


def test_a_version_that_is_gone_leaves_the_engine_the_version_it_has(
    engine: Engine, texts: dict[int, list[int]]
) -> None:
    update(engine.driver, 1)
    with pytest.raises(FailedPrecondition, match="version 99 could not be prepared"):
        update(engine.driver, 99)
    with pytest.raises(EngineFailed, match="the engine keeps version 1"):
        engine.driver.apply(99, f"{MODEL}@99")
    assert engine.says() == (texts[1], f"{MODEL}@1")
    assert engine.driver.serving().version == 1


def test_a_version_of_a_model_that_does_not_fit_is_refused(
    engine: Engine, service: KillableService, texts: dict[int, list[int]]
) -> None:
    update(engine.driver, 1)
    other = engine.of(service.address, OTHER)
    with pytest.raises(EngineFailed, match="vocab_size is 256, and 128 in the engine"):
        update(other, 1)
    with pytest.raises(EngineFailed, match="vocab_size is 256, and 128 in the engine"):
        other.apply(1, f"{MODEL}@1")
    assert engine.says() == (texts[1], f"{MODEL}@1")
    assert engine.driver.serving().version == 1
    assert other.serving().version is None


def test_of_two_updates_at_once_none_leaves_the_engine_in_between(engine: Engine, texts: dict[int, list[int]]) -> None:
    errors: list[WeighbridgeError] = []

    def one(version: int) -> None:
        try:
            update(engine.of(engine.driver._wanted.server, MODEL), version)
        except WeighbridgeError as error:
            errors.append(error)

    updates = [threading.Thread(target=one, args=(version,)) for version in (2, 3)]
    for thread in updates:
        thread.start()
    for thread in updates:
        thread.join()
    served = engine.driver.serving().version
    assert served in (2, 3) if len(errors) < 2 else served is not None
    assert engine.says() == (texts[served or 0], f"{MODEL}@{served}")
    update(engine.driver, 1)
    assert engine.says() == (texts[1], f"{MODEL}@1")


def test_a_request_that_says_nothing_is_refused_and_does_not_end_the_engine(engine: Engine) -> None:
    update(engine.driver, 1)
    for named_tensors in ([], [("no order", torch.empty(0))]):
        payload = base64.b64encode(pickle.dumps(named_tensors)).decode()
        request = {**engine.driver._request(1), "serialized_named_tensors": [payload] * 2}
        with engine.driver._session(), pytest.raises(EngineFailed, match="wanted"):
            engine.driver.api.call("/update_weights_from_tensor", request)
    assert engine.says()[1] == f"{MODEL}@1"
