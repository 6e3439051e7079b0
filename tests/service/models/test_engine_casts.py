"""Is a cast stream what torch casts, from any byte on?"""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

from tests.service.models.engine_models import PlainBridge, Source
from tests.support.raw_clients import mapped_files
from weighbridge import FullTensors
from weighbridge._core import dtypes
from weighbridge.errors import InvalidArgument
from weighbridge_service.plan.casting import Casting

DTYPES = ["fp32", "fp16", "bf16", "fp64"]


@pytest.mark.parametrize("target", DTYPES)
def test_a_cast_stream_is_what_torch_casts_and_can_begin_at_any_byte(target: str) -> None:
    state = {
        f"t{i}.{name}": (torch.randn(3 + i, 7) * 10.0 ** (i - 3)).to(dtypes.parse(name).torch)
        for i in range(4)
        for name in (*DTYPES, "i64", "bool")
    }
    special = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, 65519.9, 1.00390625, 1.01171875]
    if target != "fp16":
        special += [65520.0, 3.3895e38]
    state["special"] = torch.tensor(special, dtype=torch.float64)
    state["scalar"] = torch.tensor(1.5)
    source = Source(PlainBridge(), state)
    layout = source.layout(FullTensors())
    casting = Casting(layout, dtypes.parse(target))
    gather = partial(source.transfer(layout).gather, files=mapped_files(source.buffers))
    expected = b"".join(
        (tensor.to(dtypes.parse(target).torch) if tensor.is_floating_point() else tensor)
        .reshape(-1)
        .view(torch.uint8)
        .numpy()
        .tobytes()
        for tensor in state.values()
    )
    assert casting.layout.nbytes == len(expected)
    assert bytes(casting.gather(gather, 0, len(expected))) == expected
    chance = random.Random(1)
    for _ in range(300):
        start = chance.randrange(len(expected))
        length = chance.choice([1, 2, 3, 5, 17, 100, 1000])
        stop = min(start + length, len(expected))
        assert bytes(casting.gather(gather, start, stop - start)) == expected[start:stop]


@pytest.mark.parametrize(
    ("source", "target", "value"),
    [("bf16", "fp16", -65536.0), ("fp32", "fp16", 65520.0), ("fp64", "fp32", 1e39)],
)
def test_an_element_that_would_become_infinite_is_refused_by_the_name_of_its_tensor(
    source: str, target: str, value: float
) -> None:
    state = {name: torch.ones(3, 5).to(dtypes.parse(source).torch) for name in ("a", "b", "c")}
    state["a"][0, 0] = torch.inf  # it was infinite before
    state["b"][1, 2] = value
    made = Source(PlainBridge(), state)
    layout = made.layout(FullTensors())
    casting = Casting(layout, dtypes.parse(target))
    gather = partial(made.transfer(layout).gather, files=mapped_files(made.buffers))
    nbytes = casting.layout.nbytes
    for start, length in ((0, nbytes), (nbytes // 3, nbytes // 3), (nbytes // 3 + 1, nbytes)):
        with pytest.raises(
            InvalidArgument, match=f"^b has elements that are too large for {dtypes.parse(target)}"
        ) as refused:
            casting.gather(gather, start, min(length, nbytes - start))
        assert "bf16 or fp32" in refused.value.fix
    for start in (0, 2 * nbytes // 3):
        wanted = state["a" if start == 0 else "c"].to(dtypes.parse(target).torch)
        found = bytes(casting.gather(gather, start, nbytes // 3))
        assert found == wanted.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("target", [None, "fp32"])
def test_a_stream_with_constants_is_what_torch_adds_and_can_begin_at_any_byte(target: str | None) -> None:
    state = {
        f"t{i}.{name}": torch.randn(3 + i, 7).to(dtypes.parse(name).torch)
        for i in range(3)
        for name in (*DTYPES, "i64")
    }
    shifts = {name: -1.0 for name in state if name.startswith("t1.") and not name.endswith("i64")}
    source = Source(PlainBridge(), state)
    layout = source.layout(FullTensors())
    casting = Casting(layout, None if target is None else dtypes.parse(target), shifts=shifts)
    gather = partial(source.transfer(layout).gather, files=mapped_files(source.buffers))
    expected = b""
    for name, tensor in state.items():
        made = tensor - 1 if name in shifts else tensor
        made = made.to(dtypes.parse(target).torch) if target and made.is_floating_point() else made
        expected += made.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert bytes(casting.gather(gather, 0, len(expected))) == expected
    chance = random.Random(2)
    for _ in range(300):
        start = chance.randrange(len(expected))
        stop = min(start + chance.choice([1, 2, 3, 5, 17, 100, 1000]), len(expected))
        assert bytes(casting.gather(gather, start, stop - start)) == expected[start:stop]


@pytest.mark.parametrize("target", ["i64", "bool", "fp8_e4m3", "u8"])
def test_weights_are_cast_to_floating_point_only(target: str) -> None:
    source = Source(PlainBridge(), {"a": torch.randn(3)})
    with pytest.raises(InvalidArgument, match="cannot be cast"):
        Casting(source.layout(FullTensors()), dtypes.parse(target))


def test_fp8_is_not_cast_without_its_scales() -> None:
    source = Source(PlainBridge(), {"a.weight": torch.randn(4, 4).to(torch.float8_e4m3fn), "b": torch.randn(3)})
    with pytest.raises(InvalidArgument, match=r"a\.weight.*cannot be cast"):
        Casting(source.layout(FullTensors()), dtypes.parse("bf16"))
    assert Casting(source.layout(FullTensors(("b",))), dtypes.parse("bf16")).layout.nbytes == 6
