"""Versions in spare memory beside the parameters: do they come from there with the loader's bits, and is nothing
touched before?
"""

from __future__ import annotations

import random

import pytest
import torch

from tests.sdk.lazy import test_updates
from tests.sdk.lazy.test_updates import NAME, Engine, assert_same, loaded, specs_of
from weighbridge import EngineClient
from weighbridge import _lazy as lazy
from weighbridge._lazy.recording import Shape

Tensors = dict[str, torch.Tensor]
service, versions, engine = test_updates.service, test_updates.versions, test_updates.engine


def place_of(nbytes: int) -> lazy.StagingPlace:
    return lazy.StagingPlace(torch.full([nbytes], 0xAB, dtype=torch.uint8))


@pytest.mark.parametrize("share", [1.0, 0.5, 0.01])
def test_a_staged_version_equals_the_loader_and_what_has_no_room_comes_from_the_host(
    engine: EngineClient,
    versions: list[Tensors],
    share: float,
) -> None:
    model = Engine(versions[0], 1)
    recording = lazy.record(specs_of(versions[0]), model.load_weights, model.targets)
    place = place_of(int(lazy.staging_bytes(recording.targets.values()) * share))
    for number in (1, 2, 1):
        for tensor in model.targets.values():
            tensor.fill_(-2)
        update = lazy.Update(recording, engine.pull(NAME, number, recording.request))
        update.prepare()
        update.stage(place)
        assert all((tensor == -2).all() for tensor in model.targets.values())
        update.fill_all(model.targets)
        update.close()
        assert_same(model.targets, loaded(versions[number - 1], 1))


def test_a_version_that_is_staged_as_a_whole_gives_the_services_memory_back(
    engine: EngineClient,
    versions: list[Tensors],
) -> None:
    model = Engine(versions[0], 0)
    recording = lazy.record(specs_of(versions[0]), model.load_weights, model.targets)
    nbytes = lazy.staging_bytes(recording.targets.values())
    whole, most = (lazy.Update(recording, engine.pull(NAME, 2, recording.request)) for _ in range(2))
    for update, size in ((whole, nbytes), (most, nbytes - 512)):
        update.prepare()
        update.stage(place_of(size))
    assert whole._slices is None
    assert most._slices is not None
    whole.fill_all(model.targets)
    assert_same(model.targets, loaded(versions[1], 0))


def test_elements_that_a_version_leaves_alone_stay_as_they_are(
    engine: EngineClient,
    versions: list[Tensors],
) -> None:
    name = next(name for name in versions[0] if "k_proj.weight" in name)
    rows, columns = versions[0][name].shape
    target = torch.empty(rows + 3, columns + 2)

    def load(weights: list[tuple[str, torch.Tensor]]) -> None:
        target[1 : rows + 1, :columns].copy_(dict(weights)[name])

    recording = lazy.record(specs_of(versions[0]), load, {"target": target})
    target.fill_(7)
    update = lazy.Update(recording, engine.pull(NAME, 2, recording.request))
    update.prepare()
    update.stage(place_of(1 << 20))
    update.fill_all({"target": target})
    expected = torch.full_like(target, 7)
    expected[1 : rows + 1, :columns] = versions[1][name]
    assert target.equal(expected)


@pytest.mark.parametrize("seed", range(20))
def test_tensors_of_a_place_lie_apart_and_as_they_were_asked_for(seed: int) -> None:
    dice = random.Random(seed)
    shapes = {}
    for index in range(dice.randint(1, 12)):
        size = tuple(dice.randint(0, 9) for _ in range(dice.randint(0, 3)))
        made = torch.empty(size, dtype=dice.choice([torch.uint8, torch.bfloat16, torch.float32, torch.float64]))
        if made.dim() > 1 and dice.random() < 0.5:
            made = made.transpose(0, 1)
        shapes[f"t{index}"] = Shape.of(made)
    needed = lazy.staging_bytes(shapes.values())
    found = place_of(needed).tensors(shapes)
    assert found.keys() == shapes.keys()
    for index, tensor in enumerate(found.values()):
        tensor.fill_(index + 1)
    for index, (name, tensor) in enumerate(found.items()):
        assert Shape.of(tensor) == shapes[name]
        assert (tensor == index + 1).all()
    fewer = place_of(dice.randint(0, needed)).tensors(shapes)
    assert fewer.keys() <= shapes.keys()
