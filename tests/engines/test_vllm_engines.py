"""Does every engine of a live data-parallel vLLM server answer with the version that it reports, whichever engine loses
the service?

Servers of two and of three engines, each of which reaches the service through a gate that can be closed for it alone.
Fifty versions come, by the agent and by vLLM's own calls, while the way of one engine is cut at random; clients ask all
the time.
"""

from __future__ import annotations

import json
import random
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.process_gate import ProcessGate, processes_below
from tests.support.rounds import first_seed
from tests.support.services import running_service
from tests.support.vllm_environment import PYTHON, environment, needs_vllm
from tests.support.waiting import eventually
from tests.support.word_models import PROMPT, TOKENS, make_folder, said_by_transformers
from weighbridge import EngineClient, TrainerClient
from weighbridge.follow import vllm as vllm_driver
from weighbridge.follow.agent import Follower
from weighbridge_demo.vllm_server import EAGER, VllmServer

pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.timeout(3600)]

MODEL = "tests/parallel"
UPDATES = 50
FOLDERS = 7
RETRY_SECONDS = 1.0
START_SECONDS = 1500.0
"""Up to seven processes import vLLM, two or more at a time."""


@dataclass
class Asker:
    """A client that sends requests to one engine in a loop, and records each answer with the server's labels before and
    after it.

    Attributes:
        seen: text, and the two labels, of each.
    """

    place: Place
    engine: int
    seen: list[tuple[str, str, str]] = field(default_factory=list)

    def run(self, ended: threading.Event) -> None:
        while not ended.wait(0.05):
            before, text, after = self.place.label(), self.place.text(self.engine), self.place.label()
            if before and after:
                self.seen.append((text, before, after))


@dataclass
class Place:
    """A service with some versions, and a vLLM of several engines that serves the first.

    Attributes:
        texts: completions of the prompt by transformers, by version.
    """

    server: VllmServer
    engine: vllm_driver.VllmServer
    gate: ProcessGate
    client: EngineClient
    trainer: TrainerClient
    folders: list[tuple[Path, str]]
    texts: dict[int, str]
    pids: list[int]

    def push(self) -> int:
        """Push a version whose completion differs from those of the six versions before it."""
        folder, text = self.folders[len(self.texts) % FOLDERS]
        number = self.trainer.push_folder(MODEL, folder, step=len(self.texts)).wait("durable", timeout=120).number
        self.texts[number] = text
        return number

    def ask(self, path: str, body: Any = None, **headers: str) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.server.url + path, data, {"Content-Type": "application/json", **headers})
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)

    def text(self, engine: int) -> str:
        """An engine's completion of the prompt."""
        body = {
            "model": MODEL,
            "prompt": PROMPT,
            "max_tokens": TOKENS,
            "temperature": 0,
            "skip_special_tokens": False,
        }
        found = self.ask("/v1/completions", body, **{"X-data-parallel-rank": str(engine)})
        return str(found["choices"][0]["text"]).strip()

    def label(self) -> str:
        """The label of all engines; empty while it is being changed, which vLLM answers by an error."""
        try:
            return str(self.ask("/weight_info")["weight_version"])
        except urllib.error.HTTPError:
            return ""

    def by_agent(self, number: int) -> bool:
        """Update the engines to a version; whether the agent reports success."""
        follower = Follower(self.client, MODEL, self.engine)
        done = follower.take_to(number)
        assert (done.serves == number) == (not done.error), done
        return not done.error

    def by_vllms_calls(self, number: int) -> bool:
        """The same as a trainer would."""
        self.ask("/pause?mode=wait", {})
        self.ask("/start_weight_update", {})
        try:
            problem = self.refusal("/update_weights", {"update_info": {"version": number}})
            if not problem:
                self.ask("/finish_weight_update", {"weight_version": f"{MODEL}@{number}"})
                return True
            assert f"not all engines of this server have taken version {number}" in problem
            assert self.refusal("/finish_weight_update", {}), "vLLM wants it before the next one"
            return False
        finally:
            self.ask("/resume", {})

    def refusal(self, path: str, body: Any) -> str:
        """Error with which the server refuses something; empty if it does not."""
        try:
            self.ask(path, body)
        except urllib.error.HTTPError as error:
            return error.read().decode()
        return ""


@contextmanager
def place(tmp_path: Path, count: int, *arguments: str) -> Iterator[Place]:
    folders = []
    for seed in range(1, FOLDERS + 1):
        model = make_folder(tmp_path / str(seed), seed)
        folders.append((tmp_path / str(seed), said_by_transformers(model).text))
    assert len({text for _, text in folders}) == FOLDERS, "versions cannot be told apart"
    (tmp_path / "logs").mkdir()
    with (
        running_service(tmp_path / "store", collect_every=0.2, grace_seconds=2.0) as running,
        ProcessGate(running.address) as gate,
        TrainerClient(running.address) as trainer,
        EngineClient(running.address) as client,
    ):
        trainer.register_model(MODEL, folders[0][0])
        trainer.push_folder(MODEL, folders[0][0], step=0).wait("durable", timeout=120)
        with VllmServer(
            PYTHON, gate.address, MODEL, tmp_path / "logs" / "vllm.log", *EAGER, "--data-parallel-size", str(count), *arguments,
            extra={"retry_seconds": RETRY_SECONDS, "lane": "grpc"},
            environment={**environment(), "WEIGHBRIDGE_CACHE": str(tmp_path / "cache")},
            module="tests.support.vllm_api_servers",
        ) as server:  # fmt: skip
            server.wait_ready(START_SECONDS)
            pids = [engine_process(server, index) for index in range(count)]
            gate.tell_apart(pids)
            engine = vllm_driver.VllmServer(server.url, MODEL, gate.address)
            engine.connect()
            yield Place(server, engine, gate, client, trainer, folders, {1: folders[0][1]}, pids)


def engine_process(server: VllmServer, index: int) -> int:
    """The process that computes for an engine: its worker, or the engine itself."""
    (engine,) = called(f"EngineCore_DP{index}", server.pid)
    return next(iter(called("Worker", engine)), engine)


def called(title: str, below: int) -> list[int]:
    """The descendants of a process whose title contains this."""
    return [pid for pid in processes_below(below) if title.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.parametrize(
    ("count", "arguments"),
    [(2, ("--api-server-count", "2")), (3, ("--api-server-count", "1"))],
    ids=["two", "three"],
)
def test_no_engine_answers_by_another_version_than_is_said_of_it(
    tmp_path: Path, count: int, arguments: tuple[str, ...]
) -> None:
    seed = first_seed()
    chance = random.Random(seed)
    with place(tmp_path, count, *arguments) as there:
        version, taken, cut = 1, 0, 0
        ended = threading.Event()
        askers = [Asker(there, engine) for engine in range(count)]
        threads = [threading.Thread(target=each.run, args=(ended,)) for each in askers]
        for thread in threads:
            thread.start()
        try:
            for update in range(UPDATES):
                number = there.push()
                if cuts := chance.random() < 0.5:
                    cut += 1
                    there.gate.close(chance.choice(there.pids), after=chance.choice((0, 0, 20_000, 400_000)))
                way = there.by_agent if chance.random() < 0.7 else there.by_vllms_calls
                if not cuts:  # a connection that was cut before is not tried again at once
                    eventually(partial(way, number))
                if not cuts or way(number):
                    version, taken = number, taken + 1
                there.gate.open()
                serving = there.engine.serving()
                said = (serving.version, serving.broken, there.label())
                assert said == (version, "", f"{MODEL}@{version}"), f"seed {seed}, update {update}"
                for engine in range(count):
                    assert there.text(engine) == there.texts[version], f"seed {seed}, update {update}, engine {engine}"
        finally:
            ended.set()
            for thread in threads:
                thread.join(120)
        assert there.gate.refused, "no engine was cut off"
        assert 10 < taken < UPDATES, f"{taken} of {UPDATES} were taken, {cut} were cut"
        for asker in askers:
            assert len(asker.seen) > UPDATES
            for text, *labels in asker.seen:
                numbers = range(*(int(label.rpartition("@")[2]) for label in labels))
                possible = {there.texts[each] for each in (*numbers, int(labels[1].rpartition("@")[2]))}
                assert text in possible, f"seed {seed}, engine {asker.engine}: between {labels}"
