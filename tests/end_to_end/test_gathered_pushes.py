"""Whole tensors that pass by -> service -> engine: does each rank's share arrive, though a tensor is gone when the next
one is asked for?

Ranks are threads: a push has no collective of its own. Every generator overwrites what it gave before it gives the
next.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PretrainedConfig

from tests.support.reference import tiny_config, tiny_model
from tests.support.services import RunningService, running_service
from weighbridge import EngineClient, LayoutError, PushReport, TrainerClient, VersionFailed, WeighbridgeError

BUFFER = 2 << 20
LARGE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "vocab_size": 6007,
    "num_hidden_layers": 2,
}
"""Tensors that ranks share, and more of them than `BUFFER`."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("store")
    with running_service(folder, local_socket=str(folder / "lane.sock")) as running:
        yield running


def register(service: RunningService, name: str, config: PretrainedConfig, folder: Path, dtype: str = "fp32") -> None:
    config.save_pretrained(folder)
    with TrainerClient(service.address) as trainer:
        trainer.register_model(name, folder, dtype=dtype)


@dataclass
class Gathering:
    """The tensors that a framework gives to a rank: one buffer after another, each overwritten before the next.

    Attributes:
        state: the tensors.
        given: the number of tensors that were requested.
    """

    state: Mapping[str, Any]
    given: int = field(default=0, init=False)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for name, tensor in self.state.items():
            self.given += 1
            passing = tensor.detach().clone() if isinstance(tensor, Tensor) else tensor
            yield name, passing
            if isinstance(passing, Tensor):
                passing.fill_(77)


def push_all(
    service: RunningService,
    name: str,
    gatherings: list[Gathering],
    *,
    lane: str,
    step: int = 1,
    hold: bool = False,
    **options: Any,
) -> tuple[int, list[PushReport]]:
    """The version that ranks push together, and their reports; with ``hold`` each declares the tensors that it is given
    as held.
    """

    def push(rank: int) -> tuple[int, PushReport]:
        given = gatherings[rank]
        held = {"held": list(given.state)} if hold else {}
        with TrainerClient(service.address, lane=lane) as trainer:
            handle = trainer.push_gathered(
                name, given, step=step, rank=rank, world_size=len(gatherings), **held, **options
            )
            return handle.wait(timeout=60).number, handle.report()

    with ThreadPoolExecutor(len(gatherings)) as pool:
        found = list(pool.map(push, range(len(gatherings))))
    assert len({number for number, _ in found}) == 1
    return found[0][0], [report for _, report in found]


def pulled(service: RunningService, name: str, number: int) -> dict[str, Tensor]:
    with EngineClient(service.address) as engine:
        return dict(engine.pull(name, number))


def llama(**fields: Any) -> PretrainedConfig:
    return tiny_config("llama", tied=False, **{**LARGE, **fields})


@pytest.mark.parametrize("lane", ["local", "grpc"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_shares_of_all_ranks_are_the_model_and_nearly_equal(
    service: RunningService, tmp_path: Path, ranks: int, lane: str
) -> None:
    name = f"tests/shares-{ranks}-{lane}"
    register(service, name, llama(), tmp_path)
    state = tiny_model(llama(), seed=5).state_dict()
    gatherings = [Gathering(state) for _ in range(ranks)]
    number, reports = push_all(service, name, gatherings, lane=lane, buffer_bytes=BUFFER)

    found = pulled(service, name, number)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in state.items())
    nbytes = sum(tensor.nbytes for tensor in state.values())
    assert nbytes > 4 * BUFFER
    assert sum(report.stream_bytes for report in reports) == nbytes
    assert max(report.stream_bytes for report in reports) < 1.1 * nbytes / ranks
    assert {(report.lane, report.cast_tensors) for report in reports} == {(lane, 0)}
    assert [each.given for each in gatherings] == [len(state)] * ranks


@pytest.mark.parametrize("lane", ["local", "grpc"])
def test_ranks_that_hold_different_tensors_push_each_once(service: RunningService, tmp_path: Path, lane: str) -> None:
    name = f"tests/held-{lane}"
    config = tiny_config("qwen3_moe", tied=False)
    register(service, name, config, tmp_path)
    state = dict(tiny_model(config, seed=5).state_dict())
    # two pipeline stages, of which the first one is on two ranks that share its experts out, and on a third one that
    # holds nothing else
    first, last = (
        {key: value for key, value in state.items() if (".layers.0." in key or "embed" in key) == is_first}
        for is_first in (True, False)
    )
    experts = [key for key in first if ".experts." in key]
    evens = {key: value for key, value in first.items() if key not in experts[1::2]}
    odds = {key: value for key, value in first.items() if key not in experts[::2]}
    gatherings = [Gathering(each) for each in (evens, odds, last, evens)]
    number, reports = push_all(service, name, gatherings, lane=lane, hold=True)
    found = pulled(service, name, number)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in state.items())
    assert sum(report.stream_bytes for report in reports) == sum(each.nbytes for each in state.values())

    without = Gathering({key: value for key, value in last.items() if key != "model.norm.weight"})
    said = refused(service, name, [*gatherings[:2], without], step=2, lane=lane, hold=True)
    assert all("model.norm.weight" in text for text in said)


def test_the_last_pipeline_stage_may_be_given_the_head_that_is_tied_to_the_first_one_s_embedding(
    service: RunningService, tmp_path: Path
) -> None:
    name = "tests/held-tied"
    config = tiny_config("qwen3", tied=True, **LARGE)
    register(service, name, config, tmp_path)
    state = dict(tiny_model(config, seed=5).state_dict())
    is_first = {key: ".layers.0." in key or "embed" in key for key in state}
    stages = [{key: state[key] for key in state if is_first[key] == first} for first in (True, False)]
    assert "lm_head.weight" in stages[1]
    number, _ = push_all(service, name, [Gathering(each) for each in stages], lane="grpc", hold=True)
    found = pulled(service, name, number)
    assert found.keys() == state.keys() - {"lm_head.weight"}
    assert all(torch.equal(tensor, state[key]) for key, tensor in found.items())


@pytest.mark.parametrize("lane", ["local", "grpc"])
def test_a_tensor_is_let_go_of_before_the_next_one_is_asked_for(
    service: RunningService, tmp_path: Path, lane: str
) -> None:
    name = f"tests/let-go-{lane}"
    register(service, name, llama(), tmp_path)
    state = tiny_model(llama(), seed=5).state_dict()
    held: list[str] = []

    class Gathered:
        """One tensor after another, each in memory of its own, which is seen to be freed."""

        def __init__(self) -> None:
            self._left = iter(state.items())
            self._last: Callable[[], object] = lambda: None

        def __iter__(self) -> Gathered:
            return self

        def __next__(self) -> tuple[str, Tensor]:
            key, tensor = next(self._left)
            if self._last() is not None:
                held.append(f"the tensor before {key}")
            memory = tensor.numpy().copy()
            self._last = weakref.ref(memory)
            return key, torch.from_numpy(memory)

    with TrainerClient(service.address, lane=lane) as trainer:
        pushed = trainer.push_gathered(name, Gathered(), step=1, rank=0, world_size=1, buffer_bytes=BUFFER)
        assert pushed.wait(timeout=60).number == 1
    assert held == []


@pytest.mark.parametrize("lane", ["local", "grpc"])
def test_casts_and_non_finite_elements_are_counted_as_they_pass(
    service: RunningService, tmp_path: Path, lane: str
) -> None:
    name = f"tests/casts-{lane}"
    register(service, name, llama(), tmp_path, "bf16")
    state = dict(tiny_model(llama(), seed=5).state_dict())
    state["model.norm.weight"] = state["model.norm.weight"].bfloat16()
    broken = state["model.layers.1.mlp.up_proj.weight"] = state["model.layers.1.mlp.up_proj.weight"].clone()
    broken[3, 5], broken[900, 0] = float("nan"), float("inf")
    number, reports = push_all(service, name, [Gathering(state), Gathering(state)], lane=lane, buffer_bytes=BUFFER)

    found = pulled(service, name, number)
    for key, tensor in state.items():
        assert torch.equal(found[key], tensor.bfloat16()) or key == "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(found["model.layers.1.mlp.up_proj.weight"].isfinite(), broken.isfinite())
    assert sum(report.nonfinite_elements or 0 for report in reports) == 2
    assert {key for report in reports for key, _ in report.nonfinite_tensors} == {"model.layers.1.mlp.up_proj.weight"}
    assert sum(report.cast_tensors for report in reports) >= len(state) - 1
    with TrainerClient(service.address) as trainer:
        assert trainer.version(name, number).held == ("nonfinite",)


def test_stacked_experts_and_merged_gates_are_taken_apart(service: RunningService, tmp_path: Path) -> None:
    config = tiny_config("qwen3_moe", tied=False)
    register(service, "tests/stacked", config, tmp_path)
    state = dict(tiny_model(config, seed=5).state_dict())
    stacked = dict(state)
    for stem in sorted({key.partition(".experts.")[0] for key in state if ".experts." in key}):
        count = len([key for key in state if key.startswith(f"{stem}.experts.") and key.endswith("down_proj.weight")])
        of = {
            kind: torch.stack([stacked.pop(f"{stem}.experts.{index}.{kind}.weight") for index in range(count)])
            for kind in ("gate_proj", "up_proj", "down_proj")
        }
        stacked[f"{stem}.experts.gate_up_proj"] = torch.cat([of["gate_proj"], of["up_proj"]], dim=1)
        stacked[f"{stem}.experts.down_proj"] = of["down_proj"]
    assert len(stacked) < len(state)
    number, _ = push_all(service, "tests/stacked", [Gathering(stacked), Gathering(stacked)], lane="local")
    found = pulled(service, "tests/stacked", number)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in state.items())


def test_a_head_that_is_the_embedding_may_be_given_and_another_may_not(service: RunningService, tmp_path: Path) -> None:
    config = tiny_config("qwen3", tied=True, **LARGE)
    register(service, "tests/tied", config, tmp_path)
    state = dict(tiny_model(config, seed=5).state_dict())
    assert "lm_head.weight" in state
    first = {
        "lm_head.weight": state.pop("lm_head.weight"),
        **state,
        "model.rotary_emb.inv_freq": torch.ones(4),
    }
    number, _ = push_all(service, "tests/tied", [Gathering(first), Gathering(first)], lane="local")
    found = pulled(service, "tests/tied", number)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in state.items())

    # each rank compares its own rows: a difference in the other rank's rows is refused there, and reported to both
    changed = first["lm_head.weight"].clone()
    changed[0, 0] += 1
    other = {**first, "lm_head.weight": changed}
    said = refused(service, "tests/tied", [Gathering(other), Gathering(other)], step=2)
    assert any("lm_head.weight: the model has no such tensor" in text for text in said)


def refused(
    service: RunningService,
    name: str,
    gatherings: list[Gathering],
    *,
    step: int,
    lane: str = "grpc",
    hold: bool = False,
) -> list[str]:
    """The error of each rank in a push that fails; each rank must have consumed all tensors."""

    def push(rank: int) -> str:
        given = gatherings[rank]
        given.given = 0
        held = {"held": list(given.state)} if hold else {}
        with TrainerClient(service.address, lane=lane) as trainer, pytest.raises(WeighbridgeError) as error:
            trainer.push_gathered(
                name, given, step=step, rank=rank, world_size=len(gatherings), buffer_bytes=BUFFER, **held
            ).wait(timeout=60)
        return str(error.value)

    with ThreadPoolExecutor(len(gatherings)) as pool:
        said = list(pool.map(push, range(len(gatherings))))
    assert [each.given for each in gatherings] == [len(each.state) for each in gatherings]
    return said


@pytest.mark.parametrize("lane", ["local", "grpc"])
def test_all_that_is_wrong_is_named_nothing_becomes_visible_and_the_next_push_works(
    service: RunningService, tmp_path: Path, lane: str
) -> None:
    name = f"tests/wrong-{lane}"
    register(service, name, llama(), tmp_path)
    state = dict(tiny_model(llama(), seed=5).state_dict())
    wrong = {
        **{key: value for key, value in state.items() if key != "model.layers.1.mlp.up_proj.weight"},
        "model.norm.weight": torch.ones(63),
        "model.norms.weight": torch.ones(256),
        "model.layers.0.mlp.up_proj.weight": torch.ones(1024, 256, dtype=torch.int32),
        "step": 17,
    }
    said = refused(service, name, [Gathering(wrong), Gathering(wrong)], step=1, lane=lane)
    expected = [
        "model.norm.weight is [63], and the model has model.norm.weight F32[256]",
        "model.norms.weight: the model has no such tensor; did you mean model.norm.weight?",
        "model.layers.0.mlp.up_proj.weight is torch.int32, which is not cast",
        "model.layers.1.mlp.up_proj.weight F32[1024, 256] is missing",
        "step is a int, not a tensor",
    ]
    assert any(all(text in each for text in expected) for each in said), said
    with TrainerClient(service.address) as trainer:
        assert trainer.versions(name) == []
    number, _ = push_all(service, name, [Gathering(state), Gathering(state)], lane=lane, step=2)
    assert torch.equal(pulled(service, name, number)["model.norm.weight"], state["model.norm.weight"])


def test_a_version_that_ends_midway_ends_the_push_and_all_is_still_taken(
    service: RunningService, tmp_path: Path
) -> None:
    name = "tests/midway"
    register(service, name, llama(), tmp_path)
    state = tiny_model(llama(), seed=5).state_dict()

    class Aborting(Gathering):
        def __iter__(self) -> Iterator[tuple[str, Any]]:
            for each in super().__iter__():
                if self.given == len(self.state) // 2:
                    with TrainerClient(service.address) as trainer:
                        (version,) = trainer.versions(name, include_invisible=True)
                        trainer.abort(name, version.number, "enough")
                yield each

    gathering = Aborting(state)
    with TrainerClient(service.address, lane="grpc") as trainer:
        with pytest.raises(VersionFailed, match="enough"):
            trainer.push_gathered(name, gathering, step=1, rank=0, world_size=1, buffer_bytes=BUFFER).wait(timeout=60)
        assert gathering.given == len(state)
        handle = trainer.push_gathered(name, Gathering(state), step=2, rank=0, world_size=1)
        assert torch.equal(
            pulled(service, name, handle.wait(timeout=60).number)["lm_head.weight"], state["lm_head.weight"]
        )


def test_what_the_framework_raises_passes_through_and_gives_the_version_up(
    service: RunningService, tmp_path: Path
) -> None:
    name = "tests/raising"
    register(service, name, llama(), tmp_path)
    state = tiny_model(llama(), seed=5).state_dict()

    def gathered() -> Iterator[tuple[str, Tensor]]:
        yield from list(state.items())[:3]
        raise RuntimeError("NCCL has timed out")

    with TrainerClient(service.address) as trainer:
        with pytest.raises(RuntimeError, match="NCCL has timed out"):
            trainer.push_gathered(name, gathered(), step=1, rank=0, world_size=1)
        (version,) = trainer.versions(name, include_invisible=True)
        assert version.state.given_up
        assert "NCCL has timed out" in version.error
        with pytest.raises(LayoutError, match="is missing"):
            trainer.push_gathered(name, iter(()), step=2, rank=0, world_size=1)
