"""Does a live vLLM keep the bound of golden prompts with every right update, and is each fault above it that leaves the
bytes of a version right?

What is right, transformers' own loss says. Also of two engines behind one server.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from tests.support.golden_engines import logprobs_of
from tests.support.rounds import rounds
from tests.support.services import RunningService, running_service
from tests.support.vllm_environment import PYTHON, environment, needs_vllm
from tests.support.word_models import make_folder
from weighbridge import EngineClient, GoldenPrompt, TrainerClient
from weighbridge._core.engines.golden import GoldenPrompts
from weighbridge.follow.agent import Follower
from weighbridge.follow.golden import ABOVE, WITHIN, Drift, GoldenChecks, ask
from weighbridge.follow.vllm import VllmServer as Driver
from weighbridge_demo.vllm_server import EAGER, VllmServer

pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.timeout(1200)]

MODEL = "tests/golden"
BOUND = 1e-4
KEY = "s3cret"
BLOCK = "32"
"""Smallest block of vLLM's cache of prefixes on a CPU."""
TOKENS = [[number * 37 % 128 for number in range(start, start + 40)] for start in (1, 50)]
"""Longer than a block."""


@dataclass
class Place:
    """A service with two versions, and what is to start a vLLM that serves one.

    Attributes:
        golden: prompts of each version.
    """

    running: RunningService
    client: EngineClient
    golden: dict[int, GoldenPrompts]
    logs: Path

    @contextmanager
    def server(self, *arguments: str) -> Iterator[VllmServer]:
        """A vLLM with version 1."""
        with VllmServer(
            PYTHON, self.running.address, MODEL, self.logs / "vllm.log", *EAGER, "--block-size", BLOCK, "--api-key", KEY,
            "--worker-extension-cls", "tests.support.golden_worker.FaultyWorker", *arguments,
            extra={"version": 1}, environment={**environment(), "WEIGHBRIDGE_CACHE": str(self.logs / "cache")},
        ) as server:  # fmt: skip
            server.wait_ready(1000.0)
            yield server

    def driver(self, server: VllmServer) -> Driver:
        return Driver(server.url, MODEL, self.running.address, api_key=KEY)

    def drift(self, driver: Driver, number: int) -> Drift:
        return ask(driver, MODEL, number, self.golden[number], BOUND)

    def take_to(self, driver: Driver, number: int) -> None:
        assert Follower(self.client, MODEL, driver).take_to(number).error == ""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("golden")
    with ExitStack() as stack:
        running = stack.enter_context(running_service(root / "store"))
        trainer = stack.enter_context(TrainerClient(running.address))
        client = stack.enter_context(EngineClient(running.address))
        found = {}
        for seed in (1, 2):
            model = make_folder(root / str(seed), seed)
            if seed == 1:
                trainer.register_model(MODEL, root / "1")
            prompts = golden(model)
            pushed = trainer.push_folder(MODEL, root / str(seed), step=seed, golden=prompts, max_drift=BOUND)
            found[pushed.wait("durable", timeout=60).number] = GoldenPrompts(tuple(prompts), BOUND)
        yield Place(running, client, found, root)


def golden(model: PreTrainedModel) -> list[GoldenPrompt]:
    return [GoldenPrompt(tuple(each), tuple(logprobs_of(model, each))) for each in TOKENS]


def call(server: VllmServer, method: str, *arguments: str) -> Any:
    body = json.dumps({"method": method, "args": arguments}).encode()
    request = urllib.request.Request(server.url + "/collective_rpc", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def test_right_updates_keep_the_bound_and_faults_that_leave_the_bytes_right_do_not(place: Place) -> None:
    with place.server() as server:
        driver = place.driver(server)
        driver.connect()
        exact = place.drift(driver, 1)
        assert exact.verdict == WITHIN
        assert place.drift(driver, 2).verdict == ABOVE
        for number in (2, 1, 2):
            place.take_to(driver, number)
            found = place.drift(driver, number)
            assert (found.verdict, found.wrong_text) == (WITHIN, "")

        # prefixes that version 2 has computed answer for version 1
        for _ in range(max(rounds("ENGINE_FAULTS") // 8, 1)):
            driver.prepare(1)
            call(server, "apply_behind_caches", "1")
            stale = place.drift(driver, 1)
            assert stale.verdict == ABOVE
            assert max(each.largest for each in stale.prompts) < BOUND
            assert "with cached prefixes" in stale.wrong_text
            place.take_to(driver, 2)
            assert place.drift(driver, 2).verdict == WITHIN

        call(server, "scale_norm", "1.05")
        scaled = place.drift(driver, 2)
        assert scaled.verdict == ABOVE
        place.take_to(driver, 1)
        assert place.drift(driver, 1).verdict == WITHIN

        call(server, "keep_packed")
        place.take_to(driver, 2)
        assert place.drift(driver, 2).verdict == WITHIN
        call(server, "put_back_packed")
        skipped = place.drift(driver, 2)
        assert skipped.verdict == ABOVE
        place.take_to(driver, 1)
        assert place.drift(driver, 1).verdict == WITHIN

        assert driver.serving().version == 1
        done = next(Follower(place.client, MODEL, driver, golden=GoldenChecks()).run())
        assert (done.version, done.error, done.golden) == (2, "", WITHIN)
        key = {**os.environ, "WEIGHBRIDGE_ENGINE_KEY": KEY}
        one, two = (
            subprocess.run(
                [
                    *(sys.executable, "-m", "weighbridge", "golden", f"{MODEL}@{number}", "--json"),
                    *("--server", place.running.address, "--url", server.url),
                ],
                capture_output=True,
                text=True,
                timeout=120,
                env=key,
            )
            for number in (1, 2)
        )
        assert (two.returncode, json.loads(two.stdout)["verdict"]) == (0, WITHIN)
        assert one.returncode == 1
        assert "the engine serves version 2, not 1" in one.stdout + one.stderr


def test_each_engine_behind_one_server_is_asked(place: Place) -> None:
    with place.server("--data-parallel-size", "2") as server:
        driver = place.driver(server)
        driver.connect()
        found = place.drift(driver, 1)
        assert found.verdict == WITHIN
        assert [(each.prompt, each.engine) for each in found.prompts] == [
            (at, f"engine {engine}") for at in range(2) for engine in range(2)
        ]
        with urllib.request.urlopen(server.url + "/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        done = re.compile(r'vllm:request_success_total\{engine="(\d)",finished_reason="length",.*\} (\S+)')
        counts = {match[1]: float(match[2]) for line in lines if (match := done.match(line))}
        assert counts == {"0": 4.0, "1": 4.0}
