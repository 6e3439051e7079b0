"""Pulls of what is not there, does not fit, or begins behind its end: is each refused with what is wrong?"""

from __future__ import annotations

import pytest

from tests.service.bad_input.bench import EMBEDDING, GOOD, Bench
from tests.support.raw_clients import RawClient, pb, whole_layout
from weighbridge._core.slices import Boxes, FullTensors, TensorParallel
from weighbridge.errors import InvalidArgument, NotFound
from weighbridge.v1 import model_service_pb2, weight_service_pb2


def test_an_unknown_tensor_is_named(bench: Bench) -> None:
    for request in (FullTensors(("model.norm.weight", "evil.weight")), Boxes([("evil.weight", (0,), (1,))])):
        with pytest.raises(NotFound, match=r"evil\.weight"):
            bench.engine.pull(GOOD, 1, request)


@pytest.mark.parametrize(
    ("offset", "extent"),
    [((0, 0), (129, 32)), ((-1, 0), (1, 1)), ((0, 0), (-1, 1)), ((0, 0), (0, 1)), ((0,), (1,)), ((0, 0), (1,)),
     ((2**62, 0), (2**62, 1)), ((0,) * 100, (1,) * 100), ((), ())],
)  # fmt: skip
def test_a_box_that_does_not_fit_is_refused_with_its_tensor(
    bench: Bench, offset: tuple[int, ...], extent: tuple[int, ...]
) -> None:
    with pytest.raises(InvalidArgument, match=EMBEDDING):
        bench.engine.pull(GOOD, 1, Boxes([(EMBEDDING, offset, extent)]))


@pytest.mark.parametrize(("size", "rank"), [(0, 0), (2, 2), (3, 0), (2**32 - 1, 0), (2**32 - 1, 2**32 - 1), (8, 0)])
def test_a_parallelism_that_does_not_fit_is_refused(raw: RawClient, size: int, rank: int) -> None:
    request = weight_service_pb2.LayoutRequest(tensor_parallel=weight_service_pb2.TensorParallel(size=size, rank=rank))
    with pytest.raises(InvalidArgument):
        raw.call(raw.weights.PlanPull, weight_service_pb2.PlanPullRequest(model=GOOD, version="1", layout=request))
    if rank < size:  # the SDK refuses no size when it is made, but when it is sent
        assert TensorParallel(size, rank).size == size
    else:
        with pytest.raises(InvalidArgument, match="does not exist"):
            TensorParallel(size, rank)
    for pp in (0, 3, 2**32 - 1):
        with pytest.raises(InvalidArgument):
            raw.call(
                raw.checkpoints.DescribeShards,
                pb.DescribeShardsRequest(model=GOOD, tensor_parallel_size=1, pipeline_parallel_size=pp),
            )


@pytest.mark.parametrize("offset", [1, 2**31, 2**63, 2**64 - 1])
def test_a_stream_cannot_begin_behind_its_end(bench: Bench, raw: RawClient, offset: int) -> None:
    offset += whole_layout(bench.source.arrays).nbytes if offset == 1 else 0
    with pytest.raises(InvalidArgument, match="cannot begin"):
        raw.call(raw.weights.Pull, weight_service_pb2.PullRequest(model=GOOD, version="1", offset=offset))


def test_a_page_token_that_nobody_gave_is_refused_or_harmless(raw: RawClient) -> None:
    for token in ("x", "-1", "9" * 100, "\0", "٣"):
        request = model_service_pb2.ListVersionsRequest(model=GOOD, page_token=token, page_size=2**32 - 1)
        with pytest.raises(InvalidArgument, match="page token"):
            raw.call(raw.models.ListVersions, request)
        raw.call(raw.models.ListModels, model_service_pb2.ListModelsRequest(page_token=token))
