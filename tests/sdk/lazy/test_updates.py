"""Does the recording of a loader bring every later version to the same bits as the loader itself, and lose nothing
silently?
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.reference import tiny_config, tiny_model
from tests.support.services import RunningService, running_service
from weighbridge import EngineClient, Pull, TrainerClient
from weighbridge import _lazy as lazy
from weighbridge._core.dtypes import from_torch
from weighbridge._core.layouts import TensorSpec
from weighbridge.errors import FailedPrecondition, LayoutError, NotFound, WeighbridgeError

NAME = "tests/lazy"
Tensors = Iterable[tuple[str, torch.Tensor]]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    with running_service(tmp_path_factory.mktemp("store"), local_socket="auto") as running:
        yield running


@pytest.fixture(scope="module")
def versions(service: RunningService, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    """The tensors of versions 1 and 2, as transformers has written them."""
    found = []
    with TrainerClient(service.address) as trainer:
        for seed in (0, 1):
            folder = tmp_path_factory.mktemp("model")
            tiny_model(tiny_config("qwen2", tied=False), seed=seed).save_pretrained(folder)
            if seed == 0:
                trainer.register_model(NAME, folder)
            trainer.push_folder(NAME, folder).wait(timeout=60)
            found.append(load_file(folder / "model.safetensors"))
    return found


@pytest.fixture(scope="module", params=["grpc", "local"])
def engine(request: pytest.FixtureRequest, service: RunningService, versions: object) -> Iterator[EngineClient]:
    with EngineClient(service.address, lane=request.param) as client:
        yield client


def specs_of(tensors: dict[str, torch.Tensor]) -> list[TensorSpec]:
    return [TensorSpec(name, from_torch(t.dtype), tuple(t.shape)) for name, t in tensors.items()]


class Engine(torch.nn.Module):
    """One rank of two of an engine in bfloat16: parameters fused, cut and padded as engines do, filled by loaders of
    its own.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], rank: int, device: str = "cpu") -> None:
        super().__init__()
        self.rank = rank
        for name, tensor in tensors.items():
            shape = list(tensor.shape)
            if "k_proj" in name or "v_proj" in name:
                continue
            if "q_proj" in name:
                part = [3 * shape[0] // 2, *shape[1:]]
            elif "embed_tokens" in name or "lm_head" in name:
                part = [shape[0] // 2 + 8, *shape[1:]]
            elif "down_proj" in name:
                part = [shape[0], shape[1] // 2]
            elif "o_proj" in name:
                part = [shape[1], shape[0]]
            else:
                part = shape
            self.register_buffer(name.replace(".", "/"), torch.full(part, -1, dtype=torch.bfloat16, device=device))

    @property
    def targets(self) -> dict[str, torch.Tensor]:
        return dict(self.named_buffers())

    def load_weights(self, weights: Tensors) -> None:
        for name, tensor in weights:
            into = self.get_buffer(name.replace(".", "/").replace("k_proj", "q_proj").replace("v_proj", "q_proj"))
            if any(part in name for part in ("q_proj", "k_proj", "v_proj")):
                rows = into.shape[0] // 3
                start = rows * "qkv".index(name.split(".")[-2][0])
                count = tensor.shape[0] // 2
                into.narrow(0, start, count).copy_(tensor.narrow(0, self.rank * count, count))
                into.narrow(0, start + count, rows - count).zero_()
            elif "embed_tokens" in name or "lm_head" in name:
                count = tensor.shape[0] // 2
                into[:count].copy_(tensor[self.rank * count : (self.rank + 1) * count])
                into[count:].fill_(0)
            elif "down_proj" in name:
                into.copy_(tensor.chunk(2, 1)[self.rank])
            elif "o_proj" in name:
                into.copy_(tensor.t().contiguous())
            else:
                into.data.copy_(tensor.to(torch.float16))


def loaded(tensors: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """The parameters that the loader makes of real tensors."""
    found = Engine(tensors, rank)
    found.load_weights(tensors.items())
    return found.targets


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].equal(tensor), name


@pytest.mark.parametrize("rank", [0, 1])
def test_fetching_while_loading_brings_what_is_copied_and_nothing_else(
    engine: EngineClient, versions: list[dict[str, torch.Tensor]], rank: int
) -> None:
    model = Engine(versions[0], rank)
    source = lazy.Source(engine, NAME, 1)
    model.load_weights(source.tensors())
    assert_same(model.targets, loaded(versions[0], rank))
    assert source.version.number == 1
    assert source.fetched_bytes == lazy.record(source.specs, model.load_weights, model.targets).nbytes


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("prepared", [False, True])
def test_a_recorded_update_equals_the_loader_on_whole_tensors_for_every_later_version(
    engine: EngineClient, versions: list[dict[str, torch.Tensor]], rank: int, prepared: bool
) -> None:
    model = Engine(versions[0], rank)
    recording = lazy.record(specs_of(versions[0]), model.load_weights, model.targets)
    recording = lazy.Recording.from_json(recording.to_json())
    assert not recording.unrecorded
    assert not recording.unwritten
    for number in (1, 2, 1):
        for tensor in model.targets.values():
            tensor.fill_(-2)
        update = lazy.Update(recording, engine.pull(NAME, number, recording.request))
        if prepared:
            update.prepare()
        update.fill_all(model.targets)
        update.close()
        assert_same(model.targets, loaded(versions[number - 1], rank))
        assert update.version.number == number
        assert update.lane == engine._connection.lane._wanted


def test_a_loader_may_be_recorded_on_parameters_without_memory(
    engine: EngineClient, versions: list[dict[str, torch.Tensor]]
) -> None:
    meta = Engine(versions[0], 1, "meta")
    recording = lazy.record(specs_of(versions[0]), meta.load_weights, meta.targets)
    update = lazy.Update(recording, engine.pull(NAME, 2, recording.request))
    update.prepare()
    model = Engine(versions[0], 1)
    for name, tensor in reversed(model.targets.items()):
        update.fill({name: tensor})
    assert_same(model.targets, loaded(versions[1], 1))


def test_a_rank_of_two_fetches_half_of_what_is_cut(versions: list[dict[str, torch.Tensor]]) -> None:
    model = Engine(versions[0], 0)
    recording = lazy.record(specs_of(versions[0]), model.load_weights, model.targets)
    cut = ("q_proj", "k_proj", "v_proj", "embed_tokens", "lm_head", "down_proj")
    expected = sum(t.nbytes // 2 if any(c in name for c in cut) else t.nbytes for name, t in versions[0].items())
    assert recording.nbytes == expected


def one(shape: tuple[int, ...] = (4, 6)) -> list[TensorSpec]:
    return [TensorSpec(name, from_torch(torch.float32), shape) for name in ("a", "b")]


class Loaders:
    """Loaders that do with tensor ``a`` what copying cannot repeat, and copy ``b``."""

    def __init__(self) -> None:
        self.p, self.q, self.r = torch.zeros(4, 6), torch.zeros(4, 6), torch.zeros(4, 6)
        self.targets = {"p": self.p, "q": self.q, "r": self.r}
        self.kept: list[Any] = []

    def computed(self, a: torch.Tensor) -> None:
        self.p.copy_(a * 2)

    def through_memory_of_its_own(self, a: torch.Tensor) -> None:
        between = torch.empty(4, 6)
        between.copy_(a)
        self.p.copy_(between)

    def read_back(self, a: torch.Tensor) -> None:
        self.p.copy_(a)
        self.q.copy_(self.p + 1)

    def changed_in_place(self, a: torch.Tensor) -> None:
        self.p.copy_(a)
        self.p.mul_(3)

    def number(self, a: torch.Tensor) -> None:
        self.p.fill_(a[0, 0].item())

    def changed_before(self, a: torch.Tensor) -> None:
        a += 1
        self.p.copy_(a)

    def bits(self, a: torch.Tensor) -> None:
        self.p.view(torch.int32).copy_(a.view(torch.int32))

    def keeps_it(self, a: torch.Tensor) -> None:
        self.kept.append(a[1:])

    def keeps_a_copy(self, a: torch.Tensor) -> None:
        self.kept.append(a.t().contiguous())

    def in_another_thread(self, a: torch.Tensor) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(self.p.copy_, a).result()

    def something_of_its_own(self, a: torch.Tensor) -> None:
        self.p.copy_(a)
        self.p[0].copy_(torch.arange(6.0))

    def other_memory(self, a: torch.Tensor) -> None:
        self.p.copy_(a)
        self.p.data = torch.zeros(4, 6)

    def scattered(self, a: torch.Tensor) -> None:
        self.p[torch.tensor([0, 2])] = a[:2]

    def joined_with_its_own(self, a: torch.Tensor) -> None:
        self.p.copy_(torch.cat([a[2:], torch.zeros(2, 6)]))


class Leaving(Loaders):
    """Loaders that take elements out of torch, where they cannot be followed."""

    def as_list(self, a: torch.Tensor) -> None:
        self.p.copy_(a)
        self.q.copy_(torch.tensor(self.p.tolist()))

    def as_array(self, a: torch.Tensor) -> None:
        self.p.copy_(a)
        self.q.copy_(torch.from_numpy(self.p.numpy() * 2))

    def changed_as_array(self, a: torch.Tensor) -> None:
        self.p.copy_(a)
        self.p.numpy()[...] *= 2


@pytest.mark.parametrize("way", [name for name in vars(Leaving) if not name.startswith("_")])
def test_elements_that_leave_torch_are_not_recorded(way: str) -> None:
    model = Leaving()

    def load(weights: Tensors) -> None:
        for name, tensor in weights:
            if name == "a":
                getattr(model, way)(tensor)

    assert lazy.record(one(), load, model.targets).unrecorded.keys() >= {"a"}


def test_what_goes_to_where_something_unrecorded_goes_is_not_recorded() -> None:
    model = Loaders()

    def load(weights: Tensors) -> None:
        for name, tensor in weights:
            model.p.copy_(tensor * 2 if name == "a" else tensor)
        model.p[:1].zero_()

    recording = lazy.record(one(), load, model.targets)
    assert recording.unrecorded.keys() == {"a", "b"}
    assert not recording.steps


def test_elements_that_are_written_twice_do_not_stand_for_others() -> None:
    model = Loaders()

    def load(weights: Tensors) -> None:
        for _, tensor in weights:
            model.p[:2].copy_(tensor[:2])

    assert lazy.record(one(), load, model.targets).unwritten == {"p": 12, "q": 24, "r": 24}


@pytest.mark.parametrize("way", [name for name in vars(Loaders) if not name.startswith("_")])
def test_what_cannot_be_repeated_by_copying_is_named_and_nothing_else_is(way: str) -> None:
    model = Loaders()

    def load(weights: Tensors) -> None:
        for name, tensor in weights:
            getattr(model, way)(tensor) if name == "a" else model.r.copy_(tensor)

    recording = lazy.record(one(), load, model.targets)
    assert recording.unrecorded.keys() == {"a"}
    assert len(recording.unrecorded["a"]) > 10
    assert recording.specs.keys() == {"b"}
    assert recording.by_target.keys() == {"r"}


@pytest.mark.parametrize("copied", [False, True])
def test_a_parameter_that_is_replaced_by_who_knows_what_leaves_nothing_recorded(copied: bool) -> None:
    model = Loaders()

    def load(weights: Tensors) -> None:
        for name, tensor in weights:
            if name == "a":
                model.p.data = torch.empty(4, 6).copy_(tensor) if copied else tensor
            else:
                model.q.copy_(tensor)

    assert lazy.record(one(), load, model.targets).unrecorded.keys() == {"a", "b"}


def test_what_nothing_goes_to_is_named() -> None:
    model = Loaders()

    def load(weights: Tensors) -> None:
        for name, tensor in weights:
            if name == "a":
                model.p[1:].copy_(tensor[1:])

    recording = lazy.record(one(), load, model.targets)
    assert recording.unwritten == {"p": 6, "q": 24, "r": 24}


def test_the_last_of_two_that_go_to_one_place_wins(
    engine: EngineClient, versions: list[dict[str, torch.Tensor]]
) -> None:
    names = [name for name in versions[0] if "k_proj.weight" in name][:2]
    target = torch.empty_like(versions[0][names[0]])
    other = torch.empty_like(target)

    def load(weights: Tensors) -> None:
        found = dict(weights)
        for name in (*names, names[0]):
            target.copy_(found[name])
        other.copy_(found[names[1]])
        target[:1].zero_()
        target[:1, :2].copy_(found[names[1]][:1, :2])

    targets = {"target": target, "other": other}
    recording = lazy.record(specs_of(versions[0]), load, targets)
    load(versions[1].items())
    expected = {name: tensor.clone() for name, tensor in targets.items()}
    for prepare in (False, True):
        for tensor in targets.values():
            tensor.fill_(9)
        update = lazy.Update(recording, engine.pull(NAME, 2, recording.request))
        if prepare:
            update.prepare()
        update.fill_all(targets)
        assert_same(targets, expected)


def test_tensors_that_do_not_fit_are_named(versions: list[dict[str, torch.Tensor]]) -> None:
    def load(weights: Tensors) -> None:
        for _, tensor in weights:
            torch.zeros(3, 3).copy_(tensor)

    with pytest.raises(LayoutError, match=r"a F32\[4, 6\] does not fit.*\[4, 6\].*\[3, 3\]"):
        lazy.record(one(), load, {})


def test_parameters_that_lie_otherwise_than_recorded_are_refused_before_any_is_touched(
    engine: EngineClient, versions: list[dict[str, torch.Tensor]]
) -> None:
    model = Engine(versions[0], 0)
    recording = lazy.record(specs_of(versions[0]), model.load_weights, model.targets)
    targets = {name: torch.full_like(tensor, 5) for name, tensor in model.targets.items()}
    last = list(targets)[-1]
    update = lazy.Update(recording, engine.pull(NAME, 1, recording.request))
    with pytest.raises(LayoutError, match=last):
        update.fill_all({**targets, last: targets[last].float()})
    with pytest.raises(FailedPrecondition, match=last):
        update.fill_all({name: tensor for name, tensor in targets.items() if name != last})
    assert all((tensor == 5).all() for tensor in targets.values())


def test_a_version_without_a_tensor_that_was_recorded_is_refused(engine: EngineClient) -> None:
    model = Loaders()
    recording = lazy.record(one(), lambda weights: [model.p.copy_(t) for _, t in weights], model.targets)
    with pytest.raises(NotFound, match=r"\ba\b"):
        lazy.Update(recording, engine.pull(NAME, 1, recording.request))


def test_a_tensor_of_another_shape_than_recorded_is_refused(
    engine: EngineClient, versions: list[dict[str, torch.Tensor]]
) -> None:
    name = next(name for name in versions[0] if "k_proj.weight" in name)
    target = torch.zeros(2, 2)
    spec = TensorSpec(name, from_torch(torch.float32), (2, 2))
    recording = lazy.record([spec], lambda weights: [target.copy_(t) for _, t in weights], {"p": target})
    with pytest.raises(FailedPrecondition, match=name):
        lazy.Update(recording, engine.pull(NAME, 1, recording.request))


def test_nothing_is_touched_when_the_service_dies_while_bytes_are_prepared(
    versions: list[dict[str, torch.Tensor]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("model")
    tiny_model(tiny_config("qwen2", tied=False), seed=0).save_pretrained(folder)
    with running_service(tmp_path_factory.mktemp("store")) as mortal:
        with TrainerClient(mortal.address) as trainer:
            trainer.register_model(NAME, folder)
            trainer.push_folder(NAME, folder).wait(timeout=60)
        client = EngineClient(mortal.address, retry_seconds=0.5)
        model = Engine(versions[0], 0)
        recording = lazy.record(specs_of(versions[0]), model.load_weights, model.targets)
        update = lazy.Update(recording, client.pull(NAME, 1, recording.request))
    for tensor in model.targets.values():
        tensor.fill_(4)
    with pytest.raises(WeighbridgeError):
        update.prepare()
    assert all((tensor == 4).all() for tensor in model.targets.values())
    client.close()


def test_a_recording_of_another_format_is_refused() -> None:
    for text in ("{}", "[]", "", '{"format":99}', '{"format":2,"specs":3}'):
        with pytest.raises(WeighbridgeError, match="recording"):
            lazy.Recording.from_json(text)


def test_a_loader_that_was_recorded_does_not_run_again_for_the_same_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHBRIDGE_CACHE", str(tmp_path))
    model = Loaders()
    runs = []

    def load(weights: Tensors) -> None:
        runs.append(1)
        for name, tensor in weights:
            model.targets["p" if name == "a" else "q"].copy_(tensor)

    def recorded(specs: list[TensorSpec] = one(), configuration: str = "tp 2") -> lazy.Recording:  # noqa: B008
        return lazy.remembered(specs, load, model.targets, configuration)

    first = recorded()
    assert recorded() == first
    assert len(runs) == 1
    recorded(configuration="tp 4")
    recorded(one((4, 1)))
    model.targets["q"] = model.q = torch.zeros(4, 6).bfloat16()
    recorded()
    assert len(runs) == 4
    [file, *_] = sorted(tmp_path.rglob("*.json"))
    for damaged in ("", file.read_text()[:-9], "{}"):
        for each in tmp_path.rglob("*.json"):
            each.write_text(damaged)
        recorded()
    assert len(runs) == 7
    monkeypatch.setenv("WEIGHBRIDGE_CACHE", "/proc/nowhere")
    assert recorded().specs == first.specs


def test_what_comes_ahead_is_not_overwritten_by_what_the_loader_did_before(
    engine: EngineClient, versions: list[dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = [name for name in versions[0] if "k_proj.weight" in name][:2]
    targets = {name: torch.empty_like(versions[0][one]) for name in ("plain", "padded")}

    def load(weights: Tensors) -> None:
        found = dict(weights)
        targets["plain"].copy_(found[one])
        targets["padded"].zero_()
        targets["padded"][:1].copy_(found[other][:1])

    recording = lazy.record(specs_of(versions[0]), load, targets)
    load(versions[1].items())
    expected = {name: tensor.clone() for name, tensor in targets.items()}
    into = Pull.into

    def all_ahead(pull: Pull, tensor_for: Callable[[int], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """As a GPU's copy engines do, which are given some tensors before the first is waited for."""
        return iter(list(into(pull, tensor_for)))

    monkeypatch.setattr(Pull, "into", all_ahead)
    for tensor in targets.values():
        tensor.fill_(9)
    lazy.Update(recording, engine.pull(NAME, 2, recording.request)).fill_all(targets)
    assert_same(targets, expected)
