"""Sessions of pushes in any order, right and wrong: does a version become visible when all of it has come, and never
otherwise?
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.support.raw_clients import (
    RawClient,
    TinyModel,
    assert_equal,
    cut,
    rows_layout,
    stream_of,
    tiny_folder,
)
from tests.support.services import RunningService, running_service
from weighbridge import EngineClient
from weighbridge._core.resources import VersionState
from weighbridge.errors import WeighbridgeError
from weighbridge.v1 import checkpoint_service_pb2 as pb

MODEL = "acme/sessions"
RANKS = 2
PIECE = 40_000


def refused(action: Callable[[], object]) -> WeighbridgeError | None:
    """Error that refuses an action, which is never a failure of the service; None if the action is carried out."""
    try:
        action()
    except WeighbridgeError as error:
        if error.reason == WeighbridgeError.reason:
            raise
        return error
    return None


class Push:
    """State of one push, as its trainer knows it.

    Args:
        number: number of its version.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.assigned: dict[int, list[int]] = {}
        self.pieces: dict[int, list[tuple[int, bytes]]] = {}
        self.left: dict[int, set[int]] = {}
        self.sealed: set[int] = set()
        self.ended = False

    @property
    def complete(self) -> bool:
        """Whether all its ranks are sealed, so that the service has received everything that they hold."""
        return len(self.sealed) == RANKS


class Sessions(RuleBasedStateMachine):
    """Trainers that push, over gRPC, as a model of what a service must make of it.

    `service` and `source` are set by the test.
    """

    service: RunningService
    source: TinyModel
    completed: ClassVar[set[int]] = set()
    pushes = Bundle("pushes")

    @initialize()
    def connect(self) -> None:
        self.client = RawClient(self.service.address)
        self.opened: list[Push] = []
        self.layouts = [rows_layout(self.source.arrays, rank, RANKS) for rank in range(RANKS)]

    def teardown(self) -> None:
        if hasattr(self, "client"):
            for push in self.opened:
                self.abort(push)  # or the next examples find no room for theirs
            self.client.__exit__(None, None, None)

    @rule(target=pushes)
    def open(self) -> Push:
        push = Push(self.client.open(MODEL, ranks=RANKS))
        self.opened.append(push)
        return push

    @rule(push=pushes)
    def declare(self, push: Push) -> None:
        """All ranks do: one alone would wait for the others."""
        if push.ended or push.assigned:
            return
        for rank in range(RANKS):
            request = pb.DeclareLayoutRequest(
                model=MODEL, number=push.number, rank=rank, client_id=self.client.client_id, digest="0" * 64
            )
            self.client.call(self.client.checkpoints.DeclareLayout, request)  # not known: it is asked for

        found: dict[int, list[int]] = {}

        def declare(rank: int) -> None:
            found[rank] = self.client.declare(MODEL, push.number, self.layouts[rank], rank=rank)

        threads = [threading.Thread(target=declare, args=(rank,)) for rank in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        push.assigned = found
        for rank, assigned in found.items():
            push.pieces[rank] = cut(stream_of(self.source.arrays, self.layouts[rank], assigned), PIECE)
            push.left[rank] = set(range(len(push.pieces[rank])))

    @rule(push=pushes, rank=st.integers(0, RANKS - 1), which=st.integers(0, 3), damage=st.booleans())
    def push_piece(self, push: Push, rank: int, which: int, damage: bool) -> None:
        pieces = push.pieces.get(rank) or [(0, b"x" * 100)]
        index = which % len(pieces)
        error = refused(lambda: self.client.push(MODEL, push.number, [pieces[index]], rank=rank, damage=damage))
        if error is not None:
            assert damage or push.ended or not push.assigned or rank in push.sealed, error
        elif not damage and push.assigned:
            push.left[rank].discard(index)

    @rule(push=pushes, rank=st.integers(0, RANKS - 1))
    def push_rest(self, push: Push, rank: int) -> None:
        for index in sorted(push.left.get(rank, ())):
            self.push_piece(push, rank, index, damage=False)

    @rule(push=pushes, rank=st.integers(0, RANKS))
    def seal(self, push: Push, rank: int) -> None:
        request = pb.SealRankRequest(model=MODEL, number=push.number, rank=rank, client_id=self.client.client_id)
        error = refused(lambda: self.client.call(self.client.checkpoints.SealRank, request, seconds=10.0))
        if error is not None:
            assert push.ended or push.left.get(rank) != set(), error
            return
        assert push.left[rank] == set(), "a rank was sealed of which bytes are missing"
        push.sealed.add(rank)

    @rule(push=pushes)
    def abort(self, push: Push) -> None:
        request = pb.AbortVersionRequest(model=MODEL, number=push.number, reason="tried")
        error = refused(lambda: self.client.call(self.client.checkpoints.AbortVersion, request))
        push.ended = push.ended or (error is None and not push.complete)

    @rule(push=pushes)
    def finish(self, push: Push) -> None:
        """All that is left to do."""
        self.declare(push)
        for rank in range(RANKS if push.assigned else 0):
            self.push_rest(push, rank)
            self.seal(push, rank)
        self.look(push)

    @rule(push=pushes)
    def look(self, push: Push) -> None:
        """A complete version can be pulled, whole, and no other one can."""
        with EngineClient(self.service.address, lane="grpc") as engine:
            if push.complete and not push.ended:
                self.completed.add(push.number)
                assert_equal(engine, MODEL, str(push.number), self.source.arrays)
                return
            state = engine.version(MODEL, push.number).state
            assert not state.visible
            assert (state in (VersionState.ABORTED, VersionState.FAILED)) == push.ended
            with pytest.raises(WeighbridgeError) as caught:
                engine.pull(MODEL, push.number)
            assert caught.value.reason in ("NOT_FOUND", "FAILED_PRECONDITION", "VERSION_FAILED")


@pytest.mark.timeout(600)
def test_a_version_is_visible_when_all_of_it_has_come_and_never_otherwise() -> None:
    with tempfile.TemporaryDirectory() as place:
        source = tiny_folder(Path(place) / "hf")
        with running_service(Path(place) / "store", {MODEL: source.files}, drain_seconds=0.1) as running:
            Sessions.service, Sessions.source = running, source
            run_state_machine_as_test(
                Sessions,
                settings=settings(
                    max_examples=12,
                    stateful_step_count=16,
                    deadline=None,
                    derandomize=True,
                    suppress_health_check=list(HealthCheck),
                ),
            )
    assert len(Sessions.completed) > 3, "hardly any push has come to its end"
