"""Does a proof find every fault of what an engine computes with, name it, and invent none?

``WEIGHBRIDGE_PROOF_FAULTS=1000`` injects as many faults, in equal shares per kind.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engines.test_engine_model import Alone
from tests.sdk.follow.test_mistakes import Recording
from tests.support.example_engine import Llama
from tests.support.identities import identity, policy_file
from tests.support.reference import tiny_config, tiny_model
from tests.support.rounds import rounds
from tests.support.services import RunningService, running_service
from tests.support.signing import new_key
from tests.support.waiting import eventually
from weighbridge import Credentials, EngineClient, EngineReporter, TrainerClient
from weighbridge import _lazy as lazy
from weighbridge._core.engines.facts import FAILED, IN_PART, NOT_PROVED, PROVED, Engine
from weighbridge._signing.trust import Trusted
from weighbridge.follow import due_proofs
from weighbridge.follow.agent import Follower
from weighbridge.follow.engines import EngineFailed, Prepared, Serving, serving_of
from weighbridge.follow.evidence import Evidence, RankProof
from weighbridge.follow.proving import prove
from weighbridge.integrations.engine_rank.agreement import OneRank, RanksFailed
from weighbridge.integrations.engine_rank.model import EngineAsleep
from weighbridge.integrations.engine_rank.rank import EngineRank
from weighbridge.integrations.engine_rank.source import ModelSource
from weighbridge_service.access import tokens

MODEL = "tests/proved"
CONFIG = tiny_config("llama", tied=False, head_dim=8)
FAULTS = rounds("PROOF_FAULTS")


class Cut(OneRank):
    """One of two ranks in one process."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    root = tmp_path_factory.mktemp("proofs")
    with running_service(root / "store", local_socket=str(root / "lane.sock")) as running:
        with TrainerClient(running.address) as trainer:
            for seed in (1, 2):
                tiny_model(CONFIG, seed).save_pretrained(root / str(seed))
                if seed == 1:
                    trainer.register_model(MODEL, root / "1")
                trainer.push_folder(MODEL, root / str(seed)).wait(timeout=60)
        yield running


@pytest.fixture
def client(service: RunningService) -> Iterator[EngineClient]:
    with EngineClient(service.address) as found:
        yield found


@pytest.fixture
def ranks(service: RunningService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EngineRank]]:
    """Two tensor-parallel ranks with version 2, by an update."""
    monkeypatch.setenv("WEIGHBRIDGE_CACHE", str(tmp_path))
    found = []
    for rank in range(2):
        model = Llama(CONFIG, rank, 2)
        engine = Alone(model)
        engine.configuration = lambda rank=rank: f"rank {rank}"  # type: ignore[method-assign]
        made = EngineRank(engine)
        made.load(ModelSource(MODEL, service.address), 1)
        made.apply(2)
        found.append(made)
    yield found
    for made in found:
        made.close()


def ask(ranks: list[EngineRank]) -> Callable[[Collection[str]], Mapping[str, Evidence]]:
    """Evidence as it comes by JSON."""
    return lambda known: {
        f"rank {at}": Evidence.from_json(rank.evidence(known).to_json()) for at, rank in enumerate(ranks)
    }


def test_an_engine_is_proved_after_a_load_and_after_an_update_by_bytes_that_another_process_pulls(
    ranks: list[EngineRank], client: EngineClient, service: RunningService
) -> None:
    proof = prove(client, ask(ranks), MODEL, 2)
    assert proof.verdict == PROVED
    for rank, proved in zip(ranks, proof.ranks.values(), strict=True):
        assert proved.served == f"{MODEL}@2"
        assert proved.compared == len(list(rank.engine.model.parameters()))
    assert ranks[0].evidence().recording != ranks[1].evidence().recording
    assert ranks[0].evidence([ranks[0].evidence().recording]).recorded == ""
    assert prove(client, ask(ranks), MODEL, 1).verdict == FAILED


def there(client: EngineClient) -> list[Engine]:
    """Engines that are reported now."""
    return [each for each in client.engines(MODEL) if not each.ended]


def flip(rank: EngineRank, chance: random.Random) -> str:
    """One bit of one parameter."""
    name, parameter = chance.choice(list(rank.engine.model.named_parameters()))
    bits = parameter.data.view(-1).view(torch.int32)
    bits[chance.randrange(len(bits))] ^= 1 << chance.randrange(31)
    return name


def swap(rank: EngineRank, chance: random.Random) -> str:
    """Two tensors of one shape in one parameter, as experts are swapped: gate and up."""
    name, parameter = chance.choice([each for each in rank.engine.model.named_parameters() if "gate_up" in each[0]])
    gate, up = parameter.data.chunk(2)
    parameter.data.copy_(torch.cat([up, gate]))
    return name


def swap_rows(rank: EngineRank, chance: random.Random) -> str:
    """Two rows of one parameter."""
    name, parameter = chance.choice([each for each in rank.engine.model.named_parameters() if each[1].ndim == 2])
    first, second = chance.sample(range(len(parameter)), 2)
    parameter.data[[first, second]] = parameter.data[[second, first]]
    return name


def half(rank: EngineRank, chance: random.Random, before: Mapping[str, torch.Tensor]) -> str:
    """A parameter of the version before: an update that has reached one half of them."""
    name, parameter = chance.choice(list(rank.engine.model.named_parameters()))
    parameter.data.copy_(before[name])
    return name


def test_every_injected_fault_is_found_and_named_and_none_is_invented(
    ranks: list[EngineRank], client: EngineClient, service: RunningService
) -> None:
    chance = random.Random(38)
    old = {}
    for at in range(2):
        fresh = Llama(CONFIG, at, 2)
        rank = EngineRank(Alone(fresh))
        rank.load(ModelSource(MODEL, service.address), 1)
        old[at] = {name: p.detach().clone() for name, p in fresh.named_parameters()}
        rank.close()
    for number in range(FAULTS):
        at = chance.randrange(2)
        rank = ranks[at]
        whole = {name: p.detach().clone() for name, p in rank.engine.model.named_parameters()}
        kind = number % 5
        if kind == 4:  # a rank that an update has skipped
            wrong = {name for name, p in old[at].items() if not torch.equal(p, whole[name])}
            for name, parameter in rank.engine.model.named_parameters():
                parameter.data.copy_(old[at][name])
        else:
            inject = [flip, swap, swap_rows, partial(half, before=old[at])][kind]
            name = inject(rank, chance)
            wrong = {name} if not torch.equal(whole[name], rank.engine.model.get_parameter(name)) else set()
        proof = prove(client, ask(ranks), MODEL, 2)
        assert set(proof.ranks[f"rank {at}"].wrong) == wrong
        assert not proof.ranks[f"rank {1 - at}"].wrong
        assert proof.verdict == (FAILED if wrong else PROVED)
        for name, parameter in rank.engine.model.named_parameters():
            parameter.data.copy_(whole[name])
        if number % 5 == 0:
            assert prove(client, ask(ranks), MODEL, 2).verdict == PROVED


def test_a_stale_head_that_nothing_was_recorded_for_is_named_as_not_compared(
    ranks: list[EngineRank], client: EngineClient
) -> None:
    ranks[0].engine.model.register_parameter("another_head", torch.nn.Parameter(torch.zeros(2)))
    proof = prove(client, ask(ranks), MODEL, 2)
    assert proof.verdict == IN_PART
    assert list(proof.ranks["rank 0"].unseen) == ["another_head"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3,), (8,), (65_536,), (65_537,), (3, 70_001), (129, 65_536)])
def test_a_digest_is_that_of_the_bytes_however_they_lie(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    whole = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        whole %= 2
    tensor = whole.view(dtype).view(shape)
    digest = int(lazy.digest_of(tensor))
    apart = torch.stack([torch.zeros_like(tensor), tensor], -1)[..., 1]
    assert int(lazy.digest_of(apart)) == digest
    unaligned = torch.empty(tensor.nbytes + 1, dtype=torch.uint8)[1:]
    unaligned.copy_(tensor.reshape(-1).view(torch.uint8))
    assert int(lazy.digest_of(unaligned)) == digest
    if tensor.numel() > 1:
        reversed_ = tensor.reshape(-1).flip(0).reshape(shape)
        assert (int(lazy.digest_of(reversed_)) == digest) == torch.equal(reversed_, tensor)


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Sees how many bytes the largest tensor has that an operation makes."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not getattr(func, "is_view", False):
            self.nbytes = max(self.nbytes, made.nbytes)
        return made


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.complex64])
def test_digests_of_many_tensors_are_those_of_each_and_take_no_more_memory_than_one(
    dtype: torch.dtype,
) -> None:
    size, step = (3997, 1) if dtype.itemsize == 1 else (4000, 3)
    rows = torch.randint(0, 256, (3000, 4000), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    tensors = {str(at): row[:size].view(dtype)[::step] for at, row in enumerate(rows)}
    tensors["none"], tensors["alone"] = torch.zeros(0, dtype=dtype), torch.zeros(5, dtype=dtype)
    with Largest() as largest:
        found = lazy.whole_digests(tensors)
    assert largest.nbytes <= 24 << 20
    assert [found[name] for name in list(tensors)[::97]] == [
        int(lazy.digest_of(tensors[name])) for name in list(tensors)[::97]
    ]
    assert found["none"] == 0
    assert found["alone"] == int(lazy.digest_of(tensors["alone"]))


class Driver(Recording):
    """An engine of ranks in this process; a hook may change them after an update."""

    def __init__(self, ranks: list[EngineRank], after: Callable[[], None]) -> None:
        super().__init__(Serving(None))
        self.ranks = ranks
        self.proofs = self.loads = 0
        self.known: list[int] = []
        self._after = after

    def serving(self) -> Serving:
        return serving_of({f"rank {at}": rank.status() for at, rank in enumerate(self.ranks)}, MODEL)

    def prepare(self, version: int) -> Prepared:
        for rank in self.ranks:
            rank.prepare(version)
        return super().prepare(version)

    def apply(self, version: int, label: str) -> None:
        for rank in self.ranks:
            rank.apply(version)
        super().apply(version, label)
        self._after()

    def evidence(self, known: Collection[str] = ()) -> Mapping[str, Evidence]:
        self.proofs += 1
        self.known.append(len(known))
        return ask(self.ranks)(known)

    def pause(self) -> None:
        self.asked.append("pause")

    def resume(self) -> None:
        self.asked.append("resume")

    def compare_with_load(self) -> Mapping[str, RankProof]:
        assert self.asked[-1] == "pause"
        self.loads += 1
        return {f"rank {at}": rank.compare_with_load() for at, rank in enumerate(self.ranks)}


def test_an_agent_proves_the_start_and_each_nth_update_and_brings_again_what_fails(
    ranks: list[EngineRank], client: EngineClient
) -> None:
    chance = random.Random(3)
    faults = [lambda: None, partial(flip, ranks[1], chance), lambda: None, lambda: None, lambda: None]
    engine = Driver(ranks, lambda: faults.pop(0)())
    follower = Follower(client, MODEL, engine, retry_seconds=0.0, prove_every=2)
    first = next(follower.run())  # it has version 2, which `latest` names
    assert (first.version, first.error, first.proof) == (2, "", PROVED)
    assert [follower.take_to(1).proof, engine.proofs] == ["", 1]
    failed = follower.take_to(2)
    assert "rank 1 has different bytes in" in failed.error
    assert failed.proof == FAILED
    again = follower.take_to(2)
    assert (again.error, again.proof, again.serves) == ("", PROVED, 2)
    assert [follower.take_to(1).proof, follower.take_to(2).proof] == ["", PROVED]


def test_an_engine_that_starts_with_other_bytes_is_brought_to_its_version_by_an_agent_that_proves(
    ranks: list[EngineRank], client: EngineClient
) -> None:
    flip(ranks[0], random.Random(4))
    engine = Driver(ranks, lambda: None)
    assert next(Follower(client, MODEL, engine).run()).error == ""
    with closing(EngineReporter(client, MODEL, kind="mine", ref="latest")) as reporter:
        done = next(Follower(client, MODEL, engine, reporter=reporter, prove_every=1).run())
        eventually(lambda: [(each.proof, each.proved_version) for each in there(client)] == [(PROVED, 2)])
    assert (done.version, done.error, done.proof) == (2, "", PROVED)
    assert f"apply {MODEL}@2" in engine.asked


def test_an_agent_pauses_the_engine_for_a_load_by_its_own_loader_once_and_other_agents_of_the_machine_do_not(
    ranks: list[EngineRank], client: EngineClient
) -> None:
    engine = Driver(ranks, lambda: None)
    agent = Follower(client, MODEL, engine, prove_every=1)
    assert (next(agent.run()).proof, engine.loads) == (PROVED, 1)
    assert [agent.take_to(1).proof, agent.take_to(2).proof, engine.loads] == [PROVED, PROVED, 1]
    assert engine.known == [0, 2, 2], "what ranks take is sent once"
    another = Driver(ranks, lambda: None)
    assert Follower(client, MODEL, another, prove_every=1).take_to(1).proof == PROVED
    assert another.loads == 0


def test_a_wrong_record_of_the_loader_is_found_by_an_agents_first_proof_and_named(
    ranks: list[EngineRank], client: EngineClient
) -> None:
    recorded = ranks[1]._recorded
    assert recorded is not None
    ranks[1]._recorded = replace(recorded, recording=misplaced(recorded.recording))
    engine = Driver(ranks, lambda: None)
    done = Follower(client, MODEL, engine, prove_every=1).take_to(1)
    assert (done.proof, done.error) == (
        FAILED,
        "the proof of version 1 has failed: rank 1 has different bytes in model_layers_0_mlp_gate_up",
    )
    assert prove(client, ask([ranks[0]]), MODEL, 1).verdict == PROVED
    again = Follower(client, MODEL, engine, prove_every=1).take_to(2)
    assert again.proof == FAILED, "as long as the record is wrong, no update passes"


def test_an_engine_that_cannot_load_again_is_proved_in_part_and_is_paused_for_it_once(
    ranks: list[EngineRank], client: EngineClient
) -> None:
    def refuses() -> Mapping[str, RankProof]:
        loads.append(1)
        raise RanksFailed("version 2 could not be loaded again")

    engine, loads = Driver(ranks, lambda: None), list[int]()
    engine.compare_with_load = refuses  # type: ignore[method-assign]
    with closing(EngineReporter(client, MODEL, kind="mine", ref="latest")) as reporter:
        agent = Follower(client, MODEL, engine, prove_every=1, reporter=reporter)
        assert [agent.take_to(1).proof, agent.take_to(2).proof] == [IN_PART, IN_PART]
        eventually(lambda: "version 2 could not be loaded again" in there(client)[0].proof_error)
    assert len(loads) == 1
    assert (engine.asked[-1], engine.asked.count("pause")) == ("resume", 3)


def test_an_engine_whose_pause_for_a_load_is_not_answered_in_time_goes_on(
    ranks: list[EngineRank], client: EngineClient
) -> None:
    engine = Driver(ranks, lambda: None)
    pause = engine.pause

    def answers_late() -> None:
        pause()
        if engine.asked.count("pause") == 2:  # the first one is that of the update
            raise EngineFailed("the engine cannot be reached: timed out")

    engine.pause = answers_late  # type: ignore[method-assign]
    done = Follower(client, MODEL, engine, prove_every=1).take_to(1)
    assert (done.error, done.proof) == ("", IN_PART)
    assert (engine.asked[-1], engine.asked.count("pause")) == ("resume", 2)


@pytest.mark.parametrize(("lost", "proof"), [(1, IN_PART), (2, FAILED)])
def test_an_engine_that_is_not_told_to_go_on_after_a_load_is_told_again_or_failing(
    ranks: list[EngineRank], client: EngineClient, lost: int, proof: str
) -> None:
    engine, told = Driver(ranks, lambda: None), list[str]()
    resume = engine.resume

    def is_lost() -> None:
        told.append("resume")
        if 1 < len(told) <= 1 + lost:  # the first one is that of the update
            raise EngineFailed("the engine cannot be reached: connection reset")
        resume()

    engine.resume = is_lost  # type: ignore[method-assign]
    agent = Follower(client, MODEL, engine, prove_every=1)
    done = agent.take_to(1)
    assert (done.proof, bool(done.error)) == (proof, proof == FAILED)
    if done.error:
        assert "it could not be resumed" in done.error
        assert agent.take_to(1).error == ""
    assert engine.asked[-1] == "resume"


def test_an_engine_that_a_load_leaves_without_a_version_is_brought_one_again(
    ranks: list[EngineRank], client: EngineClient
) -> None:
    def fails(source: lazy.Source) -> None:
        raise RuntimeError("made up")

    def lost(*_: object) -> None:
        raise RanksFailed("a rollback is not possible")

    engine = Driver(ranks, lambda: None)
    agent = Follower(client, MODEL, engine, prove_every=1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ranks[0].engine, "load_again", fails)
        patched.setattr(ranks[0], "_go_back", lost)
        failed = agent.take_to(1)
    assert failed.proof == FAILED
    assert "a rollback is not possible" in failed.error
    again = agent.take_to(1)
    assert (again.error, again.proof, again.serves) == ("", IN_PART, 1)


def test_a_proof_that_cannot_be_made_is_reported_as_not_proved_and_made_as_soon_as_it_can(
    ranks: list[EngineRank], client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(due_proofs, "_FIRST_PAUSE_SECONDS", 0.0)
    engine = Driver(ranks, lambda: None)
    evidence, asleep = engine.evidence, True

    def sleeps(known: Collection[str] = ()) -> Mapping[str, Evidence]:
        if asleep:
            raise EngineAsleep("the engine sleeps: lm_head has no memory")
        return evidence(known)

    engine.evidence = sleeps  # type: ignore[method-assign]
    with closing(EngineReporter(client, MODEL, kind="mine", ref="latest")) as reporter:
        run = Follower(client, MODEL, engine, look_seconds=0.01, reporter=reporter, prove_every=5).run()
        assert next(run).proof == NOT_PROVED
        eventually(lambda: [each.proof for each in there(client)] == [NOT_PROVED])
        assert "lm_head has no memory" in there(client)[0].proof_error
        asleep = False
        made = next(run)
        assert (made.version, made.proof, made.error) == (2, PROVED, "")
        eventually(lambda: [each.proof for each in there(client)] == [PROVED])
        (seen,) = there(client)
        assert (seen.proof_error, seen.proofs, seen.failed_proofs) == ("", 1, 0)


def test_an_engine_that_sleeps_through_an_update_owes_its_proof_until_it_wakes(
    ranks: list[EngineRank], client: EngineClient
) -> None:
    said: list[dict[str, object]] = []
    proofs = due_proofs.DueProofs(client, MODEL, Driver(ranks, lambda: None), 1, lambda **each: said.append(each))
    assert proofs.after_update(2, later="the engine sleeps").verdict == NOT_PROVED
    assert said[-1]["proof_error"] == "version 2 is not proved: the engine sleeps"
    assert proofs.owed is None, "it is not asked again at once"
    assert proofs.make(2).verdict == PROVED
    assert said[-1]["proof_error"] == ""


def test_of_a_version_that_is_not_signed_as_required_nothing_is_fetched_for_a_proof(
    ranks: list[EngineRank], client: EngineClient, tmp_path: Path
) -> None:
    engine = Driver(ranks, lambda: None)
    required = [Trusted.of_file(new_key(tmp_path).public)]
    done = next(Follower(client, MODEL, engine, required=required, prove_every=1).run())
    assert "not signed" in done.error
    assert (done.proof, engine.proofs) == ("", 0)


def test_a_version_that_is_not_signed_as_required_is_not_brought_for_a_proof_that_was_owed(
    ranks: list[EngineRank], client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(due_proofs, "_FIRST_PAUSE_SECONDS", 0.0)
    engine, problem, asleep = Driver(ranks, lambda: None), "", True
    evidence = engine.evidence

    def sleeps(known: Collection[str] = ()) -> Mapping[str, Evidence]:
        if asleep:
            raise EngineAsleep("the engine sleeps")
        return evidence(known)

    engine.evidence = sleeps  # type: ignore[method-assign]
    follower = Follower(client, MODEL, engine, look_seconds=0.01, signed_seconds=0.0, prove_every=1)
    monkeypatch.setattr(follower, "_unsigned", lambda _number: problem)
    run = follower.run()
    assert next(run).proof == NOT_PROVED
    problem, asleep = "version 2 is not signed by alice", False
    flip(ranks[0], random.Random(5))
    assert next(run).proof == FAILED
    assert next(run).error == problem
    assert f"apply {MODEL}@2" not in engine.asked
    problem = ""
    done = next(run)
    assert (done.error, done.proof) == ("", PROVED)


def test_a_version_that_a_wake_up_brings_again_is_proved_again(
    ranks: list[EngineRank], client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(due_proofs, "_FIRST_PAUSE_SECONDS", 0.0)
    engine = Driver(ranks, lambda: None)
    run = Follower(client, MODEL, engine, look_seconds=0.01, prove_every=1).run()
    assert next(run).proof == PROVED
    for rank in ranks:
        rank.when_asleep = "wait"
        before = rank.status().brought
        rank.wake(lost=True, last=True)
        assert (rank.status().served, rank.status().brought) == (f"{MODEL}@2", before + 1)
    flip(ranks[1], random.Random(7))
    found, again = next(run), next(run)
    assert (found.proof, again.proof, again.error) == (FAILED, PROVED, "")


def test_an_engine_that_was_left_paused_goes_on_before_it_is_proved(
    ranks: list[EngineRank], client: EngineClient
) -> None:
    engine, asked = Driver(ranks, lambda: None), list[str]()
    resume, evidence = engine.resume, engine.evidence
    engine.resume = lambda: (asked.append("resume"), resume())[1]  # type: ignore[method-assign]
    engine.evidence = lambda known=(): (asked.append("evidence"), evidence(known))[1]  # type: ignore[method-assign]
    assert next(Follower(client, MODEL, engine, prove_every=1).run()).proof == PROVED
    assert asked[:2] == ["resume", "evidence"]


def test_an_engine_that_was_started_again_is_proved_whatever_is_due(
    ranks: list[EngineRank], client: EngineClient
) -> None:
    engine = Driver(ranks, lambda: None)
    run = Follower(client, MODEL, engine, look_seconds=0.01, prove_every=9).run()
    assert next(run).proof == PROVED
    for rank in ranks:
        rank._instance = f"another than {rank._instance}"
    flip(ranks[1], random.Random(6))
    again = next(run)
    assert (again.version, again.proof, again.error) == (2, PROVED, "")
    assert f"apply {MODEL}@2" in engine.asked, "it was brought again"


def test_an_engine_of_which_nothing_can_be_compared_is_not_proved(
    ranks: list[EngineRank], client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in ranks:  # as where layers are wrapped for LoRA, or all weights are quantized as they are loaded
        targets = rank.engine.targets()
        monkeypatch.setattr(
            rank.engine,
            "live",
            lambda _recording, names=tuple(targets): ({}, dict.fromkeys(names, "wrapped")),
        )
    engine = Driver(ranks, lambda: None)
    assert prove(client, ask(ranks), MODEL, 2).verdict == NOT_PROVED
    said: list[dict[str, object]] = []
    monkeypatch.setattr(due_proofs, "_FIRST_PAUSE_SECONDS", 0.0)
    proofs = due_proofs.DueProofs(client, MODEL, engine, 1, lambda **each: said.append(each))
    assert proofs.after_update(2).verdict == NOT_PROVED
    assert "none of its parameters can be compared" in str(said[-1]["proof_error"])
    assert "proofs" not in said[-1], "it does not count as one"
    assert (proofs.owed, engine.loads) == (None, 0)
    proofs.after_update(2, later="the engine sleeps")
    assert proofs.make(2).verdict == NOT_PROVED  # behind the wake-up
    assert proofs.owed is None, "else the engine makes digests with each look"


def test_an_engine_that_has_another_version_is_named_by_that_and_not_by_its_parameters(
    ranks: list[EngineRank], client: EngineClient
) -> None:
    ranks[1].apply(1)  # as in the middle of an update of several engines
    proof = prove(client, ask(ranks), MODEL, 2)
    assert proof.verdict == FAILED
    assert proof.wrong_text == f"rank 1 serves {MODEL}@1"


def test_an_identity_that_may_pull_alone_proves_and_reports_it(tmp_path: Path) -> None:
    given = {name: tokens.new_token() for name in ("owner", "agent")}
    policy = policy_file(
        tmp_path,
        identity("owner", ["admin"], token=given["owner"]),
        identity("agent", [f"pull:{MODEL}"], token=given["agent"]),
    )

    def credentials(name: str) -> Credentials:
        return Credentials(token=given[name], insecure=True)

    tiny_model(CONFIG, 1).save_pretrained(tmp_path / "hf")
    with running_service(tmp_path / "store", policy=policy) as running:
        with TrainerClient(running.address, credentials=credentials("owner")) as trainer:
            trainer.import_folder(MODEL, tmp_path / "hf").wait(timeout=60)
        with EngineClient(running.address, credentials=credentials("agent")) as agent:
            rank = EngineRank(Alone(Llama(CONFIG, 0, 1)))
            source = ModelSource(MODEL, running.address)
            rank.clients[source] = agent
            rank.load(source, 1)
            with closing(EngineReporter(agent, MODEL, kind="mine", ref="latest")) as reporter:
                engine = Driver([rank], lambda: None)
                run = Follower(agent, MODEL, engine, prove_every=1, reporter=reporter).run()
                assert next(run).proof == PROVED
                eventually(lambda: [(each.proof, each.identity) for each in there(agent)] == [(PROVED, "agent")])


def misplaced(recording: lazy.Recording) -> lazy.Recording:
    """A wrong record of a loader: two tensors of one shape go to each other's places."""
    steps = list(recording.steps)
    first, second = (
        next(at for at, step in enumerate(steps) if step.tensor == f"model.layers.0.mlp.{kind}_proj.weight")  # type: ignore[union-attr]
        for kind in ("gate", "up")
    )
    a, b = steps[first], steps[second]
    steps[first], steps[second] = a._replace(part=b.part), b._replace(part=a.part)
    return replace(recording, steps=steps)


def test_a_wrong_record_of_the_loader_passes_by_itself_and_is_found_by_the_engines_own_loader(
    service: RunningService, client: EngineClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHBRIDGE_CACHE", str(tmp_path))
    rank = EngineRank(Alone(Llama(CONFIG, 0, 1)))
    with closing(rank):
        rank.load(ModelSource(MODEL, service.address), 1)
        recorded = rank._recorded
        assert recorded is not None
        rank._recorded = replace(recorded, recording=misplaced(recorded.recording))
        rank.apply(2)
        assert prove(client, ask([rank]), MODEL, 2).verdict == PROVED
        found = rank.compare_with_load()
        assert found.wrong == ("model_layers_0_mlp_gate_up",)
        assert found.compared == len(list(rank.engine.model.parameters()))
        assert rank.compare_with_load().wrong == ()
        assert rank.status().served == f"{MODEL}@2"


def test_a_load_that_fails_takes_the_engine_back_to_the_version_that_it_has(
    ranks: list[EngineRank], client: EngineClient
) -> None:
    rank = ranks[0]
    load = rank.engine.load_again

    def fails(source: lazy.Source) -> None:
        rank.engine.load(itertools.islice(source.tensors(), 5))
        raise RuntimeError("made up")

    rank.engine.load_again = fails  # type: ignore[method-assign]
    flip(rank, random.Random(5))
    with pytest.raises(RanksFailed, match="could not be loaded again; the engine is back at version 2"):
        rank.compare_with_load()
    assert rank.status().served == f"{MODEL}@2"
    rank.engine.load_again = load  # type: ignore[method-assign]
    assert rank.compare_with_load().wrong == ()
