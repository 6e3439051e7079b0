"""Do the decisions that blocking and asyncio clients share hold for any clock, any dice and any service?"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.waiting import processor_seconds
from weighbridge import Boxes, EngineClient, FullTensors, TrainerClient
from weighbridge._clients.calls import model_calls, pull_calls, version_calls
from weighbridge._clients.calls.known_layouts import KnownLayouts
from weighbridge._clients.calls.operation_calls import ask_all
from weighbridge._clients.calls.steps import Pause, UnaryCall, take
from weighbridge._clients.calls.watching import Watch
from weighbridge._core.operations import table
from weighbridge._core.resources import VersionState
from weighbridge._transport.backoff import Backoff
from weighbridge.errors import (
    DataLoss,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from weighbridge.v1 import model_service_pb2 as pb
from weighbridge.v1 import resources_pb2

MODEL = "tests/decisions"
JITTERS = st.lists(st.floats(0, 1), min_size=1, max_size=40)


def no_room(retry_after: float | None) -> ResourceExhausted:
    error = ResourceExhausted("full")
    error.retry_after = retry_after
    return error


@given(JITTERS, st.floats(0, 100), st.floats(0, 1e6))
def test_pauses_grow_within_bounds_and_end_in_time(jitters: list[float], seconds: float, start: float) -> None:
    backoff, now = Backoff(seconds), start
    for number, jitter in enumerate(jitters):
        retry = backoff.after_failure(now, jitter)
        if retry is None:
            assert now + min(0.1 * 2**number, 3.0) >= start + seconds
            return
        assert min(0.1 * 2**number, 3.0) / 2 <= retry.pause <= 3.0
        now += retry.pause
        assert now <= start + seconds + 1e-6
        backoff = retry.backoff


@given(JITTERS, st.floats(0.1, 10))
def test_whoever_gets_on_now_and_then_is_never_given_up(jitters: list[float], seconds: float) -> None:
    backoff, now = Backoff(seconds), 5.0
    for jitter in jitters:
        retry = backoff.renewed().after_failure(now, jitter)
        assert retry is not None
        assert retry.pause <= 0.1
        now, backoff = now + seconds, retry.backoff


def test_nothing_is_tried_again_before_the_service_has_said_or_where_it_would_not_help() -> None:
    retry = Backoff(60.0).after_error(no_room(7.0), 0.0, 0.0)
    assert retry is not None
    assert retry.pause == 7.0
    assert Backoff(60.0).after_error(no_room(100.0), 0.0, 0.0) is None
    assert Backoff(60.0).after_error(no_room(None), 0.0, 0.5) is None
    assert Backoff(60.0).after_error(NotFound("no"), 0.0, 0.5) is None
    assert Backoff(60.0).after_error(Unavailable("gone"), 0.0, 0.5) is not None
    assert Backoff(60.0).after_error(DataLoss("damaged"), 0.0, 0.5) is not None


def test_what_answers_and_is_no_service_is_tried_again_for_as_long_as_that_may_help() -> None:
    assert Backoff(60.0).after_error(Unavailable("HTTP", worth_retrying=0.0), 0.0, 0.5) is None
    backoff, now = Backoff(60.0), 0.0
    for error in [Unavailable("gone")] * 8 + [Unavailable("TLS", worth_retrying=3.0)] * 8:
        retry = backoff.after_error(error, now, 0.5)
        if retry is None:
            break
        backoff, now = retry.backoff, now + retry.pause
    else:
        pytest.fail("it was tried for ever")
    begun = sum(min(0.1 * 2**number, 3.0) * 0.75 for number in range(8))
    assert begun <= now <= begun + 3.0


def test_a_watch_that_has_begun_is_never_given_up_and_goes_on_behind_what_came() -> None:
    watch = Watch.begin([(MODEL, "live")], retry_seconds=0.0)
    gone = Unavailable("gone")
    with pytest.raises(Unavailable) as raised:
        watch.failed(gone, closed=False, now=0.0, jitter=0.5)
    assert raised.value is gone
    watch = watch.received(0, 7)
    for now in range(100):
        pause, watch = watch.failed(gone, closed=False, now=1000.0 * now, jitter=1.0)
        assert pause <= 0.5
        asked = pb.WatchRefsRequest.FromString(watch.call[1])
        assert asked == pb.WatchRefsRequest(refs=[pb.WatchedRef(model=MODEL, ref="live", after=7)])
    with pytest.raises(Unavailable):
        watch.failed(gone, closed=True, now=0.0, jitter=0.5)


def test_all_pages_are_asked_for() -> None:
    asked: list[str] = []

    def answer(call: UnaryCall) -> bytes:
        assert call.path == "/weighbridge.v1.ModelService/ListModels"
        token = pb.ListModelsRequest.FromString(b"".join(call.request)).page_token
        asked.append(token)
        page = len(asked)
        return pb.ListModelsResponse(
            models=[resources_pb2.Model(name=f"tests/{page}{each}") for each in "ab"],
            next_page_token=f"page {page}" if page < 3 else "",
        ).SerializeToString()

    found = take(ask_all(table.LIST_MODELS), answer)
    assert [model.name for model in found] == [f"tests/{page}{each}" for page in (1, 2, 3) for each in "ab"]
    assert asked == ["", "page 1", "page 2"]


@pytest.mark.parametrize("service_page", [2, 100])
def test_no_more_versions_are_asked_for_than_are_wanted(service_page: int) -> None:
    asked: list[tuple[int, str]] = []

    def answer(call: UnaryCall) -> bytes:
        request = pb.ListVersionsRequest.FromString(b"".join(call.request))
        asked.append((request.page_size, request.page_token))
        newest = int(request.page_token or 9) - 1
        numbers = range(newest, max(newest - min(request.page_size, service_page), 0), -1)
        return pb.ListVersionsResponse(
            versions=[
                resources_pb2.Version(model=MODEL, number=number, state=resources_pb2.VERSION_STATE_READY)
                for number in numbers
            ],
            next_page_token=str(numbers[-1]),
        ).SerializeToString()

    found = take(version_calls.list_versions(MODEL, include_invisible=True, limit=3), answer)
    assert [version.number for version in found] == [8, 7, 6]
    assert asked == ([(3, ""), (3, "7")] if service_page == 2 else [(3, "")])
    with pytest.raises(InvalidArgument, match="0 versions"):
        take(version_calls.list_versions(MODEL, include_invisible=True, limit=0), answer)


def test_waiting_asks_again_until_the_deadline_and_then_says_for_what() -> None:
    steps = version_calls.wait_for(MODEL, 3, VersionState.READY, 0.0, None)
    first = next(steps)
    assert isinstance(first, UnaryCall)
    wanted = pb.GetVersionRequest.FromString(b"".join(first.request))
    assert (wanted.version, wanted.wait_for) == ("3", resources_pb2.VERSION_STATE_READY)
    assert isinstance(steps.throw(DeadlineExceeded("not yet")), Pause)
    with pytest.raises(DeadlineExceeded, match=f"{MODEL}@3 was not ready"):
        steps.send(None)


@pytest.mark.parametrize("name", ["", ".", "..", "../config.json", "a//b", "a/../b", "/a"])
def test_a_file_that_would_lie_elsewhere_is_refused(name: str) -> None:
    def answer(_: UnaryCall) -> bytes:
        file = resources_pb2.ModelFile(name=name, content=b"")
        return pb.GetModelFilesResponse(files=[file]).SerializeToString()

    with pytest.raises(DataLoss):
        take(model_calls.model_files(MODEL, ""), answer)


@pytest.mark.parametrize(
    "asking",
    [
        lambda client: client.delete_version(MODEL, 0),
        lambda client: client.delete_version(MODEL, 1 << 64),
        lambda client: client.delete_version(f"{MODEL}@live"),
        lambda client: client.register_files(MODEL, {"a": bytes(64 << 20)}),
    ],
)
def test_what_cannot_be_is_not_asked(asking: Callable[[TrainerClient], object]) -> None:
    with TrainerClient("127.0.0.1:1", retry_seconds=0) as client, pytest.raises(InvalidArgument):
        asking(client)


@pytest.mark.parametrize("state", [VersionState.FAILED, VersionState.RETIRED, "durable"])
def test_what_cannot_be_waited_for_is_refused_at_once(state: Any) -> None:
    with pytest.raises(InvalidArgument, match="wait for open, receiving, ready, verified, durable"):
        next(version_calls.wait_for(MODEL, 1, state, None, None))


@pytest.mark.parametrize("refs", ["abc", [(MODEL, "live", 1)], [(MODEL, 3)], [(MODEL,)]])
def test_refs_that_are_none_are_refused_before_anything_is_asked(refs: Any) -> None:
    with pytest.raises(InvalidArgument, match="is not a model with one of its refs"):
        Watch.begin(refs, 1.0)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [("x", None), (FullTensors, None), (Boxes([("w", (0.5,), (1,))]), None), (Boxes([("w", 1)]), None),
     (Boxes([("w", (1 << 70,), (1,))]), None)],
)  # fmt: skip
def test_a_pull_that_nobody_could_mean_is_refused_with_what_to_ask_for(layout: Any, dtype: Any) -> None:
    steps = pull_calls.plan_pull(KnownLayouts(), MODEL, 1, layout, dtype)
    with pytest.raises(InvalidArgument, match=r"malformed.*\n.*FullTensors, TensorParallel or Boxes"):
        next(steps).do()  # type: ignore[union-attr]


def test_a_pull_in_what_is_no_dtype_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(InvalidArgument, match=r"'16' is not a known dtype.*\n.*bf16"):
        next(pull_calls.plan_pull(KnownLayouts(), MODEL, 1, None, 16))  # type: ignore[arg-type]


@pytest.mark.parametrize("server", ["127.0.0.1:99999", "host:0", "[::1]:65536"])
def test_an_address_without_a_possible_port_is_refused(server: str) -> None:
    with pytest.raises(InvalidArgument, match="no port"):
        EngineClient(server)


@pytest.mark.parametrize("used", [False, True])
def test_a_client_that_has_been_closed_says_so(used: bool) -> None:
    client = EngineClient("127.0.0.1:9", retry_seconds=0.0)
    if used:
        with pytest.raises(Unavailable, match="cannot be reached"):
            client.models()
    client.close()
    for ask in (client.models, lambda: next(client.watch(MODEL)), lambda: client.pull(MODEL)):

        def refuse(ask: Callable[[], object] = ask) -> None:
            with pytest.raises(Unavailable, match="the client has been closed"):
                ask()

        assert processor_seconds(refuse) < 5.0


def test_a_call_whose_client_is_closed_says_that_and_not_that_it_was_cancelled() -> None:
    asked, over = threading.Event(), threading.Event()

    def wait(_request: bytes, _context: grpc.ServicerContext) -> bytes:
        asked.set()
        over.wait(60)
        return b""

    behaviours = {"GetVersion": grpc.unary_unary_rpc_method_handler(wait)}
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("weighbridge.v1.ModelService", behaviours)]
        )
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        client = EngineClient(f"127.0.0.1:{port}")
        with ThreadPoolExecutor(1) as waiting:
            found = waiting.submit(client.version, MODEL, 1)
            assert asked.wait(60)
            client.close()
            with pytest.raises(Unavailable, match="the client has been closed"):
                found.result(60)
        over.set()
        server.stop(0.0).wait()
