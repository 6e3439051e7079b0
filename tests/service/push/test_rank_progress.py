"""Is it told how far a push and its ranks are, when it is given up, which rank the others waited for, and what of that
is kept?
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from tests.support.raw_clients import RawClient, cut, rows_layout, stream_of, tiny_folder, whole_layout
from tests.support.services import running_service
from tests.support.waiting import eventually
from weighbridge._clients.calls.version_calls import rank_progress
from weighbridge._clients.connection import Connection
from weighbridge._core.reports.rank_progress import HeldUp, RankProgress, RankStage, held_up
from weighbridge._core.resources import Version, VersionState
from weighbridge_service.catalog.snapshots import VersionSnapshot
from weighbridge_service.plan.declarations import Home
from weighbridge_service.push.ended import EndedPush
from weighbridge_service.push.machine.state import Limits, Moment, PushState
from weighbridge_storage.documents.names import ModelName


def ranks(*times: tuple[int, int]) -> list[RankProgress]:
    """Ranks that have declared and sealed at these times."""
    return [RankProgress(rank, declared, sealed) for rank, (declared, sealed) in enumerate(times)]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([(1000, 2000), (1010, 2010), (1020, 9000)], HeldUp(2, 6990, declaring=False)),
        ([(1000, 9900), (8000, 9950), (1010, 9960)], HeldUp(1, 6990, declaring=True)),
        ([(1000, 2000), (1010, 2010), (1020, 2020)], None),
        ([(1000, 9000)], None),
        ([(1000, 0), (1010, 0), (7000, 0)], HeldUp(2, 5990, declaring=True)),
        ([(1000, 0), (1010, 0), (0, 0)], None),
        ([(1000, 60_000), (1000, 60_000), (1000, 61_000)], None),
    ],
    ids=["bytes", "declaring", "together", "alone", "not sealed yet", "not all declared", "a small part of the time"],
)  # fmt: skip
def test_the_rank_is_named_that_the_others_waited_for(times: list[tuple[int, int]], expected: HeldUp | None) -> None:
    assert held_up(ranks(*times)) == expected


def test_ranks_of_other_replicas_are_not_judged() -> None:
    known = ranks((1000, 2000), (1010, 2010))
    assert held_up([*known, RankProgress(2, elsewhere=True)]) is None


def test_a_rank_stands_where_its_times_and_bytes_say() -> None:
    told = [
        RankProgress(0),
        RankProgress(1, 5),
        RankProgress(2, 5, 0, 0, 9, copying=True),
        RankProgress(3, 5, 0, 7, 9),
        RankProgress(4, 5, 8, 9, 9),
        RankProgress(5, 5, elsewhere=True),
    ]
    assert [each.stage for each in told] == list(RankStage)


def test_a_session_tells_how_far_each_rank_is_and_its_memory_when_each_was_done(tmp_path: Path) -> None:
    source, model = tiny_folder(tmp_path / "hf"), "acme/smol"
    with running_service(tmp_path / "store", {model: source.files}, kept_images=0) as running:
        registry, name = running.service.registry, ModelName.parse(model)
        with RawClient(running.address) as raw:
            number = raw.open(model, ranks=2)
            layouts = [rows_layout(source.arrays, rank, 2) for rank in range(2)]
            (found,) = registry.of_version(name, number)
            assert [each.declared_time_ms for each in found.progress.ranks] == [0, 0]
            with ThreadPoolExecutor(2) as pool:  # each waits for the other
                declare = partial(raw.declare, model, number)
                assigned = list(pool.map(lambda rank: declare(layouts[rank], rank=rank), range(2)))
            streams = [stream_of(source.arrays, layouts[r], assigned[r]) for r in range(2)]
            raw.push(model, number, [(0, streams[0][:1000])], rank=0)
            first, second = found.progress.ranks
            assert (first.received_bytes, first.total_bytes) == (1000, len(streams[0]))
            assert (second.received_bytes, second.sealed_time_ms) == (0, 0)
            connection = Connection(running.address)
            with closing(connection):
                assert connection.run(rank_progress(model, number)) == [first, second], "clients read the same"
            assert first.declared_time_ms
            assert second.declared_time_ms
            for rank in range(2):
                raw.push(model, number, cut(streams[rank]), rank=rank)
                raw.seal(model, number, rank=rank)
            eventually(lambda: running.service.catalog.get_version(model, str(number)).state.stored)
            done = found.progress.ranks
            assert [each.received_bytes for each in done] == [len(stream) for stream in streams]
            assert all(each.declared_time_ms <= each.sealed_time_ms for each in done)
            raw.push_whole(model, source.arrays, step=2, request_id="next")
            raw.push_whole(model, source.arrays, step=3, request_id="last")
            eventually(lambda: registry.get(name, number) is None)
            (ended,) = registry.of_version(name, number)
            assert ended.progress.ranks == done


def test_a_push_that_was_given_up_keeps_how_far_it_was_and_tells_when_it_will_be(tmp_path: Path) -> None:
    source, model = tiny_folder(tmp_path / "hf"), "acme/smol"
    settings = {"kept_images": 0, "receive_timeout": 60.0}
    with running_service(tmp_path / "store", {model: source.files}, **settings) as running:
        registry, name = running.service.registry, ModelName.parse(model)
        with RawClient(running.address) as raw:
            number, layout = raw.open(model), whole_layout(source.arrays)
            (found,) = registry.of_version(name, number)
            stream = stream_of(source.arrays, layout, raw.declare(model, number, layout))
            begun = time.time() * 1000
            raw.push(model, number, [(0, stream[:1000])])
            assert found.progress.heard_ms == pytest.approx(begun, abs=2000)
            assert found.progress.given_up_ms - found.progress.heard_ms == 60_000
            running.service.intake.abort_version(model, number, "no more", 20.0)
            failed = found.progress
            assert (failed.ranks[0].received_bytes, failed.ranks[0].total_bytes) == (1000, len(stream))
            assert (failed.heard_ms, failed.given_up_ms) == (0, 0)
            assert failed.ended_ms == pytest.approx(time.time() * 1000, abs=20_000)
            raw.push_whole(model, source.arrays, step=2, request_id="next")
            eventually(lambda: registry.get(name, number) is None)
            (ended,) = registry.of_version(name, number)
            assert ended.progress == failed


def test_ranks_that_pushed_to_other_replicas_are_not_missing_when_the_push_has_ended() -> None:
    version = Version("acme/smol", 1, VersionState.OPEN, ranks=2)
    state = PushState.begin(version, Home("here", "a:1"), Limits(), None, 60.0, Moment(0.0, 0))
    shown = VersionSnapshot(version)
    ended = EndedPush(state, shown, "", "", frozenset(), 0, [5, 5], [1, 0], [2, 0], [5, 0], [5, 5], frozenset({1}))
    assert [each.stage for each in ended.progress.ranks] == [RankStage.SEALED, RankStage.ELSEWHERE]
