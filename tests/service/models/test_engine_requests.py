"""Is a request that does not fit the model refused, and one that fits the same on the other side of the wire?"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.service.models.engine_models import Source, moe_config, real_bridge, weights_of
from tests.support.reference import tiny_config
from weighbridge import Boxes, ExpertParallel, FullTensors, TensorParallel
from weighbridge._core.slices import LayoutRequest
from weighbridge._transport import wire
from weighbridge.errors import InvalidArgument, LayoutError
from weighbridge.v1 import weight_service_pb2

BAD: dict[str, tuple[Callable[[], TensorParallel], str]] = {
    "rank": (lambda: TensorParallel(2, 2), "rank 2 of 2"),
    "negative rank": (lambda: TensorParallel(2, -1), "rank -1 of 2"),
    "no ranks": (lambda: TensorParallel(0, 0), "rank 0 of 0"),
    "huge": (lambda: TensorParallel(2**40, 0), "does not exist"),
    "expert rank": (
        lambda: TensorParallel(2, 0, experts=ExpertParallel(4, 4)),
        "expert-parallel rank 4 of 4",
    ),
    "rank in an expert": (
        lambda: TensorParallel(2, 0, experts=ExpertParallel(4, 0, 2, 2)),
        "expert-tensor-parallel",
    ),
    "no ranks in an expert": (
        lambda: TensorParallel(2, 0, experts=ExpertParallel(4, 0, 0, 0)),
        "rank 0 of 0",
    ),
    "experts": (lambda: TensorParallel(2, 0, experts=ExpertParallel(3, 0)), r"experts: 8 experts.*3 ranks"),
    "more ranks than experts": (lambda: TensorParallel(2, 0, experts=ExpertParallel(16, 0)), "8 experts"),
    "inside experts": (
        lambda: TensorParallel(2, 0, experts=ExpertParallel(1, 0, 32, 0)),
        r"experts\.\d\.w\d",
    ),
    "heads": (lambda: TensorParallel(16, 0), r"[qko]_proj.*8 attention heads"),
    "no layers": (lambda: TensorParallel(2, 0, layers=(1, 1)), "layers 1:1"),
    "layers out of order": (lambda: TensorParallel(2, 0, layers=(2, 1)), "layers 2:1"),
    "negative layers": (lambda: TensorParallel(2, 0, layers=(-1, 1)), "layers -1:1"),
    "layers that are not there": (lambda: TensorParallel(2, 0, layers=(0, 3)), "the model has 2"),
    "multiple of 0": (lambda: TensorParallel(2, 0, vocab_multiple=0), "multiple of 0"),
    "negative multiple": (lambda: TensorParallel(2, 0, vocab_multiple=-64), "multiple of -64"),
    "huge multiple": (lambda: TensorParallel(2, 0, vocab_multiple=2**31), "multiple of 2147483648"),
}


@pytest.fixture(scope="module")
def mixtral() -> Source:
    config = moe_config("mixtral")
    return Source(real_bridge(config), weights_of(config))


@pytest.mark.parametrize("what", BAD)
def test_a_request_that_does_not_fit_is_refused(mixtral: Source, what: str) -> None:
    request, says = BAD[what]
    with pytest.raises(InvalidArgument, match=says):
        mixtral.layout(request())


def test_a_rank_that_does_not_exist_is_refused_when_it_is_asked_for() -> None:
    with pytest.raises(InvalidArgument, match="rank 2 of 2 does not exist"):
        TensorParallel(2, 2)


def test_a_box_that_does_not_fit_is_told_with_how_one_is_named(mixtral: Source) -> None:
    name = "model.norm.weight"
    (rows,) = mixtral.specs[name].shape
    with pytest.raises(LayoutError, match=f"does not fit into {name}") as refused:
        mixtral.layout(Boxes([(name, (1,), (rows,))]))
    assert "within the shape" in refused.value.fix


def test_a_model_without_experts_cannot_spread_them() -> None:
    config = tiny_config("llama", tied=True)
    with pytest.raises(InvalidArgument, match="no experts"):
        Source(real_bridge(config), weights_of(config)).rank(2, 0, experts=ExpertParallel(2, 0))


@pytest.mark.parametrize(
    "request_",
    [
        TensorParallel(4, 3),
        TensorParallel(1, 0, experts=ExpertParallel(8, 7)),
        TensorParallel(8, 1, experts=ExpertParallel(8, 7, 4, 3), layers=(0, 61), vocab_multiple=64),
        TensorParallel(8, 1, layers=(7, 8)),
        FullTensors(("a", "b")),
        Boxes((("a", (0, 2**40), (1, 1)), ("b", (), ()))),
    ],
)
def test_a_request_comes_over_the_wire_as_it_was_made(request_: LayoutRequest) -> None:
    message = wire.request_to_proto(request_).SerializeToString()
    assert wire.request_from_proto(weight_service_pb2.LayoutRequest.FromString(message)) == request_
