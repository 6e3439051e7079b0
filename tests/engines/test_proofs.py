"""Does a proof find every fault of what an engine computes with, name it, and invent none?

``WEIGHBRIDGE_PROOF_FAULTS=1000`` injects as many faults, in equal shares per kind.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.engines.test_engine_model import Alone
from tests.sdk.follow.test_mistakes import Recording
from tests.support.example_engine import Llama
from tests.support.reference import tiny_config, tiny_model
from tests.support.rounds import rounds
from tests.support.services import RunningService, running_service
from tests.support.waiting import eventually
from weighbridge import EngineClient, EngineReporter, TrainerClient
from weighbridge import _lazy as lazy
from weighbridge.follow.agent import Follower
from weighbridge.follow.engines import Prepared, Serving, serving_of
from weighbridge.follow.evidence import Evidence
from weighbridge.follow.proving import FAILED, IN_PART, PROVED, prove
from weighbridge.integrations.engine_rank.agreement import OneRank, RanksFailed
from weighbridge.integrations.engine_rank.rank import EngineRank
from weighbridge.integrations.engine_rank.source import ModelSource

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
def ranks(
    service: RunningService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[EngineRank]]:
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


def ask(ranks: list[EngineRank]) -> Callable[[str], Mapping[str, Evidence]]:
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
    assert ranks[0].evidence(ranks[0].evidence().recording).recorded == ""
    assert prove(client, ask(ranks), MODEL, 1).verdict == FAILED


def flip(rank: EngineRank, chance: random.Random) -> str:
    """One bit of one parameter."""
    name, parameter = chance.choice(list(rank.engine.model.named_parameters()))
    bits = parameter.data.view(-1).view(torch.int32)
    bits[chance.randrange(len(bits))] ^= 1 << chance.randrange(31)
    return name


def swap(rank: EngineRank, chance: random.Random) -> str:
    """Two tensors of one shape in one parameter, as experts are swapped: gate and up."""
    name, parameter = chance.choice(
        [each for each in rank.engine.model.named_parameters() if "gate_up" in each[0]]
    )
    gate, up = parameter.data.chunk(2)
    parameter.data.copy_(torch.cat([up, gate]))
    return name


def swap_rows(rank: EngineRank, chance: random.Random) -> str:
    """Two rows of one parameter."""
    name, parameter = chance.choice(
        [each for each in rank.engine.model.named_parameters() if each[1].ndim == 2]
    )
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
@pytest.mark.parametrize(
    "shape", [(), (0,), (1,), (3,), (8,), (65_536,), (65_537,), (3, 70_001), (129, 65_536)]
)
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


class Driver(Recording):
    """An engine of ranks in this process; a hook may change them after an update."""

    def __init__(self, ranks: list[EngineRank], after: Callable[[], None]) -> None:
        super().__init__(Serving(None))
        self.ranks = ranks
        self.proofs = 0
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

    def evidence(self, known: str = "") -> Mapping[str, Evidence]:
        self.proofs += 1
        return ask(self.ranks)(known)


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
    assert "rank 1 has other bytes in" in failed.error
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
        eventually(lambda: [each.proof_text for each in client.engines(MODEL)] == ["2 proved"])
    assert (done.version, done.error, done.proof) == (2, "", PROVED)
    assert engine.asked[-1] == f"apply {MODEL}@2"


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
