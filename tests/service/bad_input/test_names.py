"""Names, versions and texts that nothing can have: does every call refuse them, or know of no such thing?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.service.bad_input.bench import GOOD, Bench
from tests.support.raw_clients import RawClient, assert_equal, pb
from weighbridge._core.resources import VersionState
from weighbridge.errors import DeadlineExceeded, InvalidArgument, NotFound
from weighbridge.v1 import checkpoint_service_pb2, model_service_pb2, resources_pb2, weight_service_pb2

BAD_MODELS = [
    "", "/", "a/", "/a", "a", "../evil", "a/..", "../../etc/passwd", "a/b/c", "a/b/../c", "a\0b/c", "a/b\0",
    "a/" + "x" * 10_000, "x" * 10_000, "ä/b", "模型/权重", "a/🚂", "a/b.git", "./a", "a/.b", "a/b\n", "a b/c", "-a/b",
    "a\\..\\b/c",
]  # fmt: skip


def calls_with_model(raw: RawClient) -> dict[str, Callable[[str], Any]]:
    """Every call that names a model."""
    c, m, w = checkpoint_service_pb2, model_service_pb2, weight_service_pb2
    layout = resources_pb2.Layout(space=resources_pb2.TENSOR_SPACE_MEGATRON)
    return {
        "get": lambda n: raw.call(raw.models.GetModel, m.GetModelRequest(model=n)),
        "files": lambda n: raw.call(raw.models.GetModelFiles, m.GetModelFilesRequest(model=n)),
        "version": lambda n: raw.call(raw.models.GetVersion, m.GetVersionRequest(model=n, version="1")),
        "versions": lambda n: raw.call(raw.models.ListVersions, m.ListVersionsRequest(model=n)),
        "watch": lambda n: raw.call(
            raw.models.WatchRefs, m.WatchRefsRequest(refs=[m.WatchedRef(model=n, ref="live")]), 1.0
        ),
        "set ref": lambda n: raw.call(raw.models.SetRef, m.SetRefRequest(model=n, ref="prod", version="1")),
        "delete ref": lambda n: raw.call(raw.models.DeleteRef, m.DeleteRefRequest(model=n, ref="prod")),
        "refs": lambda n: raw.call(raw.models.ListRefs, m.ListRefsRequest(model=n)),
        "verify": lambda n: raw.call(raw.models.VerifyVersion, m.VerifyVersionRequest(model=n, version="1")),
        "open": lambda n: raw.open(n),
        "declare": lambda n: raw.call(raw.checkpoints.DeclareLayout, c.DeclareLayoutRequest(model=n, number=1)),
        "push": lambda n: raw.push(n, 1, [(0, b"x")]),
        "push state": lambda n: raw.received(n, 1),
        "seal": lambda n: raw.seal(n, 1),
        "abort": lambda n: raw.call(raw.checkpoints.AbortVersion, c.AbortVersionRequest(model=n, number=1)),
        "restore": lambda n: raw.call(raw.checkpoints.Restore, c.RestoreRequest(model=n, version="1", layout=layout)),
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


def test_an_unknown_model_is_not_found_by_any_call_but_a_watch_which_waits_for_it(raw: RawClient) -> None:
    calls = calls_with_model(raw)
    with pytest.raises(DeadlineExceeded):
        calls.pop("watch")("acme/nobody")
    for what, call in calls.items():
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
    ["../config.json", "/etc/passwd", "a//b", "a/../b", "..", "x\0", ".hidden", "-x", "x" * 10_000, "é.json", "", "a\nb",
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
