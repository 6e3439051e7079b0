"""Is what vLLM's processing makes of a version beside the engine what it makes in the engine, and is everything else
left to the engine?

Methods of layers are made up, to do what vLLM's do and what they might.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weighbridge._lazy.recording import Shape
from weighbridge._lazy.staging import StagingPlace, packed
from weighbridge.integrations.vllm.shadows import Shadows, Subject
from weighbridge.integrations.vllm.watching import AnyOperation, Unsuitable, own_tensors, storage_of

FP8 = torch.float8_e4m3fn
DONE = "_already_called_process_weights_after_loading"


class Kernel:
    """Something that a method keeps, with any attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Fp8:
    """Quantises a weight as vLLM's online method for linear layers does."""

    def __init__(self) -> None:
        self.kernel = Kernel(columns=None)

    def process_weights_after_loading(self, layer: Any) -> None:
        if getattr(layer, DONE, False):
            return
        layer.input_scale = None
        weight, scale = quantised(layer.weight)
        replace(layer, "weight", weight)
        replace(layer, "weight_scale", scale)
        self.kernel.columns = layer.weight.shape[1]
        self.finish(layer)
        setattr(layer, DONE, True)

    def finish(self, layer: Any) -> None:
        """More that a method may do."""


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = weight.abs().max().float().reshape(1) / 448
    return (weight / scale).to(FP8).t(), scale


def replace(layer: Any, name: str, tensor: torch.Tensor) -> None:
    setattr(layer, name, torch.nn.Parameter(tensor.data, requires_grad=False))


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(24, 16, generator=generator).bfloat16(),
        "bias": torch.randn(24, generator=generator).bfloat16(),
    }


def loaded_layer(method: Any, seed: int) -> Any:
    """A layer that a version has been loaded into, and processed by the method."""
    layer: Any = torch.nn.Module()
    for name, tensor in weights(seed).items():
        replace(layer, name, tensor)
    layer.quant_method, layer.widths = method, [8, 16]
    method.process_weights_after_loading(layer)
    return layer


def subject(layer: Any, loaded: dict[str, torch.Tensor]) -> Subject:
    def dress(layer: Any, shadow: Any, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return torch.nn.Parameter(tensor, requires_grad=False)

    return Subject(layer, layer.quant_method, loaded, frozenset(), frozenset(), dress, frozenset())


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, list[int]]:
    return {name: tensor.contiguous().view(torch.uint8).flatten().tolist() for name, tensor in tensors.items()}


def storages(*layers: Any) -> set[int]:
    return {storage_of(tensor) for layer in layers for tensor in own_tensors(layer).values()}


def test_a_shadow_makes_the_bits_of_a_fresh_load_and_leaves_the_live_layer_alone() -> None:
    layer, shadows = loaded_layer(Fp8(), 1), Shadows()
    live = dict(own_tensors(layer))
    for seed in (2, 3):
        given = weights(seed)
        before, attributes, kernel = bits(live), dict(vars(layer)), dict(vars(layer.quant_method.kernel))
        made = shadows.process(subject(layer, given), storages(layer), 1 << 20)
        assert bits(made) == bits(own_tensors(loaded_layer(Fp8(), seed)))
        assert {n: Shape.of(t) for n, t in made.items()} == {n: Shape.of(t) for n, t in live.items()}
        assert bits(given) == bits(weights(seed))
        assert bits(live) == before
        assert all(own_tensors(layer)[name] is tensor for name, tensor in live.items())
        assert vars(layer) == attributes
        assert vars(layer.quant_method.kernel) == kernel


class Holding(Fp8):
    """Makes a new object that holds the layer's tensors each time, as vLLM's methods of experts make their kernels."""

    def finish(self, layer: Any) -> None:
        scale = layer.weight_scale
        self.config = Kernel(scales=(scale, scale.view(-1)), apply=lambda x: x * scale)


class InPlace(Fp8):
    """Writes to the weight that was loaded, as vLLM's requantisation does."""

    def process_weights_after_loading(self, layer: Any) -> None:
        if not getattr(layer, DONE, False):
            layer.weight.data[:8].mul_(2)
        super().process_weights_after_loading(layer)


@pytest.mark.parametrize("method", [Holding, InPlace])
def test_new_objects_that_hold_the_layer_s_tensors_and_writes_to_what_was_loaded_are_taken(
    method: type[Fp8],
) -> None:
    layer, shadows, given = loaded_layer(method(), 1), Shadows(), weights(2)
    for _ in range(2):
        made = shadows.process(subject(layer, given), storages(layer), 1 << 20)
        assert bits(made) == bits(own_tensors(loaded_layer(method(), 2)))
        assert bits(given) == bits(weights(2))


def count(method: Any, layer: Any) -> None:
    method.count = getattr(method, "count", 0) + 1


def count_inside(method: Any, layer: Any) -> None:
    method.kernel.count = getattr(method.kernel, "count", 0) + 1


SHARED = SimpleNamespace(count=0, seen=[])
"""State outside the layer and its method, to which both lead, and which cannot be copied."""


def count_outside(method: Any, layer: Any) -> None:
    method.kernel.shared = SHARED
    SHARED.count += 1


def list_outside(method: Any, layer: Any) -> None:
    method.kernel.shared = SHARED
    SHARED.seen.append(len(SHARED.seen))


def keep_a_copy(method: Any, layer: Any) -> None:
    method.config = Kernel(scale=layer.weight_scale.clone())


def keep_in_a_closure(method: Any, layer: Any) -> None:
    packed_weight = layer.weight.float()
    layer.linear = lambda x: x @ packed_weight


def keep_a_number(method: Any, layer: Any) -> None:
    layer.scale = layer.weight_scale.item()


def another_shape(method: Any, layer: Any) -> None:
    replace(layer, "weight", layer.weight.data[:, : 16 + int(layer.bias[0] < 0)])


def another_name(method: Any, layer: Any) -> None:
    replace(layer, "weight_of_" + str(int(layer.bias[0] * 1000) % 97), layer.bias)


def another_layout(method: Any, layer: Any) -> None:
    if layer.bias[0] < 0:
        replace(layer, "weight", layer.weight.data.contiguous())


TIED: Any = torch.nn.Module()
GIVEN: dict[str, Any] = {}
TIED.weight = torch.nn.Parameter(torch.ones(16), requires_grad=False)


def read_another_layer(method: Any, layer: Any) -> None:
    replace(layer, "bias", layer.bias.data * TIED.weight[0].bfloat16())


def write_another_layer(method: Any, layer: Any) -> None:
    if hasattr(method, "begun"):
        TIED.weight.data.copy_(layer.bias.data[:16])
    method.begun = True


def fail_the_second_time(method: Any, layer: Any) -> None:
    if hasattr(method, "begun"):
        raise ValueError("it is done only once")
    method.begun = True


GROUPS: dict[str, Any] = {"__name__": "vllm.distributed.parallel_state", "asked": []}
exec(
    "def get_group(): return 'a group'\ndef all_reduce(tensor): asked.append(get_group()); return tensor",
    GROUPS,
)


def communicate(method: Any, layer: Any) -> None:
    if hasattr(method, "begun"):
        GROUPS["get_group"]()
        replace(layer, "weight_scale", GROUPS["all_reduce"](layer.weight_scale))
    method.begun = True


def give_back_another_layer_s(method: Any, layer: Any) -> None:
    GIVEN.setdefault("bias", layer.bias)
    layer.bias = GIVEN["bias"]


@pytest.mark.parametrize(
    ("finish", "why"),
    [
        (count, "count"),
        (count_inside, "kernel"),
        (count_outside, "changes attributes"),
        (list_outside, "changes attributes"),
        (keep_a_copy, "config"),
        (keep_in_a_closure, "linear"),
        (keep_a_number, "scale"),
        (another_shape, "weight has a different memory layout"),
        (another_layout, "weight has a different memory layout"),
        (another_name, "in place of"),
        (read_another_layer, "reads a tensor"),
        (write_another_layer, "writes a tensor"),
        (fail_the_second_time, "only once"),
        (communicate, r"communicates with other ranks \(all_reduce"),
        (give_back_another_layer_s, "returns a tensor"),
    ],
)
def test_processing_that_a_shadow_cannot_stand_for_is_left_to_the_live_layer(
    finish: Callable[[Any, Any], None], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fp8, "finish", finish)
    GIVEN.clear()
    given = {name: weights(2)[name] for name in ("weight", "bias")}
    given["bias"][0], first = -1, Fp8()
    layer: Any = torch.nn.Module()
    for name, tensor in weights(1).items():
        replace(layer, name, tensor.abs())
    layer.quant_method = first
    first.process_weights_after_loading(layer)
    state, live, tied = dict(vars(first)), bits(own_tensors(layer)), TIED.weight.tolist()
    before = bits(given)
    shadows = Shadows()
    for _ in range(2):  # it is not tried again
        with pytest.raises(Unsuitable, match=why):
            shadows.process(subject(layer, given), storages(layer, TIED), 1 << 20)
    assert (bits(given), bits(own_tensors(layer)), TIED.weight.tolist()) == (before, live, tied)
    assert vars(first) == state
    assert GROUPS["asked"] == []


def test_results_that_would_take_more_memory_than_there_is_are_not_made() -> None:
    layer = loaded_layer(Fp8(), 1)
    with pytest.raises(Unsuitable, match="in addition to the weights"):
        Shadows().process(subject(layer, weights(2)), storages(layer), 100)


def test_a_number_that_is_copied_to_a_tensor_is_seen_as_a_change_and_is_no_error() -> None:
    scale = torch.zeros(())
    with AnyOperation() as operations:
        scale.copy_(1.0)  # type: ignore[arg-type]  # as vLLM does with scales of a KV cache
    assert scale == 1
    assert "copy_" in operations.seen


def place_for(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors in a place, with the same values."""
    there = StagingPlace(torch.zeros(1 << 16, dtype=torch.uint8)).tensors(
        {name: Shape.of(tensor) for name, tensor in tensors.items()}
    )
    for name, tensor in tensors.items():
        there[name].copy_(tensor)
    return there


def test_what_is_made_is_kept_where_the_weights_were_and_what_is_there_already_stays() -> None:
    staged = place_for({"weight": torch.randn(64, 64).bfloat16(), "bias": torch.randn(64)})
    weight, scale = quantised(staged["weight"])
    want = bits({"weight": weight, "scale": scale, "bias": staged["bias"]})
    found = packed({"weight": weight, "scale": scale, "bias": staged["bias"]}, staged.values())
    assert found is not None
    assert bits(found) == want
    assert Shape.of(found["weight"]) == Shape.of(weight)
    begin, end = staged["weight"].data_ptr(), staged["weight"].data_ptr() + staged["weight"].nbytes
    assert all(begin <= found[name].data_ptr() < end for name in ("weight", "scale"))
    assert found["bias"].data_ptr() == staged["bias"].data_ptr()


def test_what_has_no_room_where_the_weights_were_is_not_written() -> None:
    staged = place_for({"weight": torch.ones(64, 64).bfloat16()})
    assert packed({"first": torch.zeros(64, 32), "second": torch.zeros(8)}, staged.values()) is None
    assert bool((staged["weight"] == 1).all())
