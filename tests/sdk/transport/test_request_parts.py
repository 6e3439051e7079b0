"""Is a request that comes in parts the one that was meant, and is one that comes as a single message refused if it is
too long?
"""

from __future__ import annotations

import itertools
from pathlib import Path

import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from tests.support.raw_clients import tiny_folder
from tests.support.services import running_service
from weighbridge import TrainerClient
from weighbridge._transport import rpc
from weighbridge._transport.request_parts import MAX_REQUEST_BYTES, PART_BYTES, encoded_parts, parts
from weighbridge.errors import InvalidArgument
from weighbridge.v1 import checkpoint_service_pb2 as checkpoints
from weighbridge.v1 import model_service_pb2 as models
from weighbridge.v1 import model_service_pb2_grpc, resources_pb2
from weighbridge.v1 import weight_service_pb2 as weights

NAMES = st.text(max_size=20)
SHAPES = st.lists(st.integers(0, 1 << 40), max_size=4)
SPECS = st.builds(resources_pb2.TensorSpec, name=NAMES, dtype=NAMES, shape=SHAPES)
SHARDS = st.builds(resources_pb2.Shard, tensor=st.integers(0, 9), offset=SHAPES, extent=SHAPES, replica=st.booleans())
LAYOUTS = st.builds(
    resources_pb2.Layout,
    space=st.integers(0, 2),
    tensors=st.lists(SPECS, max_size=8),
    shards=st.lists(SHARDS, max_size=20),
)
DECLARED = st.builds(
    checkpoints.DeclareLayoutRequest,
    model=NAMES,
    number=st.integers(0, 1 << 40),
    layout=LAYOUTS,
    digest=NAMES,
)
BOXES = st.builds(weights.BoxRequest, tensor=NAMES, offset=SHAPES, extent=SHAPES)
PULLED = st.builds(
    weights.PullRequest,
    model=NAMES,
    layout=st.one_of(
        st.builds(
            weights.LayoutRequest,
            boxes=st.builds(weights.Boxes, boxes=st.lists(BOXES, max_size=20)),
        ),
        st.builds(
            weights.LayoutRequest,
            full=st.builds(weights.FullTensors, names=st.lists(NAMES, max_size=20)),
        ),
    ),
    offset=st.integers(0, 1 << 60),
    dtype=NAMES,
)
LONGEST_FIELD = 200
"""Bytes of a field in these requests that cannot be cut, at most."""


@given(st.one_of(DECLARED, PULLED), st.integers(LONGEST_FIELD, 2000))
def test_parts_that_are_merged_by_protobuf_are_the_request(request: Message, most: int) -> None:
    found = encoded_parts(request, most)
    merged = type(request)()
    for part in found:
        merged.MergeFromString(part)
    assert merged == request
    assert all(len(part) <= most + 30 for part in found)


@given(st.lists(st.binary(max_size=5000), max_size=5), st.integers(100, 1000))
def test_a_file_goes_on_in_files_of_its_name(contents: list[bytes], most: int) -> None:
    files = [resources_pb2.ModelFile(name=f"f{i}", content=content) for i, content in enumerate(contents)]
    request = models.RegisterModelRequest(model="a/b", files=files, dtype="bf16")
    merged = models.RegisterModelRequest()
    for part in encoded_parts(request, most):
        assert len(part) <= most + 30
        merged.MergeFromString(part)
    joined = {
        name: b"".join(file.content for file in group)
        for name, group in itertools.groupby(merged.files, key=lambda file: file.name)
    }
    assert joined == {file.name: file.content for file in files}
    assert merged.dtype == "bf16"


def test_what_cannot_be_cut_or_is_too_long_is_refused_before_it_is_sent() -> None:
    with pytest.raises(InvalidArgument, match="dtype"):
        encoded_parts(models.RegisterModelRequest(dtype="x" * 2 * PART_BYTES))
    long = resources_pb2.ModelFile(name="f", content=bytes(MAX_REQUEST_BYTES))
    with pytest.raises(InvalidArgument, match="longer than"):
        encoded_parts(models.RegisterModelRequest(files=[long]))


def test_a_model_with_large_files_is_registered_in_parts(tmp_path: Path) -> None:
    model = tiny_folder(tmp_path / "hf")
    files = {**model.files, "tokenizer.json": b'"' + b"x" * (5 * PART_BYTES) + b'"', "empty.txt": b""}
    with running_service(tmp_path / "store") as service, TrainerClient(service.address) as trainer:
        trainer.register_files("acme/large", files)
        assert trainer.model_files("acme/large") == files
        with rpc.open_channel(service.address) as channel:
            stub = model_service_pb2_grpc.ModelServiceStub(channel)
            request = models.RegisterModelRequest(
                model="acme/whole",
                files=[resources_pb2.ModelFile(name=name, content=content) for name, content in files.items()],
            )
            with pytest.raises(grpc.RpcError) as refused:
                stub.RegisterModel(iter([request]), timeout=20)
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            twice = [*request.files, resources_pb2.ModelFile(name="config.json", content=b"{}")]
            again = models.RegisterModelRequest(model="acme/twice", files=twice)
            with rpc.translated_errors(service.address), pytest.raises(grpc.RpcError) as refused:
                stub.RegisterModel(parts(again), timeout=20)
            assert "two files are named 'config.json'" in refused.value.details()


def test_a_request_that_never_ends_is_refused_at_its_limit(tmp_path: Path) -> None:
    part = models.RegisterModelRequest(
        model="a/b", files=[resources_pb2.ModelFile(name="f", content=bytes(PART_BYTES))]
    )
    with running_service(tmp_path / "store") as service, rpc.open_channel(service.address) as channel:
        stub = model_service_pb2_grpc.ModelServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.RegisterModel(itertools.repeat(part), timeout=60)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "longer than" in refused.value.details()
        # what was held for it is given back
        for _ in range(8):
            with pytest.raises(grpc.RpcError) as refused:
                stub.RegisterModel(itertools.repeat(part, 40), timeout=60)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
