"""Whatever comes in: a clear error, nothing visible that should not be, and a service that goes on serving."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from tests.forked import forked_python
from tests.raw_clients import (
    RawClient,
    TinyModel,
    assert_equal,
    cut,
    pb,
    rows_layout,
    stream_of,
    tiny_folder,
    whole_layout,
)
from tests.services import RunningService, running_service
from weighbridge import rpc, wire
from weighbridge.boxes import Box
from weighbridge.dtypes import parse
from weighbridge.engine import EngineClient
from weighbridge.errors import (
    AlreadyExists,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    LayoutError,
    NotFound,
    ResourceExhausted,
    VersionFailed,
    WeighbridgeError,
)
from weighbridge.layouts import Layout, Shard, TensorSpec
from weighbridge.resources import VersionState
from weighbridge.slices import Boxes, FullTensors, TensorParallel
from weighbridge.trainer import TrainerClient
from weighbridge.v1 import (
    checkpoint_service_pb2,
    local_lane_pb2,
    model_service_pb2,
    replica_service_pb2,
    resources_pb2,
    weight_service_pb2,
)

GOOD = "acme/good"
EMBEDDING = "model.embed_tokens.weight"
SPACES = {"megatron": wire.MEGATRON, "hugging_face": wire.HUGGING_FACE}
_numbers = count()


@dataclass(frozen=True)
class Bench:
    """A service with one good version, and clients of it."""

    running: RunningService
    root: Path
    source: TinyModel
    trainer: TrainerClient
    engine: EngineClient

    def new_model(self) -> str:
        """Register one more model of the same kind."""
        name = f"acme/model-{next(_numbers)}"
        self.trainer.register_files(name, self.source.files)
        return name


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    root = tmp_path_factory.mktemp("bad-input")
    source = tiny_folder(root / "hf")
    with (
        running_service(root / "store", receive_timeout=60.0, drain_seconds=0.1) as running,
        TrainerClient(running.address) as trainer,
        EngineClient(running.address) as engine,
    ):
        trainer.register_files(GOOD, source.files)
        trainer.push_folder(GOOD, source.folder).wait()
        yield Bench(running, root, source, trainer, engine)


@pytest.fixture(autouse=True)
def still_serves(bench: Bench) -> Iterator[None]:
    """After each test: the service answers, the good version is whole, and nothing lies outside of the store."""
    yield
    assert_equal(bench.engine, GOOD, "latest", bench.source.arrays)
    assert bench.trainer.versions(GOOD)[0].state is VersionState.DURABLE
    assert {path.name for path in bench.root.iterdir()} == {"hf", "store"}


@pytest.fixture
def raw(bench: Bench) -> Iterator[RawClient]:
    with RawClient(bench.running.address) as client:
        yield client


@pytest.fixture
def model(bench: Bench) -> str:
    return bench.new_model()


def assert_never_visible(bench: Bench, model: str, number: int) -> None:
    assert number not in [v.number for v in bench.trainer.versions(model)]
    assert number not in bench.trainer.refs(model).values()
    for version in (str(number), "live", "latest"):
        with pytest.raises((NotFound, FailedPrecondition)):
            bench.engine.pull(model, version)


# -- names ---------------------------------------------------------------------------------------------------------------

BAD_MODELS = [
    "", "/", "a/", "/a", "a", "../evil", "a/..", "../../etc/passwd", "a/b/c", "a/b/../c", "a\0b/c", "a/b\0",
    "a/" + "x" * 10_000, "x" * 10_000, "ä/b", "模型/权重", "a/🚂", "a/b.git", "./a", "a/.b", "a/b\n", "a b/c", "-a/b",
    "a\\..\\b/c",
]  # fmt: skip


def calls_with_model(raw: RawClient) -> dict[str, Callable[[str], Any]]:
    """Every call that names a model."""
    c, m, w = checkpoint_service_pb2, model_service_pb2, weight_service_pb2
    layout = resources_pb2.Layout(space=wire.MEGATRON)
    return {
        "get": lambda n: raw.call(raw.models.GetModel, m.GetModelRequest(model=n)),
        "files": lambda n: raw.call(raw.models.GetModelFiles, m.GetModelFilesRequest(model=n)),
        "version": lambda n: raw.call(raw.models.GetVersion, m.GetVersionRequest(model=n, version="1")),
        "versions": lambda n: raw.call(raw.models.ListVersions, m.ListVersionsRequest(model=n)),
        "watch": lambda n: raw.call(
            raw.models.WatchRefs, m.WatchRefsRequest(refs=[m.WatchedRef(model=n, ref="live")]), 3.0
        ),
        "set ref": lambda n: raw.call(raw.models.SetRef, m.SetRefRequest(model=n, ref="prod", version="1")),
        "delete ref": lambda n: raw.call(raw.models.DeleteRef, m.DeleteRefRequest(model=n, ref="prod")),
        "refs": lambda n: raw.call(raw.models.ListRefs, m.ListRefsRequest(model=n)),
        "verify": lambda n: raw.call(raw.models.VerifyVersion, m.VerifyVersionRequest(model=n, version="1")),
        "open": lambda n: raw.open(n),
        "declare": lambda n: raw.call(
            raw.checkpoints.DeclareLayout, c.DeclareLayoutRequest(model=n, number=1)
        ),
        "push": lambda n: raw.push(n, 1, [(0, b"x")]),
        "push state": lambda n: raw.received(n, 1),
        "seal": lambda n: raw.seal(n, 1),
        "abort": lambda n: raw.call(raw.checkpoints.AbortVersion, c.AbortVersionRequest(model=n, number=1)),
        "restore": lambda n: raw.call(
            raw.checkpoints.Restore, c.RestoreRequest(model=n, version="1", layout=layout)
        ),
        "describe": lambda n: raw.call(raw.checkpoints.DescribeShards, c.DescribeShardsRequest(model=n)),
        "plan": lambda n: raw.call(raw.weights.PlanPull, w.PlanPullRequest(model=n, version="1")),
        "pull": lambda n: raw.call(raw.weights.Pull, w.PullRequest(model=n, version="1")),
    }


def test_a_name_that_no_model_can_have_is_refused_by_every_call(raw: RawClient, bench: Bench) -> None:
    for what, call in calls_with_model(raw).items():
        for name in BAD_MODELS:
            with pytest.raises(InvalidArgument) as caught:
                call(name)
            assert len(str(caught.value)) < 1000, what
    for name in BAD_MODELS:
        with pytest.raises(InvalidArgument):
            bench.trainer.register_files(name, bench.source.files)


def test_an_unknown_model_is_not_found_by_any_call(raw: RawClient) -> None:
    for what, call in calls_with_model(raw).items():
        with pytest.raises(NotFound) as caught:
            call("acme/nobody")
        assert "acme/nobody" in caught.value.message, what


@pytest.mark.parametrize(
    "version", ["2", "999999999999", "9" * 30, "nope", "", "..", "-1", "1.0", "٣", "\0", "x" * 10_000, "模型"]
)
def test_an_unknown_version_is_not_found(bench: Bench, version: str) -> None:
    for call in (bench.engine.version, bench.engine.pull, bench.trainer.verify):
        with pytest.raises(NotFound) as caught:
            call(GOOD, version)
        assert GOOD in caught.value.message
        assert len(str(caught.value)) < 1000
    with pytest.raises(NotFound):
        bench.trainer.set_ref(GOOD, "prod", version)


@pytest.mark.parametrize(
    "ref", ["", "..", "../x", "a/b", "\0", "x" * 10_000, "é", "🚂", "7", "live", "latest", ".x", "a b"]
)
def test_a_name_that_no_ref_can_have_is_refused(bench: Bench, raw: RawClient, ref: str) -> None:
    with pytest.raises(InvalidArgument):
        bench.trainer.set_ref(GOOD, ref, 1)
    with pytest.raises(InvalidArgument):
        bench.trainer.delete_ref(GOOD, ref)
    if ref not in ("live", "latest"):
        # it would wait for ever for a ref that can never be
        watched = model_service_pb2.WatchRefsRequest(refs=[model_service_pb2.WatchedRef(model=GOOD, ref=ref)])
        with pytest.raises(InvalidArgument):
            raw.call(raw.models.WatchRefs, watched, 2.0)


def test_an_unknown_ref_cannot_be_deleted(bench: Bench) -> None:
    with pytest.raises(NotFound, match="nothing-here"):
        bench.trainer.delete_ref(GOOD, "nothing-here")


@pytest.mark.parametrize(
    "file",
    ["../config.json", "/etc/passwd", "a/b", "..", "x\0", ".hidden", "-x", "x" * 10_000, "é.json", "", "a\nb",
     "model.safetensors", "weighbridge.json", "Weighbridge.JSON", "model.safetensors.index.json"],
)  # fmt: skip
def test_a_name_that_no_file_can_have_is_refused(bench: Bench, file: str) -> None:
    with pytest.raises(InvalidArgument):
        bench.trainer.register_files("acme/files", {**bench.source.files, file: b"x"})
    with pytest.raises(NotFound):
        bench.trainer.model("acme/files")


@pytest.mark.parametrize("field", ["run", "request_id", "client_id"])
@pytest.mark.parametrize("text", ["", "a\0b", "line\nbreak", "x" * 10_000, "\x1b[31m", "\u202e"])
def test_texts_that_cannot_be_shown_are_refused(raw: RawClient, field: str, text: str) -> None:
    fields = {"run": "r", "request_id": "q", "client_id": "c", field: text}
    with pytest.raises(InvalidArgument, match=field):
        raw.call(raw.checkpoints.OpenVersion, pb.OpenVersionRequest(model=GOOD, step=1, ranks=1, **fields))


@pytest.mark.parametrize("text", ["../../etc", "läuft 🚂", "a/b", "%s%n{0}"])
def test_other_texts_are_only_texts(bench: Bench, raw: RawClient, model: str, text: str) -> None:
    number = raw.push_whole(model, bench.source.arrays, run=text, request_id=text)
    assert bench.trainer.wait_for(model, number, VersionState.DURABLE, timeout=20).run == text
    assert_equal(bench.engine, model, number, bench.source.arrays)


@pytest.mark.parametrize(
    "fields", [{"ranks": 0}, {"ranks": 2**32 - 1}, {"ranks": 65_537}, {"step": -1}, {"step": 2**63 - 1}]
)
def test_numbers_out_of_bounds_are_refused(raw: RawClient, fields: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument):
        raw.open(GOOD, **fields)


# -- registration --------------------------------------------------------------------------------------------------------


def config(bench: Bench, **changes: Any) -> bytes:
    read = json.loads(bench.source.files["config.json"])
    read.pop("layer_types", None)  # would be checked against the number of layers first
    return json.dumps({**read, **changes}).encode()


@pytest.mark.parametrize(
    "model_type", ["gpt2", "evil", "../../evil", "", None, 5, ["qwen3"], {"a": 1}, "x" * 10_000]
)
def test_a_model_type_without_a_map_is_refused_with_the_list_of_those_that_have_one(
    bench: Bench, model_type: Any
) -> None:
    with pytest.raises(InvalidArgument, match="no weight map") as caught:
        bench.trainer.register_files("acme/other", {"config.json": config(bench, model_type=model_type)})
    for family in ("llama", "qwen2", "qwen3"):
        assert family in caught.value.fix


BAD_CONFIGS: dict[str, Any] = {
    "empty": b"",
    "no JSON": b"{",
    "no object": b"[]",
    "no UTF-8": b"\xff\xfe\x00{",
    "large": b'{"model_type":"qwen3"' + b" " * (2 << 20) + b"}",
    "deep": b'{"model_type":"qwen3","a":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}",
    "deep objects": b'{"model_type":"qwen3","a":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    "long number": b'{"model_type":"qwen3","hidden_size":' + b"9" * 1_000_000 + b"}",
    **{
        f"{name} = {value}": {name: value}
        for name in (
            "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size",
            "vocab_size", "head_dim",
        )
        for value in (10**9, 10**18, 10**30, 1e308, -1, 0, "7", [1], {"a": 1}, 1.5, True)
    },
    "heads do not divide": {"num_attention_heads": 7},
    "key-value heads do not divide": {"num_key_value_heads": 3},
    "rope": {"rope_scaling": {"rope_type": "evil"}},
    "activation": {"hidden_act": "__import__('os').system('true')"},
    "dtype": {"torch_dtype": "os", "dtype": "os"},
    "no layers": {"num_hidden_layers": None},
    "attention of no kind": {"layer_types": ["evil", "evil"]},
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_CONFIGS)
def test_a_config_that_is_no_model_is_refused_at_once(bench: Bench, what: str) -> None:
    bad = BAD_CONFIGS[what]
    content = bad if isinstance(bad, bytes) else config(bench, **bad)
    before, started = resident_bytes(), time.monotonic()
    with pytest.raises(InvalidArgument) as caught:
        bench.trainer.register_files("acme/bomb", {"config.json": content})
    assert len(str(caught.value)) < 2000
    assert time.monotonic() - started < 5
    assert resident_bytes() - before < 500 << 20
    with pytest.raises(NotFound):
        bench.trainer.model("acme/bomb")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    "fields",
    [
        {"auto_map": dict.fromkeys(("AutoConfig", "AutoModel", "AutoModelForCausalLM"), "evil--code.Class")},
        {"auto_map": 5},
        {"attn_implementation": "evil/kernel"},
        {"_attn_implementation": "evil/kernel"},
        {"_attn_implementation_internal": "evil/kernel"},
        {"num_labels": 10**9},
        {"to_dict": 1, "__class__": "evil", "kwargs": {}, "self": 1},
        {"quantization_config": {"quant_method": "evil"}},
    ],
)
def test_fields_that_name_code_or_fill_memory_are_not_looked_at(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    reached: list[str] = []
    for module in ("transformers.dynamic_module_utils", "transformers.integrations.hub_kernels"):
        __import__(module)
        for name in ("get_class_from_dynamic_module", "get_cached_module_file", "load_and_register_kernel"):
            if hasattr(sys.modules[module], name):
                monkeypatch.setattr(sys.modules[module], name, lambda *a, n=name, **k: reached.append(n))
    monkeypatch.setattr(
        "transformers.modeling_utils.load_and_register_kernel", lambda *a: reached.append("kernel")
    )
    monkeypatch.setattr(socket, "create_connection", lambda *a, **k: reached.append("network"))
    name = f"acme/code-{next(_numbers)}"
    started = time.monotonic()
    registered = bench.trainer.register_files(name, {"config.json": config(bench, **fields)})
    assert time.monotonic() - started < 5
    assert registered.tensor_count == len(bench.source.arrays)
    assert reached == []
    bench.trainer.push_folder(name, bench.source.folder).wait()
    assert_equal(bench.engine, name, "latest", bench.source.arrays)


def test_a_registered_model_cannot_become_another_one(bench: Bench) -> None:
    with pytest.raises(FailedPrecondition, match="registered already"):
        bench.trainer.register_files(GOOD, {"config.json": config(bench, hidden_size=64)})
    with pytest.raises(FailedPrecondition, match="registered already"):
        bench.trainer.register_files(GOOD, bench.source.files, "bf16")


def test_a_registration_without_config_or_with_an_unknown_dtype_is_refused(bench: Bench) -> None:
    with pytest.raises(InvalidArgument, match=r"config\.json"):
        bench.trainer.register_files("acme/none", {"tokenizer.json": b"{}"})
    for dtype in ("evil", "os", "float128", "x" * 10_000):
        with pytest.raises(InvalidArgument, match="no dtype"):
            bench.trainer.register_files("acme/none", bench.source.files, dtype)


# -- layouts -------------------------------------------------------------------------------------------------------------


def messages_that_no_layout_has() -> dict[str, resources_pb2.Layout]:
    def layout(space: int = wire.HUGGING_FACE, **fields: Any) -> resources_pb2.Layout:
        spec = {"name": "a", "dtype": "F32", "shape": [4, 4]}
        shard = {"tensor": 0, "offset": [0, 0], "extent": [4, 4]}
        spec |= {k: v for k, v in fields.items() if k in spec}
        shard |= {k: v for k, v in fields.items() if k in shard}
        return resources_pb2.Layout(
            space=space,  # type: ignore[arg-type]
            tensors=[resources_pb2.TensorSpec(**spec)],
            shards=[resources_pb2.Shard(**shard)],
        )

    def axes(n: int, value: int) -> dict[str, list[int]]:
        return {"shape": [value] * n, "offset": [0] * n, "extent": [value] * n}

    twice = layout()
    twice.tensors.add(name="a", dtype="BF16", shape=[4, 4])
    return {
        "index out of range": layout(tensor=1),
        "index far out of range": layout(tensor=2**32 - 1),
        "negative extent": layout(extent=[4, -4]),
        "negative offset": layout(offset=[0, -1]),
        "beyond the end": layout(offset=[0, 1]),
        "sum overflows": layout(offset=[2**62, 0], extent=[2**62, 4]),
        "fewer axes in the box": layout(offset=[0], extent=[4]),
        "fewer axes in the offset": layout(offset=[0]),
        "fewer axes in the extent": layout(extent=[4]),
        "more axes in the box": layout(offset=[0, 0, 0], extent=[4, 4, 4]),
        "negative shape": layout(shape=[-4, 4]),
        "shape 2**62": layout(shape=[2**62, 4], extent=[2**62, 4]),
        "shape 2**62 on each axis": layout(**axes(8, 2**62)),
        "100 axes": layout(**axes(100, 1)),
        "empty name": layout(name=""),
        "long name": layout(name="x" * 10_000),
        "name with NUL": layout(name="a\0b"),
        "unknown dtype": layout(dtype="EVIL"),
        "empty dtype": layout(dtype=""),
        "no space": layout(space=0),
        "unknown space": layout(space=99),
        "one name, two tensors": twice,
    }


@pytest.mark.parametrize("what", messages_that_no_layout_has())
def test_a_message_that_is_no_layout_is_refused_and_spoils_nothing(
    bench: Bench, raw: RawClient, model: str, what: str
) -> None:
    message = messages_that_no_layout_has()[what]
    number = raw.open(model)
    with pytest.raises(InvalidArgument):
        raw.declare_message(model, number, message, "0" * 64)
    message.space = message.space if message.space != wire.HUGGING_FACE else wire.MEGATRON
    with pytest.raises(InvalidArgument):
        raw.call(raw.checkpoints.Restore, pb.RestoreRequest(model=GOOD, version="1", layout=message))
    layout = whole_layout(bench.source.arrays)
    raw.push(model, number, cut(stream_of(bench.source.arrays, layout, raw.declare(model, number, layout))))
    raw.seal(model, number)
    assert_equal(bench.engine, model, number, bench.source.arrays)


def test_a_layout_that_is_not_what_its_digest_says_is_refused(
    bench: Bench, raw: RawClient, model: str
) -> None:
    layout = whole_layout(bench.source.arrays)
    with pytest.raises(LayoutError, match="digest"):
        raw.declare_message(model, raw.open(model), wire.layout_to_proto(layout, wire.HUGGING_FACE), "0" * 64)


def spoilt(layout: Layout, tensor: str, **changes: Any) -> Layout:
    """The layout with one tensor changed; its first shard fills what it is then."""
    specs = {
        name: replace(spec, **changes) if name == tensor else spec for name, spec in layout.tensors.items()
    }
    shards = [
        p.shard._replace(tensor=specs[tensor].name, box=Box.whole(specs[tensor].shape)) if p.shard.tensor == tensor
        else p.shard
        for p in layout.placements
    ]  # fmt: skip
    return Layout.stream(specs.values(), shards)


def layout_in(bench: Bench, space: str) -> Layout:
    """The whole model as one rank holds it."""
    if space == "hugging_face":
        return whole_layout(bench.source.arrays)
    one = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    layout = bench.trainer.describe_shards(GOOD, one)
    # a gated projection comes as two boxes: make it one, so that each tensor has one shard
    return Layout.stream(
        layout.tensors.values(), [Shard(n, Box.whole(s.shape)) for n, s in layout.tensors.items()]
    )


CONTRADICTIONS: dict[str, Callable[[Layout, str], tuple[Layout, list[str]]]] = {
    # what is declared, and what the error has to say
    "wrong shape": lambda layout, t: (spoilt(layout, t, shape=(3, 5)), [t, "[3, 5]"]),
    "more axes": lambda layout, t: (spoilt(layout, t, shape=(*layout.tensors[t].shape, 1)), [t]),
    "fewer axes": lambda layout, t: (spoilt(layout, t, shape=()), [t]),
    "wrong dtype": lambda layout, t: (spoilt(layout, t, dtype=parse("bf16")), [t, "BF16"]),
    "unknown tensor": lambda layout, t: (spoilt(layout, t, name="evil.weight"), ["evil.weight"]),
}


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_a_tensor_that_contradicts_the_model_is_named(
    bench: Bench, raw: RawClient, model: str, space: str, what: str
) -> None:
    good = layout_in(bench, space)
    for tensor in [next(iter(good.tensors)), list(good.tensors)[-1]]:
        bad, expected = CONTRADICTIONS[what](good, tensor)
        number = raw.open(model)
        with pytest.raises(LayoutError) as caught:
            raw.declare(model, number, bad, space=SPACES[space])
        assert all(text in str(caught.value) for text in expected), caught.value
        assert_never_visible(bench, model, number)
        failed = bench.trainer.version(model, number)
        assert failed.state is VersionState.FAILED
        assert all(text in " ".join((failed.error, *failed.error_details)) for text in expected)
        with pytest.raises(VersionFailed, match="failed"):
            bench.trainer.wait_for(model, number, VersionState.READY, timeout=5)


def test_what_nobody_holds_is_named_with_its_box(bench: Bench, raw: RawClient, model: str) -> None:
    whole = whole_layout(bench.source.arrays)
    shards = [p.shard for p in whole.placements]
    rows, columns = bench.source.arrays[EMBEDDING].shape
    half = Box((0, 0), (rows // 2, columns))
    incomplete = {
        f"box [0:{rows}, 0:{columns}] has no source": [s for s in shards if s.tensor != EMBEDDING],
        f"box [{rows // 2}:{rows}, 0:{columns}] has no source": [
            s._replace(box=half) if s.tensor == EMBEDDING else s for s in shards
        ],
    }
    for expected, kept in incomplete.items():
        number = raw.open(model)
        with pytest.raises(LayoutError) as caught:
            raw.declare(model, number, Layout.stream(whole.tensors.values(), kept))
        assert f"{EMBEDDING} F32[{rows}, {columns}]: {expected}" in str(caught.value)
        assert_never_visible(bench, model, number)


def test_overlaps_and_replicas_without_one_main_shard_are_named_with_their_boxes(
    bench: Bench, raw: RawClient, model: str
) -> None:
    whole = whole_layout(bench.source.arrays)
    others = [p.shard for p in whole.placements if p.shard.tensor != EMBEDDING]
    all_of_it = Box.whole(bench.source.arrays[EMBEDDING].shape)
    rows, columns = all_of_it.extent
    part = Box((10, 0), (rows - 10, columns))
    upper = Box((0, 0), (20, columns))
    cases = {
        f"overlap in [10:20, 0:{columns}]": [Shard(EMBEDDING, upper), Shard(EMBEDDING, part)],
        f"box [0:{rows}, 0:{columns}] is held by rank 0, 0, 2 of them": [Shard(EMBEDDING, all_of_it)] * 2,
        f"box [0:{rows}, 0:{columns}] is held by rank 0, none of them": [
            Shard(EMBEDDING, all_of_it, main=False)
        ],
    }
    for expected, shards in cases.items():
        number = raw.open(model)
        with pytest.raises(LayoutError) as caught:
            raw.declare(model, number, Layout.stream(whole.tensors.values(), [*others, *shards]))
        assert expected in str(caught.value)
        assert EMBEDDING in str(caught.value)
        assert_never_visible(bench, model, number)


def test_an_error_with_the_longest_names_reaches_the_client_whole(
    bench: Bench, raw: RawClient, model: str
) -> None:
    # errors travel in headers, of which gRPC refuses those above 8 KiB
    good = whole_layout(bench.source.arrays)
    for letter in ("x", "é", "模", "🚂"):
        specs = [replace(spec, name=f"{i:02}" + letter * 500) for i, spec in enumerate(good.tensors.values())]
        bad = Layout.stream(specs, [Shard(spec.name, Box.whole(spec.shape)) for spec in specs])
        with pytest.raises(LayoutError) as caught:
            raw.declare(model, raw.open(model), bad)
        assert "00" + letter * 50 in str(caught.value)


@pytest.mark.parametrize("rows", [2**31, 10**9, 4 * 10**12])
def test_a_vocabulary_padded_beyond_belief_is_refused_without_eating_memory(
    bench: Bench, raw: RawClient, model: str, rows: int
) -> None:
    good = layout_in(bench, "megatron")
    name = "embedding.word_embeddings.weight"
    number = raw.open(model)
    before = resident_bytes()
    with pytest.raises(LayoutError, match=name):
        raw.declare(model, number, spoilt(good, name, shape=(rows, 32)), space=wire.MEGATRON)
    assert resident_bytes() - before < 500 << 20
    assert_never_visible(bench, model, number)


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.mlp.linear_fc2.weight",
        "decoder.layers.mlp.experts.experts.linear_fc2.weight",
        "decoder.layers.0.mlp.experts.experts.linear_fc2.weight",
    ],
)
def test_layers_and_experts_beyond_count_are_refused_by_name_and_at_once(
    bench: Bench, raw: RawClient, model: str, name: str
) -> None:
    good = layout_in(bench, "megatron")
    spec = TensorSpec(name, parse("fp32"), (1 << 34, 64, 128))
    shards = [*(p.shard for p in good.placements), Shard(name, Box((0, 0, 0), (1, 64, 128)))]
    bad = Layout.stream([*good.tensors.values(), spec], shards)
    restore = pb.RestoreRequest(model=GOOD, version="latest", layout=wire.layout_to_proto(bad, wire.MEGATRON))
    number = raw.open(model)
    before, started = resident_bytes(), time.monotonic()
    with pytest.raises(LayoutError, match=re.escape(name)):
        raw.declare(model, number, bad, space=wire.MEGATRON)
    with pytest.raises(LayoutError, match=re.escape(name)):
        raw.call(raw.checkpoints.Restore, restore)
    assert time.monotonic() - started < 5
    assert resident_bytes() - before < 500 << 20
    assert_never_visible(bench, model, number)


def test_ranks_that_contradict_each_other_all_hear_of_it(bench: Bench, raw: RawClient, model: str) -> None:
    layouts = [rows_layout(bench.source.arrays, rank, 2) for rank in range(2)]
    name = "model.norm.weight"
    layouts[1] = Layout.stream(
        [replace(s, shape=(64,)) if s.name == name else s for s in layouts[1].tensors.values()],
        [p.shard for p in layouts[1].placements],
    )
    number = raw.open(model, ranks=2)
    heard: list[BaseException] = []

    def declare(rank: int) -> None:
        try:
            raw.declare(model, number, layouts[rank], rank=rank)
        except LayoutError as error:
            heard.append(error)

    threads = [threading.Thread(target=declare, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    assert len(heard) == 2
    assert all(name in str(error) and "[64]" in str(error) for error in heard)
    assert_never_visible(bench, model, number)


# -- the stream of a push ------------------------------------------------------------------------------------------------


@pytest.fixture
def begun(bench: Bench, raw: RawClient, model: str) -> tuple[int, bytes]:
    """A version that is open and declared, and the stream that it waits for."""
    layout = whole_layout(bench.source.arrays)
    number = raw.open(model)
    return number, stream_of(bench.source.arrays, layout, raw.declare(model, number, layout))


def test_a_push_that_stops_half_way_is_not_seen_and_can_be_resumed(
    bench: Bench, raw: RawClient, model: str, begun: tuple[int, bytes]
) -> None:
    number, stream = begun
    half = len(stream) // 2 + 1
    call_off = threading.Event()

    def stops() -> Iterator[Any]:
        yield from raw.messages(model, number, cut(stream[:half]))
        call_off.wait()

    call = raw.checkpoints.Push.future(stops())
    deadline = time.monotonic() + 10
    while raw.received(model, number) != [(0, half)] and time.monotonic() < deadline:
        time.sleep(0.02)
    call.cancel()
    call_off.set()
    assert raw.received(model, number) == [(0, half)]
    assert_never_visible(bench, model, number)
    with pytest.raises(FailedPrecondition) as caught:
        raw.seal(model, number)
    assert "have not arrived" in str(caught.value)
    assert any("model.layers.1" in detail and "box [" in detail for detail in caught.value.details)
    assert not any(
        detail.startswith(EMBEDDING) for detail in caught.value.details
    )  # it came first, and whole
    raw.push(model, number, [(half + offset, data) for offset, data in cut(stream[half:])])
    raw.seal(model, number)
    assert_equal(bench.engine, model, number, bench.source.arrays)


def test_a_corrupted_piece_is_refused_and_can_be_sent_again(
    bench: Bench, raw: RawClient, model: str, begun: tuple[int, bytes]
) -> None:
    number, stream = begun
    pieces = cut(stream)
    with pytest.raises(DataLoss, match="checksum"):
        raw.push(model, number, pieces[:3], damage=True)
    assert raw.received(model, number) == [(0, pieces[2][0])]
    with pytest.raises(FailedPrecondition, match="not arrived"):
        raw.seal(model, number)
    raw.push(model, number, pieces[2:])
    raw.seal(model, number)
    assert_equal(bench.engine, model, number, bench.source.arrays)


@pytest.mark.parametrize("offset", [-1, 0, 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 4])
@pytest.mark.parametrize("data", [b"", b"evil"])
def test_a_piece_outside_of_the_stream_is_refused(
    bench: Bench, raw: RawClient, model: str, begun: tuple[int, bytes], offset: int, data: bytes
) -> None:
    number, stream = begun
    if offset < 1000:
        offset += len(stream) + (1 if not data else 0)
    if offset + len(data) > len(stream):
        with pytest.raises(InvalidArgument, match="outside of its stream"):
            raw.push(model, number, [(offset, data)])
    assert raw.received(model, number) == []
    raw.push(model, number, cut(stream))
    raw.seal(model, number)
    assert_equal(bench.engine, model, number, bench.source.arrays)


def test_pieces_may_come_repeatedly_overlapping_and_in_any_order(
    bench: Bench, raw: RawClient, model: str, begun: tuple[int, bytes]
) -> None:
    number, stream = begun
    chance = random.Random(5)
    pieces = [*cut(stream, 4_999), *cut(stream, 7_001), *cut(stream, 1), *cut(stream[:100], 1)][
        : 3 * len(stream) // 4_999
    ]
    pieces += cut(stream, 3_333)
    chance.shuffle(pieces)
    parts = [pieces[i::4] for i in range(4)]
    threads = [threading.Thread(target=raw.push, args=(model, number, part)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    raw.push(model, number, [(0, b""), (len(stream), b"")])
    assert raw.received(model, number) == [(0, len(stream))]
    raw.seal(model, number)
    assert_equal(bench.engine, model, number, bench.source.arrays)


def test_a_sealed_version_takes_nothing_more(bench: Bench, raw: RawClient, model: str) -> None:
    arrays = bench.source.arrays
    number = raw.push_whole(model, arrays)
    layout = whole_layout(arrays)
    evil = b"\xff" * layout.nbytes
    for attempt in (
        lambda: raw.push(model, number, cut(evil)),
        lambda: raw.declare(model, number, layout),
        lambda: raw.call(raw.checkpoints.AbortVersion, pb.AbortVersionRequest(model=model, number=number)),
    ):
        with pytest.raises(FailedPrecondition, match=r"sealed|visible already"):
            attempt()
    assert_equal(bench.engine, model, number, arrays)


def test_a_rank_that_is_sealed_takes_nothing_more_while_others_push(
    bench: Bench, raw: RawClient, model: str
) -> None:
    number, streams = two_ranks(bench, raw, model)
    raw.push(model, number, cut(streams[0]), rank=0)
    raw.seal(model, number, rank=0)
    with pytest.raises(FailedPrecondition, match="sealed"):
        raw.push(model, number, [(0, b"evil")], rank=0)
    raw.push(model, number, cut(streams[1]), rank=1)
    raw.seal(model, number, rank=1)
    assert_equal(bench.engine, model, number, bench.source.arrays)


def two_ranks(bench: Bench, raw: RawClient, model: str) -> tuple[int, list[bytes]]:
    """A version of two ranks, declared, and their streams."""
    arrays = bench.source.arrays
    number = raw.open(model, ranks=2)
    layouts = [rows_layout(arrays, rank, 2) for rank in range(2)]
    answers: dict[int, list[int]] = {}

    def declare(rank: int) -> None:
        answers[rank] = raw.declare(model, number, layouts[rank], rank=rank)

    threads = [threading.Thread(target=declare, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return number, [stream_of(arrays, layouts[rank], answers[rank]) for rank in range(2)]


def test_a_rank_that_does_not_exist_or_has_not_declared_is_refused(
    bench: Bench, raw: RawClient, model: str
) -> None:
    number = raw.open(model, ranks=2)
    layout = whole_layout(bench.source.arrays)
    for rank in (2, 2**31, 2**32 - 1):
        for attempt in (
            lambda rank=rank: raw.declare(model, number, layout, rank=rank),
            lambda rank=rank: raw.push(model, number, [(0, b"x")], rank=rank),
            lambda rank=rank: raw.received(model, number, rank),
            lambda rank=rank: raw.seal(model, number, rank),
        ):
            with pytest.raises(InvalidArgument, match=f"rank {rank}"):
                attempt()
    for attempt in (
        lambda: raw.push(model, number, [(0, b"x")]),
        lambda: raw.received(model, number),
        lambda: raw.seal(model, number),
    ):
        with pytest.raises(FailedPrecondition, match="declared"):
            attempt()
    for unknown in (number + 1, 2**63, 2**64 - 1):
        with pytest.raises(NotFound):
            raw.push(model, unknown, [(0, b"x")])


def test_a_push_without_header_or_without_any_message_is_refused(bench: Bench, raw: RawClient) -> None:
    for messages in ([], [pb.PushRequest(offset=0, data=b"x")]):
        with pytest.raises(InvalidArgument, match="header"), rpc.translated_errors(raw.address):
            raw.checkpoints.Push(iter(messages), timeout=10)


def test_nobody_pushes_as_another_clients_rank(
    bench: Bench, raw: RawClient, model: str, begun: tuple[int, bytes]
) -> None:
    number, stream = begun
    with RawClient(bench.running.address) as other:
        for attempt in (
            lambda: other.push(model, number, [(0, b"evil" * 100)]),
            lambda: other.seal(model, number),
            lambda: other.declare(model, number, whole_layout(bench.source.arrays)),
        ):
            with pytest.raises(AlreadyExists, match="another process"):
                attempt()
    raw.push(model, number, cut(stream))
    raw.seal(model, number)
    assert_equal(bench.engine, model, number, bench.source.arrays)


def test_the_second_of_two_trainers_that_push_one_step_is_told_so(bench: Bench, model: str) -> None:
    with RawClient(bench.running.address) as one, RawClient(bench.running.address) as other:
        layout = whole_layout(bench.source.arrays)
        first = one.open(model, step=7, request_id="r/7")
        one.declare(model, first, layout)
        second = other.open(model, step=7, request_id="r/7")
        assert second == first
        with pytest.raises(AlreadyExists, match="another process") as caught:
            other.declare(model, second, layout)
        assert "its own run name" in caught.value.fix
        with pytest.raises(InvalidArgument, match="ranks"):
            other.open(model, step=7, request_id="r/7", ranks=2)


def test_a_request_id_that_stands_for_another_step_or_run_is_refused(
    bench: Bench, raw: RawClient, model: str
) -> None:
    raw.open(model, step=7, request_id="mine")
    for fields in ({"step": 8}, {"step": 7, "run": "other"}):
        with pytest.raises((InvalidArgument, AlreadyExists)):
            raw.open(model, request_id="mine", **fields)


def test_a_restarted_trainer_that_pushes_a_durable_step_again_gets_a_new_version(
    bench: Bench, model: str
) -> None:
    numbers = []
    for _ in range(2):
        with RawClient(bench.running.address) as started_anew:
            numbers.append(started_anew.push_whole(model, bench.source.arrays, step=3, request_id="r/3"))
        bench.trainer.wait_for(model, numbers[-1], VersionState.DURABLE, timeout=20)
    assert numbers[1] > numbers[0]
    for number in numbers:
        assert_equal(bench.engine, model, number, bench.source.arrays)


def test_layouts_that_changed_since_the_last_push_are_never_mixed_with_those_of_then(
    bench: Bench, model: str
) -> None:
    """Rank 1 declares new shards, of the same size as before, before rank 0 declares its old ones."""
    arrays = bench.source.arrays
    old = [rows_layout(arrays, rank, 2) for rank in range(2)]
    placements = list(old[1].placements)
    names = [p.shard.tensor for p in placements]
    gate, up = (names.index(f"model.layers.0.mlp.{n}_proj.weight") for n in ("gate", "up"))
    placements[gate], placements[up] = placements[up], placements[gate]
    new = Layout.stream(old[1].tensors.values(), [p.shard for p in placements])
    with RawClient(bench.running.address) as raw:

        def push(layouts: list[Layout]) -> int:
            number = raw.open(model, ranks=2)
            errors: list[WeighbridgeError] = []

            def one(rank: int) -> None:
                try:
                    assigned = raw.declare(model, number, layouts[rank], rank=rank)
                    raw.push(model, number, cut(stream_of(arrays, layouts[rank], assigned)), rank=rank)
                    raw.seal(model, number, rank=rank)
                except WeighbridgeError as error:
                    errors.append(error)

            threads = [threading.Thread(target=one, args=(rank,)) for rank in (1, 0)]
            for thread in threads:
                thread.start()
                time.sleep(0.2)
            for thread in threads:
                thread.join()
            assert not errors or bench.trainer.version(model, number).state is VersionState.FAILED
            return number

        push(old)
        number = push([old[0], new])
        if bench.trainer.version(model, number).state is not VersionState.FAILED:
            assert_equal(bench.engine, model, number, arrays)
        assert_equal(bench.engine, model, push([old[0], new]), arrays)


def test_a_seal_that_waits_for_a_late_piece_ends_once_and_heeds_an_abort(
    bench: Bench, raw: RawClient, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weighbridge_service import transfers

    arrays = bench.source.arrays
    for abort in (False, True):
        layout = whole_layout(arrays)
        number = raw.open(model)
        stream = stream_of(arrays, layout, raw.declare(model, number, layout))
        entered, go_on = threading.Event(), threading.Event()
        scatter = transfers.Transfer.scatter

        def slow(
            self: Any,
            *args: Any,
            entered: Any = entered,
            go_on: Any = go_on,
            scatter: Any = scatter,
            **kwargs: Any,
        ) -> Any:
            entered.set()
            go_on.wait(10)
            return scatter(self, *args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(transfers.Transfer, "scatter", slow)
            late = threading.Thread(target=raw.push, args=(model, number, [(0, stream[:5000])]))
            late.start()
            assert entered.wait(10)
        raw.push(model, number, cut(stream))
        results: list[Any] = []

        def seal(number: int = number, results: list[Any] = results) -> None:
            try:
                results.append(raw.seal(model, number).state)
            except WeighbridgeError as error:
                results.append(error)

        threads = [threading.Thread(target=seal) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        if abort:
            request = pb.AbortVersionRequest(model=model, number=number, reason="changed my mind")
            aborting = threading.Thread(target=raw.call, args=(raw.checkpoints.AbortVersion, request))
            aborting.start()
            time.sleep(0.2)
            threads.append(aborting)
        go_on.set()
        for thread in [*threads, late]:
            thread.join()
        if abort:
            assert bench.trainer.version(model, number).state is VersionState.ABORTED
            assert all(isinstance(result, VersionFailed) for result in results), results
            assert_never_visible_number(bench, model, number)
        else:
            bench.trainer.wait_for(model, number, VersionState.DURABLE, timeout=20)
            time.sleep(0.5)  # a second publication would come now
            assert_equal(bench.engine, model, number, arrays)
            assert not bench.trainer.verify(model, number).problems


def assert_never_visible_number(bench: Bench, model: str, number: int) -> None:
    assert number not in [v.number for v in bench.trainer.versions(model)]
    assert number not in bench.trainer.refs(model).values()


# -- ranks and clients that vanish ---------------------------------------------------------------------------------------


def test_a_rank_that_never_comes_is_named_and_its_version_never_seen(bench: Bench, tmp_path: Path) -> None:
    arrays = bench.source.arrays
    with (
        running_service(tmp_path / "store", receive_timeout=1.5) as running,
        RawClient(running.address) as raw,
        TrainerClient(running.address) as trainer,
    ):
        trainer.register_files("acme/late", bench.source.files)
        good = raw.push_whole("acme/late", arrays)
        seen: list[int] = []

        def watch() -> None:
            for version in trainer.watch("acme/late"):
                seen.append(version.number)
                if len(seen) == 2:
                    return

        watching = threading.Thread(target=watch, daemon=True)
        watching.start()
        number = raw.open("acme/late", ranks=3)
        with pytest.raises(DeadlineExceeded) as caught:
            raw.declare("acme/late", number, rows_layout(arrays, 1, 3), rank=1, seconds=1.0)
        assert caught.value.details == ("rank 0", "rank 2")
        half = raw.open("acme/late")
        layout = whole_layout(arrays)
        stream = stream_of(arrays, layout, raw.declare("acme/late", half, layout))
        raw.push("acme/late", half, cut(stream)[:3])
        for waited, missing in (
            (number, "rank 2 has not declared"),
            (half, "model.layers.0.mlp.up_proj.weight F32[48, 32]: box [0:48, 0:32] of rank 0"),
        ):
            with pytest.raises(VersionFailed) as failure:
                trainer.wait_for("acme/late", waited, VersionState.READY, timeout=10)
            assert "nothing was heard" in str(failure.value)
            assert missing in str(failure.value)
        states = {v.number: v.state for v in trainer.versions("acme/late", include_invisible=True)}
        assert states[number] is states[half] is VersionState.FAILED
        assert [v.number for v in trainer.versions("acme/late")] == [good]
        newest = raw.push_whole("acme/late", arrays)
        deadline = time.monotonic() + 5
        while newest not in seen and time.monotonic() < deadline:
            time.sleep(0.02)
        assert seen == [good, newest]
        watching.join(10)


KILLED = """
import sys, time
import numpy as np
from tests.raw_clients import RawClient, whole_layout, stream_of, cut
from safetensors.numpy import load_file
address, model, file = sys.argv[1:]
arrays = load_file(file)
raw = RawClient(address)
layout = whole_layout(arrays)
number = raw.open(model, request_id="r/1")
stream = stream_of(arrays, layout, raw.declare(model, number, layout))
def messages():
    yield from raw.messages(model, number, cut(stream[: len(stream) // 2]))
    print(number, flush=True)
    time.sleep(60)
raw.checkpoints.Push(messages())
"""


def test_a_client_that_is_killed_in_mid_push_leaves_nothing_to_see(bench: Bench, model: str) -> None:
    file = bench.source.folder / "model.safetensors"
    with forked_python("-c", KILLED, bench.running.address, model, str(file)) as process:
        number = int(process.stdout.readline())
    assert_never_visible(bench, model, number)
    with RawClient(bench.running.address) as restarted:
        assert restarted.open(model, request_id="r/1") == number
        with pytest.raises(AlreadyExists) as caught:
            restarted.declare(model, number, whole_layout(bench.source.arrays))
        assert f"abort version {number}" in caught.value.fix
        bench.trainer.abort(model, number)
        again = restarted.push_whole(model, bench.source.arrays, request_id="r/1")
    assert again > number
    assert_equal(bench.engine, model, again, bench.source.arrays)


@pytest.mark.parametrize("responses", [0, 1, 2])
def test_an_engine_that_goes_away_in_mid_pull_keeps_no_memory(
    bench: Bench, tmp_path: Path, responses: int
) -> None:
    with (
        running_service(tmp_path / "store") as running,
        RawClient(running.address) as raw,
        TrainerClient(running.address) as trainer,
    ):
        big = tiny_folder(tmp_path / "hf", hidden_size=8192)  # several messages
        trainer.register_files("acme/left", big.files)
        for _ in range(3):
            number = trainer.push_folder("acme/left", big.folder).wait().number
            calls = []
            for _ in range(3):
                request = weight_service_pb2.PullRequest(model="acme/left", version="live")
                call = raw.weights.Pull(iter([request]))
                for _ in range(responses):
                    next(call)
                call.cancel()
                calls.append(call)
        one = running.service.images.usage().memory_in_use
        deadline = time.monotonic() + 10
        size = trainer.version("acme/left", number).tensor_bytes
        while one >= 2 * size and time.monotonic() < deadline:
            time.sleep(0.1)
            one = running.service.images.usage().memory_in_use
        assert one < 2 * size, "images of versions that are not live any more are still held"


# -- a full disk ---------------------------------------------------------------------------------------------------------


class Disk:
    """A small disk that can be filled: a real one where mounting is permitted, otherwise one that says so."""

    def __init__(self, folder: Path, mounted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._mounted = mounted
        self._room: int | None = None
        if not mounted:
            write = os.write

            def limited(file: int, data: Any) -> int:
                if self._room is not None and len(data) > self._room:
                    raise OSError(28, "No space left on device")
                return write(file, data)

            monkeypatch.setattr(os, "write", limited)

    def fill(self, room: int) -> None:
        self._room = room
        if self._mounted:
            status = os.statvfs(self.folder)
            with (self.folder / "filler").open("ab") as file:
                file.write(b"\0" * max(status.f_bavail * status.f_frsize - room, 0))

    def make_room(self) -> None:
        self._room = None
        (self.folder / "filler").unlink(missing_ok=True)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    with contextlib.suppress(OSError):
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True, check=False
        )
    try:
        yield Disk(folder, mounted.returncode == 0, monkeypatch)
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "-l", folder], check=True)


def test_with_a_full_disk_versions_stay_live_the_trainer_is_told_and_they_become_durable_when_there_is_room(
    bench: Bench, disk: Disk, tmp_path: Path
) -> None:
    source = bench.source
    # what is the same as in the version before would need no room
    other, another = (tiny_folder(tmp_path / str(seed), seed=seed) for seed in (7, 8))
    with (
        running_service(disk.folder / "store") as running,
        TrainerClient(running.address) as trainer,
        RawClient(running.address) as raw,
        EngineClient(running.address) as engine,
    ):
        trainer.register_files("acme/full", source.files)
        first = trainer.push_folder("acme/full", source.folder, step=1).wait()
        number = raw.open("acme/full")
        layout = whole_layout(other.arrays)
        stream = stream_of(other.arrays, layout, raw.declare("acme/full", number, layout))
        disk.fill(40_000)  # a head fits, a model does not
        raw.push("acme/full", number, cut(stream))
        raw.seal("acme/full", number)
        with pytest.raises(DeadlineExceeded, match=r"not durable yet: .*no space is left"):
            trainer.wait_for("acme/full", number, VersionState.DURABLE, timeout=3)
        found = trainer.version("acme/full", number)
        assert found.state is VersionState.VERIFIED
        assert trainer.refs("acme/full") == {"latest": first.number, "live": number}
        assert_equal(engine, "acme/full", "live", other.arrays)
        assert_equal(engine, "acme/full", "latest", source.arrays)
        with pytest.raises(FailedPrecondition):
            trainer.set_ref("acme/full", "prod", number)
        third = trainer.push_folder("acme/full", another.folder, step=3)
        with pytest.raises(DeadlineExceeded, match="no space is left"):
            third.wait(timeout=3)
        disk.fill(0)
        with pytest.raises(ResourceExhausted, match="no space is left"):
            trainer.push_folder("acme/full", another.folder, step=4)
        assert_equal(engine, "acme/full", "live", another.arrays)
        disk.make_room()
        last = trainer.push_folder("acme/full", source.folder, step=5).wait(timeout=20)
        assert last.state is VersionState.DURABLE
        assert not trainer.verify("acme/full", last.number).problems
        assert trainer.refs("acme/full")["latest"] == last.number
        assert trainer.versions("acme/full")[0].state is VersionState.DURABLE
        for each, arrays in ((number, other.arrays), (third.number, another.arrays)):
            trainer.wait_for("acme/full", each, VersionState.DURABLE, timeout=60)
            assert not trainer.verify("acme/full", each).problems
            assert_equal(engine, "acme/full", each, arrays)
        left = {path.name for path in (disk.folder / "store/models/acme/full/versions").iterdir()}
        assert left == {f"{n:012}" for n in (first.number, number, third.number, last.number)}


def test_an_error_after_the_head_was_written_never_costs_the_versions_files(
    bench: Bench, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fails between the renaming of the new head and the flushing of its folder."""
    store = bench.running.service.catalog.store
    install = store._install

    def fails_late(temp: str, key: str, mode: Any, what: str) -> None:
        install(temp, key, mode, what)
        if key.endswith("head.json") and json.loads(store.get(key)[0])["recent"]:
            raise DataLoss("the device reports 'Input/output error'")

    monkeypatch.setattr(store, "_install", fails_late)
    number = bench.trainer.push_folder(model, bench.source.folder).number
    with contextlib.suppress(WeighbridgeError):
        bench.trainer.wait_for(model, number, VersionState.DURABLE, timeout=10)
    monkeypatch.undo()
    assert bench.trainer.refs(model)["latest"] == number
    assert not bench.trainer.verify(model, number).problems
    assert_equal(bench.engine, model, "latest", bench.source.arrays)


# -- what is no request at all -------------------------------------------------------------------------------------------


def test_a_message_over_the_limit_is_refused(bench: Bench, model: str) -> None:
    unlimited = [("grpc.max_send_message_length", -1)]
    content = b"\0" * (rpc.MAX_MESSAGE_BYTES + 1)
    with grpc.insecure_channel(bench.running.address, options=unlimited) as channel:
        call = channel.unary_unary("/weighbridge.v1.ModelService/RegisterModel")
        with pytest.raises(grpc.RpcError) as caught:
            call(content, timeout=30)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        push = channel.stream_unary("/weighbridge.v1.CheckpointService/Push")
        with pytest.raises(grpc.RpcError) as caught:
            push(iter([content]), timeout=30)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises((ResourceExhausted, InvalidArgument), match="63 MiB"):
        bench.trainer.register_files(model, {**bench.source.files, "tokenizer.json": content})


def test_malformed_messages_and_unknown_methods_get_an_error_status(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    services = {
        "ModelService": model_service_pb2, "CheckpointService": checkpoint_service_pb2,
        "WeightService": weight_service_pb2, "LocalLaneService": local_lane_pb2, "ReplicaService": replica_service_pb2,
    }  # fmt: skip
    garbage = [
        b"\xff" * 100,
        b"\x0a\xff\xff\xff\xff\x7f",
        random.Random(1).randbytes(1000),
        b"\x0a\x02\xff\xfe",
    ]
    with grpc.insecure_channel(bench.running.address) as channel:
        for service, module in services.items():
            for method in module.DESCRIPTOR.services_by_name[service].methods:
                path = f"/weighbridge.v1.{service}/{method.name}"
                make = getattr(
                    channel,
                    ("stream" if method.client_streaming else "unary")
                    + ("_stream" if method.server_streaming else "_unary"),
                )
                for number, data in enumerate(garbage):
                    code = grpc.StatusCode.OK
                    try:
                        answer = make(path)(iter([data]) if method.client_streaming else data, timeout=5)
                        if method.server_streaming:
                            list(answer)
                    except grpc.RpcError as error:
                        code = error.code()
                    # after the first, they may be messages with unknown fields only, which protobuf lets pass
                    assert code is grpc.StatusCode.INVALID_ARGUMENT or (
                        number and code is grpc.StatusCode.OK
                    ), path
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/weighbridge.v1.ModelService/Evil")(b"", timeout=5)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert [record for record in caplog.records if record.exc_info] == []


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\0" * 10_000,
        random.Random(2).randbytes(100_000),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + random.Random(3).randbytes(10_000),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"",
    ],
    ids=["HTTP/1.1", "zeros", "random", "HTTP/2 and random", "huge frame", "TLS", "nothing"],
)
def test_what_is_no_grpc_is_cut_off(bench: Bench, data: bytes) -> None:
    host, port = bench.running.address.rsplit(":", 1)
    for _ in range(5):
        with (
            socket.create_connection((host, int(port)), timeout=5) as connection,
            contextlib.suppress(OSError),
        ):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65_536):
                pass


# -- engines -------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("size", "rank"), [(0, 0), (2, 2), (3, 0), (2**32 - 1, 0), (2**32 - 1, 2**32 - 1), (8, 0)]
)
def test_a_parallelism_that_does_not_fit_is_refused(raw: RawClient, size: int, rank: int) -> None:
    request = weight_service_pb2.LayoutRequest(
        tensor_parallel=weight_service_pb2.TensorParallel(size=size, rank=rank)
    )
    with pytest.raises(InvalidArgument):
        raw.call(
            raw.weights.PlanPull, weight_service_pb2.PlanPullRequest(model=GOOD, version="1", layout=request)
        )
    assert (
        TensorParallel(size, rank).size == size
    )  # the SDK refuses none of this when it is made, but when it is sent
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


# -- local folders -------------------------------------------------------------------------------------------------------


def safetensors_bytes(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(shape: Any = (2,), offsets: Any = (0, 8), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


DAMAGED: dict[str, bytes] = {
    "empty": b"",
    "seven bytes": b"\0" * 7,
    "header of 2**60": (2**60).to_bytes(8, "little") + b"{}",
    "header of 2**64 - 1": b"\xff" * 8 + b"{}",
    "header beyond the end": (100).to_bytes(8, "little") + b"{}",
    "no JSON": safetensors_bytes(b"{"),
    "no UTF-8": safetensors_bytes(b"\xff\xff"),
    "deep": safetensors_bytes(b"[" * 100_000),
    "a list": safetensors_bytes([]),
    "a number": safetensors_bytes(5),
    "no entry": safetensors_bytes({"a": 5}),
    "twice": safetensors_bytes(
        b'{"a":' + json.dumps(entry()).encode() + b',"a":' + json.dumps(entry()).encode() + b"}", b"\0" * 8
    ),
    "overlap": safetensors_bytes({"a": entry(), "b": entry(offsets=[4, 12])}, b"\0" * 12),
    "gap": safetensors_bytes({"a": entry(), "b": entry(offsets=[12, 20])}, b"\0" * 20),
    "too short": safetensors_bytes({"a": entry()}, b"\0" * 7),
    "too long": safetensors_bytes({"a": entry()}, b"\0" * 9),
    "three offsets": safetensors_bytes({"a": entry(offsets=[0, 4, 8])}, b"\0" * 8),
    "one offset": safetensors_bytes({"a": entry(offsets=[8])}, b"\0" * 8),
    "no offsets": safetensors_bytes({"a": entry(offsets=[])}, b"\0" * 8),
    "backwards": safetensors_bytes({"a": entry(offsets=[8, 0])}, b"\0" * 8),
    "negative": safetensors_bytes({"a": entry(offsets=[-8, 0])}, b"\0" * 8),
    "infinite offset": safetensors_bytes(
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,1e999]}}', b"\0" * 8
    ),
    "shape and offsets disagree": safetensors_bytes({"a": entry(shape=[3])}, b"\0" * 8),
    "negative shape": safetensors_bytes({"a": entry(shape=[-1, -2])}, b"\0" * 8),
    "huge shape": safetensors_bytes({"a": entry(shape=[2**62, 2**62], offsets=[0, 2**126])}, b"\0" * 8),
    "100 axes": safetensors_bytes({"a": entry(shape=[1] * 99 + [2])}, b"\0" * 8),
    "text shape": safetensors_bytes({"a": entry(shape="2")}, b"\0" * 8),
    "fraction": safetensors_bytes({"a": entry(shape=[2.5])}, b"\0" * 8),
    "unknown dtype": safetensors_bytes({"a": entry(dtype="EVIL")}, b"\0" * 8),
    "list as dtype": safetensors_bytes({"a": entry(dtype=["F32"])}, b"\0" * 8),
    "empty name": safetensors_bytes({"": entry()}, b"\0" * 8),
    "name with NUL": safetensors_bytes({"a\0": entry()}, b"\0" * 8),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_file_is_not_pushed(bench: Bench, tmp_path: Path, model: str, what: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(DAMAGED[what])
    before = bench.trainer.versions(model, include_invisible=True)
    with pytest.raises((DataLoss, InvalidArgument)) as caught:
        bench.trainer.push_folder(model, tmp_path)
    assert len(str(caught.value)) < 2000
    assert bench.trainer.versions(model, include_invisible=True) == before


def test_a_file_cut_short_is_not_pushed(bench: Bench, tmp_path: Path, model: str) -> None:
    whole = (bench.source.folder / "model.safetensors").read_bytes()
    for length in (len(whole) - 1, len(whole) // 2, 100, 8):
        (tmp_path / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(DataLoss):
            bench.trainer.push_folder(model, tmp_path)


BAD_INDEXES: dict[str, Any] = {
    "outside": {"weight_map": {"a": "../../etc/passwd"}},
    "absolute": {"weight_map": {"a": "/etc/passwd"}},
    "parent": {"weight_map": {"a": ".."}},
    "itself": {"weight_map": {"a": "."}},
    "empty": {"weight_map": {"a": ""}},
    "NUL": {"weight_map": {"a": "a\0b"}},
    "folder": {"weight_map": {"a": "folder"}},
    "long": {"weight_map": {"a": "x" * 10_000}},
    "missing": {"weight_map": {"a": "model-00001-of-00002.safetensors"}},
    "config": {"weight_map": {"a": "config.json"}},
    "number": {"weight_map": {"a": 5}},
    "mixed": {"weight_map": {"a": 5, "b": "x"}},
    "list": {"weight_map": ["a"]},
    "nothing": {},
    "no object": [],
    "deep": b"[" * 100_000,
    "no JSON": b"\xff",
}


@pytest.mark.parametrize("what", BAD_INDEXES)
def test_a_bad_index_is_refused_and_never_leaves_its_folder(
    bench: Bench, tmp_path: Path, model: str, what: str
) -> None:
    index = BAD_INDEXES[what]
    (tmp_path / "folder").mkdir()
    (tmp_path / "config.json").write_bytes(bench.source.files["config.json"])
    (tmp_path / "model.safetensors.index.json").write_bytes(
        index if isinstance(index, bytes) else json.dumps(index).encode()
    )
    with pytest.raises((DataLoss, NotFound, InvalidArgument)):
        bench.trainer.push_folder(model, tmp_path)


def test_a_folder_without_weights_or_of_another_model_is_refused(
    bench: Bench, tmp_path: Path, model: str
) -> None:
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(NotFound):
            bench.trainer.push_folder(model, folder)
        with pytest.raises(NotFound, match=r"config\.json"):
            bench.trainer.register_model("acme/none", folder)
    other = tiny_folder(tmp_path / "other", hidden_size=64)
    with pytest.raises(LayoutError) as caught:
        bench.trainer.push_folder(model, other.folder)
    assert f"{EMBEDDING} F32[128, 64]: the model has {EMBEDDING} F32[128, 32]" in str(caught.value)
    assert np.array_equal(other.arrays[EMBEDDING].shape, (128, 64))
