"""Does a drafter that is a separate model follow its policy in step: both versions in one update, or neither?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.engines.test_engine_agreement import Together, on_all
from tests.engines.test_engine_model import Alone
from tests.support.example_engine import Llama
from tests.support.reference import tiny_config, tiny_model
from tests.support.services import RunningService, running_service
from weighbridge import EngineClient, TrainerClient
from weighbridge import _lazy as lazy
from weighbridge.errors import FailedPrecondition, Unavailable, WeighbridgeError
from weighbridge.follow.proving import prove
from weighbridge.follow.status import label, policy_in
from weighbridge.integrations.engine_rank.agreement import OneRank
from weighbridge.integrations.engine_rank.model import EngineAsleep
from weighbridge.integrations.engine_rank.rank import EngineRank
from weighbridge.integrations.engine_rank.source import ModelSource

POLICY, DRAFTER, OTHER = "tests/policy", "tests/drafter", "tests/other"
CONFIGS = {
    POLICY: tiny_config("llama", tied=False, head_dim=8),
    DRAFTER: tiny_config("llama", tied=False, head_dim=8, num_hidden_layers=1),
    OTHER: tiny_config("llama", tied=False, head_dim=8, num_hidden_layers=1, intermediate_size=160),
}
NAME = "the drafter tests/drafter (draft_model)"
Tensors = dict[str, torch.Tensor]


class Engine(Alone):
    """One rank of a policy whose drafter has the policy's output layer in place of its own."""

    def __init__(self, ranks: Any) -> None:
        self._ranks = ranks
        super().__init__(Llama(CONFIGS[POLICY], ranks.rank, ranks.size))
        self.own = Llama(CONFIGS[DRAFTER], ranks.rank, ranks.size)
        self.own.lm_head = self.policy.lm_head
        self.apart, self.aside = NAME, self.own

    @property
    def ranks(self) -> Any:
        return self._ranks

    @property
    def policy(self) -> Any:
        return self.model if self.drafter is None else self.model.target

    @property
    def config(self) -> Any:
        return CONFIGS[POLICY]

    def configuration(self) -> str:
        return f"rank {self.ranks.rank} of {self.ranks.size}, {self.drafter is not None}"


@dataclass
class Place:
    """A service with two versions of a policy and of its drafter, and one of a model with another structure than the
    drafter; and their tensors.
    """

    service: RunningService
    tensors: dict[tuple[str, int], Tensors]

    def check(self, rank: EngineRank, number: int, draft: int) -> None:
        """Compare all parameters with those of fresh loads."""
        engine: Any = rank.engine
        for model, there, version in ((POLICY, engine.policy, number), (DRAFTER, engine.own, draft)):
            fresh = Llama(CONFIGS[model], engine.ranks.rank, engine.ranks.size)
            fresh.load_weights(self.tensors[model, version].items())
            for name, parameter in fresh.named_parameters():
                if (model, name) != (DRAFTER, "lm_head"):
                    assert torch.equal(there.get_parameter(name), parameter), (model, name)
        assert engine.own.lm_head is engine.policy.lm_head
        assert rank.status().served == f"{POLICY}@{number} + {DRAFTER}@{draft}"

    def start(self, ranks: Any) -> EngineRank:
        """A rank that has started with version 1 of both."""
        rank = self.start_policy(ranks)
        loaded = EngineRank(Drafter(rank.engine.aside))
        loaded.load(ModelSource(DRAFTER, self.service.address), 1)
        loaded.close()
        rank.engine.policy.load_weights(self.tensors[POLICY, 1].items())  # type: ignore[attr-defined]  # what both share
        rank.take_over_drafter(loaded)
        return rank

    def start_policy(self, ranks: Any) -> EngineRank:
        """A rank whose drafter was not loaded from the service."""
        rank = EngineRank(Engine(ranks))
        rank.load(ModelSource(POLICY, self.service.address, lane="grpc"), 1)
        return rank

    def both(self, draft: int, of: str = DRAFTER) -> ModelSource:
        return ModelSource(POLICY, self.service.address, lane="grpc").with_draft(f"{of}@{draft}")


class Drafter(Alone):
    """A drafter while it is loaded."""

    @property
    def config(self) -> Any:
        return None

    def configuration(self) -> str:
        return f"drafter, rank {self.model.tp_rank} of {self.model.tp_size}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    tensors = {}
    with (
        running_service(tmp_path_factory.mktemp("store")) as service,
        TrainerClient(service.address) as trainer,
    ):
        for model, number in [(POLICY, 1), (POLICY, 2), (DRAFTER, 1), (DRAFTER, 2), (OTHER, 1)]:
            folder = tmp_path_factory.mktemp("model")
            tiny_model(CONFIGS[model], 10 * len(model) + number).save_pretrained(folder)
            tensors[model, number] = load_file(folder / "model.safetensors")
            if number == 1:
                trainer.register_model(model, folder)
            trainer.push_folder(model, folder).wait(timeout=60)
        yield Place(service, tensors)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHBRIDGE_CACHE", str(tmp_path))


@pytest.fixture
def rank(place: Place) -> Iterator[EngineRank]:
    rank = place.start(OneRank())
    yield rank
    rank.close()


class Counted(Together):
    """Counts agreements."""

    count = 0

    def all_gather_object(self, mine: Any) -> list[Any]:
        self.count += 1
        return super().all_gather_object(mine)


def on_two(do: Callable[[Counted], Any]) -> list[Any]:
    """The results of two ranks in this process."""
    failed: list[BaseException] = []

    def run(ranks: Together) -> Any:
        try:
            return do(Counted(ranks.rank, 2, ranks._barrier, ranks._given))
        except BaseException as error:
            failed.append(error)
            ranks._barrier.abort()  # the other one waits for it

    found = on_all(2, run)
    if failed:
        raise failed[0]
    return found


@pytest.mark.parametrize("staged", [False, True])
def test_two_ranks_prepare_both_while_they_serve_and_take_both_in_as_many_agreements_as_one(
    place: Place, staged: bool
) -> None:
    def both(ranks: Counted) -> list[int]:
        rank = place.start(ranks)
        if staged:
            rank.engine.place = lazy.StagingPlace(torch.zeros(4 << 20, dtype=torch.uint8))
        rank.prepare(2, place.both(2))
        rank.stage(2, place.both(2))
        assert rank.status().prepared == label(POLICY, 2, f"{DRAFTER}@2")
        place.check(rank, 1, 1)
        counts = []
        for number, draft in ((2, 2), (1, 2), (1, 1)):
            ranks.count = 0
            rank.apply(number, place.both(draft))
            counts.append(ranks.count)
            place.check(rank, number, draft)
        assert len(rank.clients) == 1, "there is one connection, whatever the drafter's version is"
        rank.close()
        return counts

    def alone(ranks: Counted) -> list[int]:
        rank = place.start_policy(ranks)
        rank.engine.apart = ""
        rank.connect()
        ranks.count = 0
        rank.apply(2)
        rank.close()
        return [ranks.count] * 3

    assert on_two(both) == on_two(alone)


def test_a_rank_that_fails_takes_both_back_on_all_ranks_and_so_does_undo(place: Place) -> None:
    def fail(ranks: Counted) -> str:
        rank = place.start(ranks)
        fill, failed = rank.engine.fill, []

        def fill_and_fail(*given: Any) -> None:
            fill(*given)
            if ranks.rank and not failed:
                failed.append(given)
                raise RuntimeError("made up")

        rank.engine.fill = fill_and_fail  # type: ignore[method-assign]
        with pytest.raises(WeighbridgeError, match="the engine is back at version 1"):
            rank.apply(2, place.both(2))
        place.check(rank, 1, 1)
        rank.apply(2, place.both(2))
        rank.apply(2, place.both(1))
        rank.undo(2, place.both(2))  # another engine has it, and this one has not
        place.check(rank, 2, 1)
        rank.undo(2, place.both(1))
        place.check(rank, 2, 2)
        rank.close()
        return "both"

    assert on_two(fail) == ["both", "both"]


@pytest.mark.parametrize("where", ["pull", "model", "version"])
def test_a_drafter_that_cannot_be_fetched_leaves_both_as_they_were_on_all_ranks(place: Place, where: str) -> None:
    def fail(ranks: Counted) -> Any:
        rank = place.start(ranks)
        client = rank.client()
        pull = client.pull

        def broken(model: str, *given: Any) -> Any:
            if model == DRAFTER and ranks.rank and len(given) > 1:
                raise Unavailable("made up")
            return pull(model, *given)

        if where == "pull":
            client.pull = broken  # type: ignore[method-assign]
        source = {"pull": place.both(2), "model": place.both(1, "tests/nowhere"), "version": place.both(9)}
        with pytest.raises(WeighbridgeError) as refused:
            rank.apply(2, source[where])
        place.check(rank, 1, 1)
        client.pull = pull  # type: ignore[method-assign]
        rank.apply(2, place.both(2))
        place.check(rank, 2, 2)
        rank.close()
        return str(refused.value)

    said = {"pull": "rank 1: made up", "model": "tests/nowhere", "version": f"{DRAFTER} has no version 9"}
    for refused in on_two(fail):
        assert said[where] in refused


def test_a_version_that_does_not_fit_the_drafter_is_refused_by_its_tensors_and_the_policy_keeps_its_own(
    place: Place, rank: EngineRank
) -> None:
    for known, stale in ((False, "refuse"), (False, "allow"), (True, "refuse")):
        rank.stale_drafter = stale  # type: ignore[assignment]  # by a caller, who names no version then
        if known:  # what versions of the drafter look like
            rank.connect()
        with pytest.raises(WeighbridgeError) as refused:
            rank.apply(2, place.both(1, OTHER))
        assert f"{OTHER}@1" in str(refused.value)
        assert "push the drafter's tensors too" not in str(refused.value)
        assert "model.layers.0.mlp" in str(refused.value)
        place.check(rank, 1, 1)
    for name in ("lacking", "more"):
        specs = rank._recorded.draft_specs  # type: ignore[union-attr]  # it is connected
        changed = specs[1:] if name == "more" else (*specs, specs[0].__class__("fc.weight", *_kind(specs[0])))
        object.__setattr__(rank._recorded, "draft_specs", changed)
        with pytest.raises(WeighbridgeError) as refused:
            rank.apply(2, place.both(2))
        missing = "fc.weight is missing" if name == "lacking" else f"{specs[0].name} is not known"
        assert f"has other tensors than the previous version: {missing}" in str(refused.value)
        place.check(rank, 1, 1)
        object.__setattr__(rank._recorded, "draft_specs", specs)


def _kind(spec: Any) -> tuple[Any, ...]:
    return spec.dtype, spec.shape


def test_a_version_that_leaves_a_part_of_the_drafter_alone_is_refused_by_its_names(
    place: Place, rank: EngineRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = rank.engine.own  # type: ignore[attr-defined]
    load = own.load_weights
    monkeypatch.setattr(own, "load_weights", lambda named: load((n, t) for n, t in named if "down_proj" not in n))
    with pytest.raises(WeighbridgeError, match=rf"{DRAFTER}@2 .*has nothing for drafter.model_layers_0_mlp_down_proj"):
        rank.apply(2, place.both(2))
    place.check(rank, 1, 1)


def test_sleep_that_has_discarded_both_is_followed_by_a_wake_up_that_brings_both(
    place: Place, rank: EngineRank
) -> None:
    rank.apply(2, place.both(1))
    rank.when_asleep = "wait"
    with torch.no_grad():
        for parameter in rank.engine.model.parameters():
            parameter.zero_()
    rank.wake(lost=True, last=True)
    place.check(rank, 2, 1)
    assert rank.status().stale == ""


@pytest.mark.parametrize("names", [False, True])
def test_a_drafter_that_a_version_behind_a_wake_up_leaves_is_stale_and_one_that_it_names_is_not(
    place: Place, rank: EngineRank, monkeypatch: pytest.MonkeyPatch, names: bool
) -> None:
    rank.when_asleep, rank.stale_drafter = "wait", "allow"

    def asleep() -> None:
        raise EngineAsleep("the engine sleeps")

    with monkeypatch.context() as during:
        during.setattr(rank.engine, "check_awake", asleep)
        rank.apply(2, place.both(1) if names else rank.source)
    assert policy_in(rank.status().waiting) == f"{POLICY}@2"
    rank.wake(lost=False, last=True)
    place.check(rank, 2, 1)
    assert rank.status().waiting == ""
    assert ("is stale" in rank.status().stale) == (not names)


def test_the_proof_covers_both_each_by_its_own_version(place: Place, rank: EngineRank) -> None:
    rank.apply(1, place.both(2))
    with EngineClient(place.service.address) as client:

        def proof() -> Any:
            return prove(client, lambda _known: {"rank 0": rank.evidence()}, POLICY, 1)

        assert (proof().verdict, proof().wrong_text) == ("proved", "")
        own = rank.engine.own  # type: ignore[attr-defined]
        with torch.no_grad():
            own.model_norm[3] += 1
        assert proof().ranks["rank 0"].wrong == ("drafter.model_norm",)
        assert rank.compare_with_load().wrong == ("drafter.model_norm",), "its own loader finds it, too"
        place.check(rank, 1, 2)
        rank.held = rank.held.__class__(place.both(1), rank.held.version, 0)  # type: ignore[union-attr]
        wrong = proof().ranks["rank 0"].wrong
        assert "drafter.model_layers_0_self_attn_qkv" in wrong
        assert all(name.startswith("drafter.") for name in wrong), "it has not the version that it says"


def test_a_recording_that_is_known_from_a_proof_before_proves_another_version_of_the_drafter(
    place: Place, rank: EngineRank
) -> None:
    known: dict[str, lazy.Recording] = {}
    sent = []

    def ask(digests: Any) -> dict[str, Any]:
        found = rank.evidence(digests)
        sent.append(bool(found.recorded))
        return {"rank 0": found}

    with EngineClient(place.service.address) as client:
        for draft in (2, 1):
            rank.apply(2, place.both(draft))
            assert prove(client, ask, POLICY, 2, known).verdict == "proved"
    assert sent == [True, False]


def test_an_update_that_names_no_version_of_the_drafter_is_refused_until_it_may_stay_behind(
    place: Place, rank: EngineRank
) -> None:
    for ask in (rank.prepare, rank.apply):
        with pytest.raises(WeighbridgeError, match=f"{POLICY}@2 \\+ {DRAFTER}@1") as refused:
            ask(2)
        assert "name a version of it, as `weighbridge follow --draft` does" in str(refused.value)
    rank.stale_drafter = "allow"
    rank.apply(2)
    place.check(rank, 2, 1)
    assert rank.status().stale.startswith(f"{NAME} is stale: it has kept {DRAFTER}@1")
    rank.stale_drafter = "refuse"
    rank.apply(1)
    place.check(rank, 1, 1)
    assert rank.status().stale == "", "the drafter belongs to the version that was loaded first"
    rank.apply(2, place.both(2))
    place.check(rank, 2, 2)
    assert rank.status().stale == ""


def test_a_drafter_from_elsewhere_has_versions_from_the_first_update_on_that_names_one(place: Place) -> None:
    rank = place.start_policy(OneRank())
    with pytest.raises(WeighbridgeError, match="would keep its weights"):
        rank.apply(2)
    rank.apply(2, place.both(2))
    place.check(rank, 2, 2)
    rank.undo(2)
    place.check(rank, 1, 2)  # the drafter's earlier weights, from elsewhere, cannot be restored
    rank.held = None  # as after an update that could not be taken back
    with pytest.raises(WeighbridgeError, match="would keep its weights"):
        rank.apply(1)
    rank.apply(1, place.both(1))
    place.check(rank, 1, 1)
    rank.close()


def test_two_versions_are_brought_when_both_are_ready(place: Place, rank: EngineRank) -> None:
    with pytest.raises(FailedPrecondition, match="are fetched only when they are ready"):
        rank.prepare_early(3, place.both(2))


@pytest.mark.parametrize("joined", [False, True])
def test_an_engine_whose_drafter_has_no_versions_of_its_own_refuses_them(place: Place, joined: bool) -> None:
    rank = place.start_policy(OneRank())
    rank.engine.apart, aside, rank.engine.aside = "", rank.engine.aside, None
    if joined:
        rank.engine.join(aside)
    with pytest.raises(
        WeighbridgeError,
        match=f"does not accept a version of a drafter in addition to the policy's, such as {DRAFTER}@2",
    ):
        rank.apply(2, place.both(2))
    assert rank.status().served == f"{POLICY}@1"
    rank.close()
