"""Does a proof find and name every fault that is put into a live vLLM, and invent none?

One server of two tensor-parallel ranks with a small mixture of experts, and one of two engines.
``WEIGHBRIDGE_ENGINE_FAULTS=1000`` injects as many faults in equal shares per kind, and makes as many proofs of an
engine without a fault.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from tests.support.engine_faults import KEEP, NEXT, RESTORE, WRONG, install, order, told
from tests.support.rounds import first_seed, rounds
from tests.support.services import RunningService, running_service
from tests.support.vllm_environment import PYTHON, environment, needs_vllm
from tests.support.word_models import make_folder
from weighbridge import EngineClient, TrainerClient
from weighbridge._cli import commands
from weighbridge._core.engines.facts import FAILED, IN_PART, NOT_PROVED, PROVED
from weighbridge.errors import WeighbridgeError
from weighbridge.follow import vllm as vllm_driver
from weighbridge.follow.agent import Follower
from weighbridge.follow.proving import Proof, prove, prove_by_load
from weighbridge_demo.vllm_server import EAGER, VllmServer

MODEL = "tests/faulty"
FAULTS = rounds("ENGINE_FAULTS")
pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.timeout(3600 + 8 * FAULTS)]
START_SECONDS = 900.0


@dataclass
class Place:
    """A service with two versions, and a server that takes them.

    Attributes:
        names: of the server's ranks.
    """

    running: RunningService
    client: EngineClient
    server: VllmServer
    engine: vllm_driver.VllmServer
    names: tuple[str, ...] = ()

    def take_to(self, number: int) -> None:
        done = Follower(self.client, MODEL, self.engine).take_to(number)
        assert (done.error, done.serves) == ("", number)

    def proof(self, number: int) -> Proof:
        return prove(self.client, self.engine.evidence, MODEL, number)

    def order(self, kind: str, **said: object) -> dict[str, list[str]]:
        return told(self.engine.evidence, order(kind, **said))  # type: ignore[arg-type]


@contextmanager
def place(root: Path, family: str, *arguments: str) -> Iterator[Place]:
    with (
        running_service(root / "store") as running,
        TrainerClient(running.address) as trainer,
        EngineClient(running.address) as client,
    ):
        for seed in (1, 2):
            model = make_folder(root / str(seed), seed, family)
            with torch.no_grad():  # norms are ones in each random model
                for parameter in model.parameters():
                    if parameter.ndim == 1:
                        parameter.add_(torch.rand_like(parameter))
            model.save_pretrained(root / str(seed))
            if seed == 1:
                trainer.register_model(MODEL, root / "1")
            trainer.push_folder(MODEL, root / str(seed), step=seed).wait("durable", timeout=60)
        path = {"PYTHONPATH": f"{install(root / 'plugin')}:{environment()['PYTHONPATH']}"}
        with VllmServer(
            PYTHON, running.address, MODEL, root / "vllm.log", *EAGER, *arguments,
            environment={**environment(), **path, "WEIGHBRIDGE_CACHE": str(root / "cache")},
            module="tests.support.vllm_api_servers",
        ) as server:  # fmt: skip
            server.wait_ready(START_SECONDS)
            engine = vllm_driver.VllmServer(server.url, MODEL, running.address)
            engine.connect()
            made = Place(running, client, server, engine)
            made.names = tuple(made.proof(2).ranks)
            yield made


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Two tensor-parallel ranks with experts."""
    with place(tmp_path_factory.mktemp("experts"), "qwen3_moe", "--tensor-parallel-size", "2") as made:
        yield made


def without_fault(place: Place, number: int) -> None:
    proof = place.proof(number)
    assert proof.verdict in (PROVED, IN_PART), proof.wrong_text
    assert tuple(proof.ranks) == place.names
    assert all(rank.compared for rank in proof.ranks.values())


def named_alone(proof: Proof, at: int, wrong: dict[str, list[str]]) -> None:
    """A proof names all that is wrong of one rank, and nothing else."""
    assert {name for name, parameters in wrong.items() if parameters} == {f"rank {at}"}
    assert {name: sorted(rank.wrong) for name, rank in proof.ranks.items()} == wrong
    assert proof.verdict == FAILED


KINDS = ("flip", "swap_rows", "stale", "skip", "half", "record", "swap_experts", "stale_packed")
OF_OLD = ("stale", "stale_packed", *NEXT)
"""Those that need a version before."""
NAMES = {"stale": "embed_tokens.weight", "stale_packed": "lm_head"}


def test_each_fault_in_a_live_engine_is_found_and_named_and_none_is_invented(experts: Place) -> None:
    chance = random.Random(first_seed())
    served = 2
    counts = dict.fromkeys(KINDS, 0)
    for number in range(FAULTS):
        kind, at = KINDS[number % len(KINDS)], chance.randrange(2)
        said = {"rank": at, "seed": chance.randrange(1 << 30), "name": NAMES.get(kind, "")}
        if kind in OF_OLD:
            experts.order(KEEP)
            served = 3 - served
        wrong = experts.order(kind, **said) if kind in NEXT else {}
        if kind == "record":
            by_two_who_agree(experts, served, wrong)
        elif kind in NEXT:
            experts.take_to(served)
            named_alone(experts.proof(served), at, experts.order(WRONG))
        else:
            if kind in OF_OLD:
                experts.take_to(served)
            wrong = experts.order(kind, **said)
            assert len(wrong[f"rank {at}"]) == 1, kind
            packed = kind in ("swap_experts", "stale_packed")
            if packed:  # out of the sight of digests
                assert experts.proof(served).verdict == IN_PART
            proof = prove_by_load(experts.engine, MODEL, served) if packed else experts.proof(served)
            named_alone(proof, at, wrong)
        counts[kind] += 1
        experts.order(RESTORE)
        if kind in NEXT:
            experts.take_to(served)
        without_fault(experts, served)
    print(f"{sum(counts.values())} faults were found and named: {counts}")


def by_two_who_agree(place: Place, number: int, wrong: dict[str, list[str]]) -> None:
    """A wrong record of a loader is that of the update and of the proof; an agent finds it by the engine's own loader,
    which has put it right.
    """
    done = Follower(place.client, MODEL, place.engine, prove_every=1).take_to(number)
    assert done.proof == FAILED
    for rank, names in wrong.items():
        assert (rank in done.error) == bool(names)
        assert all(name in done.error for name in names)
    place.order(RESTORE)
    without_fault(place, number)


def test_no_fault_is_invented_in_an_engine_that_has_none(experts: Place) -> None:
    served = experts.engine.serving().version
    assert served is not None
    for _ in range(FAULTS):
        without_fault(experts, served)


def test_the_first_proof_of_a_kind_of_engine_is_by_its_own_loader_and_later_ones_of_other_agents_are_not(
    tmp_path: Path,
) -> None:
    with place(tmp_path, "llama", "--tensor-parallel-size", "1") as there:
        loads: list[str] = []
        compare = there.engine.compare_with_load
        there.engine.compare_with_load = lambda: loads.append("load") or compare()  # type: ignore[func-returns-value,method-assign]
        agent = Follower(there.client, MODEL, there.engine, prove_every=1)
        first = next(agent.run())
        assert (first.proof, first.error, loads) == (
            PROVED,
            "",
            ["load"],
        )  # what kernels have packed is compared, too
        assert (agent.take_to(1).proof, loads) == (IN_PART, ["load"])
        another = Follower(there.client, MODEL, there.engine, prove_every=1)
        assert (another.take_to(2).proof, loads) == (IN_PART, ["load"])
        options = ["--url", there.server.url, "--server", there.running.address, "--json"]
        said = CliRunner().invoke(commands, ["prove", MODEL, *options])
        assert (said.exit_code, json.loads(said.stdout)["verdict"]) == (0, IN_PART)


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Two engines behind one server, by data parallelism."""
    with place(tmp_path_factory.mktemp("replicas"), "llama", "--data-parallel-size", "2") as made:
        yield made


def test_all_engines_behind_a_server_are_proved_and_one_that_an_update_has_skipped_is_named(
    replicas: Place,
) -> None:
    assert replicas.names == ("engine 0, rank 0", "engine 1, rank 0")
    served = 2
    for number in range(max(FAULTS // len(KINDS), 2)):
        engine = 1 - number % 2
        served = 3 - served
        replicas.order("skip", engine=engine)
        replicas.take_to(served)
        proof = replicas.proof(served)
        assert proof.verdict == FAILED
        skipped, other = proof.ranks[f"engine {engine}, rank 0"], proof.ranks[f"engine {1 - engine}, rank 0"]
        assert (len(skipped.wrong), other.wrong) == (skipped.compared, ())
        replicas.order(RESTORE)
        done = Follower(replicas.client, MODEL, replicas.engine, prove_every=1).take_to(served)
        assert done.proof in (PROVED, IN_PART)
        wrong = replicas.order("flip", engine=engine, seed=number)
        named = {name: list(rank.wrong) for name, rank in replicas.proof(served).ranks.items()}
        assert named == wrong
        assert len(wrong[f"engine {engine}, rank 0"]) == 1
        replicas.order(RESTORE)
        without_fault(replicas, served)


def test_an_engine_that_does_not_answer_is_named_and_nothing_is_proved(replicas: Place) -> None:
    number = 2  # the newest: an agent takes its engine to that
    replicas.take_to(number)
    replicas.order("mute", engine=1)
    with pytest.raises(WeighbridgeError, match="engine 1: this engine does not answer"):
        replicas.proof(number)
    agent = Follower(replicas.client, MODEL, replicas.engine, prove_every=1)
    assert next(agent.run()).proof == NOT_PROVED
    replicas.order(RESTORE, engine=1)
    without_fault(replicas, number)
