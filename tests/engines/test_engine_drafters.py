"""Does the drafter of an engine that decodes speculatively follow the versions of its model, and is nothing of it stale
unsaid?
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.engines.test_early_staging import begin, counted
from tests.engines.test_engine_model import Alone
from tests.support.example_engine import Llama
from tests.support.raw_clients import RawClient, cut
from tests.support.reference import tiny_config, tiny_model
from tests.support.services import RunningService, running_service
from tests.support.waiting import eventually
from weighbridge import EngineClient, TrainerClient
from weighbridge import _lazy as lazy
from weighbridge.errors import FailedPrecondition, WeighbridgeError
from weighbridge.follow.proving import prove
from weighbridge.integrations.engine_rank.rank import EngineRank
from weighbridge.integrations.engine_rank.source import ModelSource

MODEL = "tests/drafted"
CONFIG = tiny_config("llama", tied=False, head_dim=8)
OWN = "model.layers.3.mlp.up_proj.weight"
Tensors = dict[str, torch.Tensor]


class Head(torch.nn.Module):
    """An output layer, in a module of its own."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


class Drafter(torch.nn.Module):
    """Has a part of the version for itself, and the output layer of the model in place of its own.

    Its loader still puts into that what the checkpoint has for its own one: here the embeddings.
    """

    def __init__(self, model: Llama, own: str = OWN) -> None:
        super().__init__()
        self._takes = own
        self.own = torch.nn.Parameter(torch.zeros(96, 64))
        self.head = Head(model.get_parameter("lm_head"))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == self._takes:
                self.own.data.copy_(tensor)
            elif name == "model.embed_tokens.weight":
                self.head.weight.data.copy_(tensor)


@dataclass
class Place:
    """A service with two versions, and their tensors."""

    service: RunningService
    tensors: dict[int, Tensors]

    def check(self, rank: EngineRank, model: Llama, drafter: Drafter, number: int) -> None:
        fresh = Llama(CONFIG, 0, 1)
        fresh.load_weights(self.tensors[number].items())
        for name, parameter in fresh.named_parameters():
            assert torch.equal(model.get_parameter(name), parameter), name
        assert torch.equal(drafter.own, self.tensors[number][OWN])
        assert rank.status().served == f"{MODEL}@{number}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    tensors = {}
    with (
        running_service(
            tmp_path_factory.mktemp("store"),
            local_socket=str(tmp_path_factory.mktemp("lane") / "lane.sock"),
        ) as service,
        TrainerClient(service.address) as trainer,
    ):
        for number in (1, 2):
            folder = tmp_path_factory.mktemp("model")
            tiny_model(CONFIG, number).save_pretrained(folder)
            tensors[number] = load_file(folder / "model.safetensors")
            if number == 1:
                trainer.register_model(MODEL, folder)
            trainer.push_folder(MODEL, folder).wait(timeout=60)
        yield Place(service, tensors)


@pytest.fixture
def model() -> Llama:
    return Llama(CONFIG, 0, 1)


@pytest.fixture
def rank(place: Place, model: Llama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineRank]:
    """An engine with version 1, whose drafter is not known yet."""
    monkeypatch.setenv("WEIGHBRIDGE_CACHE", str(tmp_path))
    rank = EngineRank(Named(model))
    rank.load(ModelSource(MODEL, place.service.address, lane="auto"), 1)
    yield rank
    rank.close()


class Named(Alone):
    """Its loader makes other choices with a drafter."""

    def configuration(self) -> str:
        return f"{self.drafter is not None}"


def joined(rank: EngineRank, model: Llama) -> Drafter:
    drafter = Drafter(model)
    rank.engine.join(drafter)
    rank.connect()
    return drafter


@pytest.mark.parametrize("staged", [False, True])
def test_a_drafter_has_what_a_version_has_for_it_and_what_both_share_is_the_models(
    place: Place, rank: EngineRank, model: Llama, staged: bool
) -> None:
    drafter = joined(rank, model)
    if staged:
        rank.engine.place = lazy.StagingPlace(torch.zeros(4 << 20, dtype=torch.uint8))
    for number in (2, 1, 2):
        rank.apply(number)
        place.check(rank, model, drafter, number)
    rank.undo(2)
    place.check(rank, model, drafter, 1)


def test_a_drafter_is_staged_while_its_version_arrives(
    place: Place, rank: EngineRank, model: Llama, caplog: pytest.LogCaptureFixture
) -> None:
    drafter = joined(rank, model)
    there = rank.engine.place = lazy.StagingPlace(torch.zeros(4 << 20, dtype=torch.uint8))
    whole = rank._recorded.recording.whole  # type: ignore[union-attr]  # it is connected
    arrays = {name: (tensor + 1).numpy() for name, tensor in place.tensors[2].items()}
    new = {name: torch.from_numpy(array) for name, array in arrays.items()}
    with RawClient(place.service.address) as raw, counted(caplog) as found:
        number, [stream] = begin(raw, arrays, 3, model=MODEL)
        rank.prepare_early(number)
        raw.push(MODEL, number, cut(stream))
        eventually(lambda: torch.equal(there.tensors(whole)["drafter.own"], new[OWN]))
        raw.seal(MODEL, number)
        rank.apply(number)
    assert found[0] == found[1] > 0
    place.tensors[number] = new
    place.check(rank, model, drafter, number)


def test_a_shared_tensor_is_written_once_and_the_proof_covers_what_the_drafter_has_for_itself(
    place: Place, rank: EngineRank, model: Llama
) -> None:
    drafter = joined(rank, model)
    rank.apply(2)
    evidence = rank.evidence()
    assert evidence.unseen == {}
    assert evidence.digests.keys() == {*dict(model.named_parameters()), "drafter.own"}
    assert len(evidence.digests["lm_head"]) == 1
    with EngineClient(place.service.address) as client:

        def wrong() -> tuple[str, ...]:
            return prove(client, lambda _known: {"rank 0": rank.evidence()}, MODEL, 2).ranks["rank 0"].wrong

        assert wrong() == ()
        with torch.no_grad():
            drafter.own[3, 5] += 1
        assert wrong() == ("drafter.own",)
    assert rank.compare_with_load().wrong == ("drafter.own",), "the engine's own loaders find it, too"
    place.check(rank, model, drafter, 2)


def test_a_drafter_goes_back_with_its_model(
    place: Place, rank: EngineRank, model: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = joined(rank, model)
    fill, failed = rank.engine.fill, []

    def fill_and_fail(*given: object) -> None:
        fill(*given)  # type: ignore[arg-type]
        if not failed:
            failed.append(given)
            raise RuntimeError("made up")

    monkeypatch.setattr(rank.engine, "fill", fill_and_fail)
    with pytest.raises(WeighbridgeError, match="the engine is back at version 1"):
        rank.apply(2)
    place.check(rank, model, drafter, 1)


def test_a_version_without_the_drafters_tensors_is_refused_by_their_names(
    place: Place, rank: EngineRank, model: Llama
) -> None:
    rank.engine.join(Drafter(model, own="model.mtp.weight"))
    with pytest.raises(WeighbridgeError, match=r"has nothing for drafter\.own: 6144 of 6144 elements"):
        rank.apply(2)
    assert rank.status().served == f"{MODEL}@1"
    assert torch.equal(model.get_parameter("lm_head"), place.tensors[1]["lm_head.weight"])


def test_a_version_without_the_drafters_tensors_leaves_it_as_it_is_if_that_is_allowed_and_it_is_said_to_be_stale(
    place: Place, rank: EngineRank, model: Llama
) -> None:
    drafter = Drafter(model, own="model.mtp.weight")
    rank.engine.join(drafter, "the drafter of acme (mtp)")
    rank.stale_drafter = "allow"
    rank.apply(2)
    fresh = Llama(CONFIG, 0, 1)
    fresh.load_weights(place.tensors[2].items())
    assert all(torch.equal(model.get_parameter(name), each) for name, each in fresh.named_parameters())
    assert torch.equal(drafter.own, torch.zeros(96, 64))
    assert rank.status().stale.startswith("the drafter of acme (mtp) is stale")
    assert rank.evidence().unseen == {"the drafter of acme (mtp)": "updates do not change it"}
    assert rank.compare_with_load().wrong == ()
    rank.apply(1)
    assert rank.status().stale == "", "both are of the version that was loaded first"


def test_a_version_that_does_not_fit_the_model_itself_leaves_the_drafter_in_step(
    place: Place, rank: EngineRank, model: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = Drafter(model)
    rank.engine.join(drafter)
    rank.stale_drafter = "allow"

    def fail(_self: object, _tensors: object) -> None:
        raise KeyError("made up")

    with monkeypatch.context() as patched:
        patched.setattr(Llama, "load_weights", fail)
        patched.setattr(Drafter, "load_weights", fail)
        with pytest.raises(WeighbridgeError, match="the engine's loader cannot load"):
            rank.prepare(2)
    rank.apply(2)
    place.check(rank, model, drafter, 2)
    assert rank.status().stale == ""


def test_quantized_weights_do_not_hide_that_a_version_has_nothing_for_the_drafter(
    rank: EngineRank, model: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank.engine, "spare", lambda parameter: parameter.numel())
    rank.engine.join(Drafter(model, own="model.mtp.weight"))
    with pytest.raises(WeighbridgeError, match=r"has nothing for drafter\.own"):
        rank.apply(2)


def test_a_version_of_another_configuration_is_refused_with_a_drafter_as_without_one(
    rank: EngineRank, model: Llama
) -> None:
    model.config = tiny_config("llama", tied=False, head_dim=8, hidden_size=128)  # type: ignore[assignment]  # seen as a module
    rank.engine.join(Drafter(model))
    with pytest.raises(WeighbridgeError, match="hidden_size is 64, and 128 in the engine"):
        rank.apply(2)


def test_a_drafter_whose_loader_computes_is_refused(rank: EngineRank, model: Llama) -> None:
    class Scaling(Drafter):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            super().load_weights((name, tensor * 2 if name == OWN else tensor) for name, tensor in weights)

    rank.engine.join(Scaling(model))
    with pytest.raises(FailedPrecondition, match="into the engine's drafter cannot be recorded") as refused:
        rank.connect()
    assert "without speculative decoding" in refused.value.fix


def test_a_drafter_that_versions_leave_alone_is_refused_until_that_is_allowed_and_then_said_to_be_stale(
    place: Place, rank: EngineRank, model: Llama
) -> None:
    rank.engine.apart = "the drafter acme/eagle (eagle3)"
    for ask in (rank.prepare, rank.prepare_early, rank.apply):
        with pytest.raises(WeighbridgeError) as refused:
            ask(2)
        assert f"{rank.engine.apart} would keep its weights when the engine takes {MODEL}@2" in str(refused.value)
    assert (rank.status().served, rank.status().stale) == (f"{MODEL}@1", "")
    rank.apply(1)  # as wake-ups do that bring back what the engine had
    rank.stale_drafter = "allow"
    rank.apply(2)
    assert rank.status().stale.startswith(f"{rank.engine.apart} is stale")
    assert rank.evidence().unseen == {rank.engine.apart: "updates do not change it"}
    rank.apply(1)
    assert rank.status().stale == "", "both are of the version that was loaded first"
    rank.when_asleep = "wait"
    rank.wake(lost=True, last=True)
    assert rank.status().served == f"{MODEL}@1"
    assert "lost its weights while the engine slept" in rank.status().stale


def test_an_engine_goes_back_to_its_version_though_its_drafter_may_not_be_left_behind(
    rank: EngineRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.engine.apart = "the drafter acme/eagle (eagle3)"

    def fail(_source: object) -> None:
        raise RuntimeError("made up")

    monkeypatch.setattr(rank.engine, "load_again", fail)
    with pytest.raises(WeighbridgeError, match="the engine is back at version 1"):
        rank.compare_with_load()
    for back in (partial(rank.undo, 2), partial(rank.apply, 1)):
        rank.stale_drafter = "allow"
        rank.apply(2)
        rank.stale_drafter = "refuse"
        back()
        assert (rank.status().served, rank.status().stale) == (f"{MODEL}@1", "")
    with pytest.raises(WeighbridgeError, match="would keep its weights"):
        rank.prepare(2)
