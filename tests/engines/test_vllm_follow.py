"""Does a live vLLM server follow a ref, and answer with the version that it reports, whatever goes wrong on the way?

One server of two tensor-parallel ranks, which reaches the service through a gate; each test leaves both in order.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.gate import Gate
from tests.support.services import RunningService, running_service
from tests.support.vllm_environment import PYTHON, environment, needs_vllm
from tests.support.waiting import eventually
from tests.support.word_models import LONG_PROMPT, PROMPT, TOKENS, make_folder, said_by_transformers
from weighbridge import EngineClient, TrainerClient
from weighbridge._clients.attempts import TRIES
from weighbridge._core.engines.facts import FAILED, IN_PART, PROVED
from weighbridge.errors import FailedPrecondition, WeighbridgeError
from weighbridge.follow import vllm as vllm_driver
from weighbridge.follow.agent import Followed, Follower
from weighbridge.follow.engines import EngineFailed
from weighbridge.follow.proving import prove, prove_by_load
from weighbridge_demo.vllm_server import EAGER, VllmServer

pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.timeout(600)]

MODEL = "tests/followed"
RETRY_SECONDS = 3.0


@dataclass(frozen=True)
class Seen:
    """A server as clients see it: its completion of the prompt, the version that its workers report, what is broken,
    and its label.
    """

    text: str
    serving: int | None
    broken: str
    label: str


@dataclass
class Place:
    """A service, a trainer that makes versions, and a vLLM that serves one of them.

    Attributes:
        texts: the text that transformers generates, by version.
    """

    running: RunningService
    gate: Gate
    trainer: TrainerClient
    client: EngineClient
    server: VllmServer
    engine: vllm_driver.VllmServer
    folders: Path
    texts: dict[int, str] = field(default_factory=dict)
    seeds: Iterator[int] = field(default_factory=lambda: itertools.count(2))

    def follower(self) -> Follower:
        return Follower(self.client, MODEL, self.engine, retry_seconds=4.0)

    def push(self) -> int:
        """A new version, with other weights."""
        seed = next(self.seeds)
        folder = self.folders / str(seed)
        model = make_folder(folder, seed)
        number = self.trainer.push_folder(MODEL, folder, step=seed).wait("durable", timeout=60).number
        self.texts[number] = said_by_transformers(model).text
        return number

    def take_to(self, number: int) -> Followed:
        return self.follower().take_to(number)

    def insist(self, number: int) -> None:
        """Update the server, with retries: cut connections are not retried at once."""
        deadline = time.monotonic() + 60
        while self.take_to(number).error:
            assert time.monotonic() < deadline

    def seen(self) -> Seen:
        """The server's completion of the prompt, and the version from each place that reports it."""
        serving = self.engine.serving()
        text = self.server.complete(PROMPT, TOKENS).text.strip()
        return Seen(text, serving.version, serving.broken, self.server.weight_version())

    def version(self, number: int) -> Seen:
        """The expected observation of a server with this version."""
        others = [text for version, text in self.texts.items() if version != number]
        assert self.texts[number] not in others, "the versions cannot be told apart"
        return Seen(self.texts[number], number, "", f"{MODEL}@{number}")

    def served(self) -> int:
        """Number of the version that the server reports."""
        number = self.engine.serving().version
        assert number is not None
        return number


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folders, logs = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("logs")
    with (
        running_service(tmp_path_factory.mktemp("store"), collect_every=0.2, grace_seconds=2.0) as running,
        Gate(running.address) as gate,
        TrainerClient(running.address) as trainer,
        EngineClient(running.address) as client,
    ):
        model = make_folder(folders / "1", 1)
        trainer.register_model(MODEL, folders / "1")
        trainer.push_folder(MODEL, folders / "1", step=1).wait("durable", timeout=60)
        with VllmServer(
            PYTHON, gate.address, MODEL, logs / "vllm.log", *EAGER, "--tensor-parallel-size", "2",
            extra={"retry_seconds": RETRY_SECONDS},
            environment={**environment(), "WEIGHBRIDGE_CACHE": str(folders / "cache")},
        ) as server:  # fmt: skip
            server.wait_ready()
            engine = vllm_driver.VllmServer(server.url, MODEL, gate.address)
            engine.connect()
            assert server.weight_version() == f"{MODEL}@1", "it says so from its start"
            yield Place(running, gate, trainer, client, server, engine, folders, {1: said_by_transformers(model).text})


@pytest.fixture(autouse=True)
def in_order(place: Place) -> Iterator[None]:
    yield
    place.gate.open()
    assert place.seen() == place.version(place.served())


def ask(place: Place, path: str, body: Any = None) -> Any:
    """One of vLLM's own routes, as a trainer would call it."""
    data = json.dumps(body or {}).encode()
    request = urllib.request.Request(place.server.url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_a_server_that_no_agent_reports_reports_itself(place: Place) -> None:
    eventually(lambda: place.client.engines(MODEL))
    (found,) = place.client.engines(MODEL)
    assert (found.kind, found.version, found.standing) == ("vllm", place.served(), "pinned")


def test_vllm_starts_from_the_service_with_config_and_tokenizer(place: Place) -> None:
    assert place.seen() == place.version(1)
    assert "loaded" in place.server.log.read_text()


def test_a_live_server_follows_a_ref_and_answers_as_transformers_does(place: Place) -> None:
    number = place.push()
    done = place.take_to(number)
    assert (done.serves, done.error) == (number, "")
    specs = place.client.pull(MODEL, number).nbytes
    # norms are on both ranks, all else is cut
    assert specs < done.nbytes < 1.01 * specs
    assert 0 < done.pause_seconds < 60
    assert place.seen() == place.version(number)


def test_the_command_follows_too_and_says_what_it_did(place: Place) -> None:
    number = place.push()
    command = [sys.executable, "-m", "weighbridge", "follow", MODEL, "--server", place.running.address]
    options = ["--engine-server", place.gate.address, "--url", place.server.url, "--count", "1", "--json"]
    done = subprocess.run([*command, *options, "--ask-token"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["version"], said["serves"], said["error"]) == (number, number, "")
    assert said["nbytes"] > 0
    (parts,) = [each.update_parts for each in place.client.engines(MODEL) if each.update_version == number]
    assert 0 < parts["answer"] < 60
    assert place.seen() == place.version(number)


def test_an_engine_that_has_the_version_is_left_alone(place: Place) -> None:
    number = place.push()
    place.take_to(number)
    [found] = itertools.islice(place.follower().run(), 1)
    assert (found.serves, found.nbytes, found.error) == (number, 0, "")


def test_the_engine_serves_while_a_version_is_being_prepared(place: Place) -> None:
    had = place.served()
    number = place.push()
    place.gate.hold_after(1_000_000)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        update = pool.submit(place.take_to, number)
        place.gate.wait_closed()
        assert place.seen() == place.version(had)
        assert not update.done()
        place.gate.open()
        assert update.result(60).error == ""
    assert place.seen() == place.version(number)


def test_a_service_that_dies_in_the_middle_of_an_update_leaves_the_engine_as_it_was(place: Place) -> None:
    had = place.served()
    number = place.push()
    place.gate.cut_after(1_000_000)
    done = place.take_to(number)
    assert "could not be prepared" in done.error
    assert "cannot be reached" in done.error or "Unavailable" in done.error or "connect" in done.error
    assert (done.serves, done.pause_seconds) == (had, 0.0)
    assert place.seen() == place.version(had)
    place.gate.open()
    place.insist(number)
    assert place.seen() == place.version(number)


def test_an_agent_tries_again_until_the_service_is_back(place: Place) -> None:
    number = place.push()
    place.gate.cut_after(1_000_000)
    found = place.follower().run()
    assert next(found).error
    place.gate.open()
    assert any(done.serves == number for done in itertools.islice(found, TRIES - 1))


def test_a_version_that_is_retired_while_it_is_pulled_comes_whole_or_not_at_all(place: Place) -> None:
    had = place.served()
    retired = place.push()
    place.push()  # the latest one cannot be deleted
    place.gate.hold_after(1_000_000)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        update = pool.submit(place.take_to, retired)
        place.gate.wait_closed()
        place.trainer.delete_version(MODEL, retired)
        time.sleep(1.0)
        place.gate.open()
        done = update.result(120)
    assert place.seen() == place.version(had if done.error else retired)


def test_a_version_that_is_gone_is_refused_by_name(place: Place) -> None:
    had = place.served()
    gone = place.push()
    place.push()
    place.trainer.delete_version(MODEL, gone)

    def is_gone() -> bool:
        try:
            place.client.version(MODEL, gone)
        except WeighbridgeError:
            return True
        return False

    eventually(is_gone)
    done = place.take_to(gone)
    assert str(gone) in done.error
    assert done.serves == had
    assert place.seen() == place.version(had)


def test_of_two_updates_at_once_the_second_is_refused_and_the_first_goes_on(place: Place) -> None:
    first, second = place.push(), place.push()
    other = vllm_driver.VllmServer(place.server.url, MODEL, place.gate.address)
    place.gate.hold_after(1_000_000)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        update = pool.submit(place.take_to, first)
        place.gate.wait_closed()
        with pytest.raises(FailedPrecondition, match=f"version {first} is being prepared"):
            other.prepare(second)
        place.gate.open()
        assert update.result(60).error == ""
    assert place.seen() == place.version(first)


def test_what_an_agent_left_behind_does_not_hold_up_the_next_one(place: Place) -> None:
    number = place.push()
    ask(place, "/pause?mode=wait")
    ask(place, "/start_weight_update")
    assert place.take_to(number).error == ""
    assert place.seen() == place.version(number)
    for path in ("/start_weight_update", "/finish_weight_update"):
        ask(place, path)


def test_vllms_own_calls_update_without_an_agent_or_say_why_not(place: Place) -> None:
    had = place.served()
    number = place.push()
    ask(place, "/start_weight_update")
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(place, "/update_weights", {"update_info": {"version": 10_000}})
    said = refused.value.read().decode()
    assert "10000" in said
    assert f"keeps version {had}" in said
    with pytest.raises(urllib.error.HTTPError):
        ask(place, "/finish_weight_update")  # what vLLM wants before the next one
    assert place.seen() == place.version(had)
    ask(place, "/start_weight_update")
    ask(place, "/update_weights", {"update_info": {"version": number}})
    ask(place, "/finish_weight_update", {"weight_version": f"{MODEL}@{number}"})
    assert place.seen() == place.version(number)


def test_prefixes_that_old_weights_have_computed_answer_for_no_version_after_it(place: Place) -> None:
    """By vLLM's own call, without a pause: nothing but the plug-in empties its caches."""
    before = place.server.complete(LONG_PROMPT, TOKENS).text
    number = place.push()
    ask(place, "/start_weight_update")
    ask(place, "/update_weights", {"update_info": {"version": number, "phase": "prepare"}})
    assert place.server.complete(LONG_PROMPT, TOKENS).text == before
    ask(place, "/update_weights", {"update_info": {"version": number}})
    ask(place, "/finish_weight_update", {"weight_version": f"{MODEL}@{number}"})
    after = place.server.complete(LONG_PROMPT, TOKENS).text
    ask(place, "/pause?mode=abort")  # empties all caches
    ask(place, "/resume")
    assert after == place.server.complete(LONG_PROMPT, TOKENS).text
    assert after != before


def test_an_engine_that_does_not_answer_is_named(place: Place) -> None:
    nobody = vllm_driver.VllmServer("http://127.0.0.1:9", MODEL, place.gate.address)
    with pytest.raises(EngineFailed, match=r"127\.0\.0\.1:9 cannot be reached"):
        nobody.connect()


def test_workers_are_proved_by_bytes_that_another_process_pulls_and_fail_against_another_version(
    place: Place,
) -> None:
    before, number = place.push(), place.push()
    place.insist(number)
    proof = prove(place.client, place.engine.evidence, MODEL, number)
    assert proof.verdict in (PROVED, IN_PART)
    assert list(proof.ranks) == ["rank 0", "rank 1"]
    for rank in proof.ranks.values():
        assert rank.served == f"{MODEL}@{number}"
        assert rank.compared > 0
        # what the processor's kernels repack is named, and the rest is compared
        assert set(rank.unseen.values()) <= {
            "the engine computes with a tensor that is derived from it",
            "it was compared, but the engine also computes with a tensor that is derived from it",
        }
    other = prove(place.client, place.engine.evidence, MODEL, before)
    assert other.verdict == FAILED
    assert all(len(rank.wrong) == rank.compared for rank in other.ranks.values())


def test_workers_are_compared_with_a_load_by_vllms_own_loader_and_go_on(place: Place) -> None:
    number = place.push()
    place.insist(number)
    proof = prove_by_load(place.engine, MODEL, number)
    assert proof.verdict == PROVED  # what the processor's kernels have packed is read back
    for rank in proof.ranks.values():
        assert rank.compared > 0
        assert not rank.wrong
    assert place.seen() == place.version(number)
