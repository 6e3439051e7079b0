"""Does a live vLLM server answer with the weights that a trainer's ranks send through vLLM's own factory, and keep its
old weights when that fails?

One server, and two ranks with FSDP2 in vLLM's environment; a service that can be killed, which vLLM reaches through a
gate.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.support import jobs
from tests.support.jobs import Job, JobFailed
from tests.support.sending_places import SendingPlace, sending_place
from tests.support.vllm_environment import PYTHON, needs_vllm
from tests.support.waiting import eventually
from weighbridge import TrainerClient, VersionFailed, VersionState
from weighbridge_demo.vllm_server import Answer

pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.timeout(900)]

MODEL = "tests/sent"
RANKS = 2
JOB = Path(__file__).parents[1] / "support" / "vllm_trainer_job.py"


@dataclass
class Place:
    """A place to send weights at, and the ranks of a trainer."""

    at: SendingPlace
    ranks: list[Job]

    def connect(self, *, stages: bool = False, pushing: Sequence[int] | None = None, **said: Any) -> None:
        """Have all ranks make their engines with vLLM's factory, after a group of the pushing ranks if these are
        given.
        """
        told = {**self.at.told, **said}
        self.ask("connect", url=self.at.server.url, said=told, stages=stages, pushing=pushing)

    def ask(self, name: str, /, **arguments: Any) -> list[Any]:
        """The answers of all ranks to a call; raises if a rank has failed."""
        for rank in self.ranks:
            rank.begin(name, **arguments)
        return self.answers()

    def answers(self) -> list[Any]:
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            return list(pool.map(Job.answer, self.ranks))

    def failures(self) -> list[str]:
        """The error of each rank; empty where there is none."""

        def failure(rank: Job) -> str:
            try:
                rank.answer()
            except JobFailed as error:
                return str(error)
            return ""

        with ThreadPoolExecutor(len(self.ranks)) as pool:
            return list(pool.map(failure, self.ranks))

    def new_weights(self) -> Answer:
        """Give the ranks other weights; the text that transformers generates with them."""
        folder, found = self.at.other_weights()
        self.ask("load", folder=str(folder))
        return found

    def send(self) -> list[int | None]:
        """Send new weights; the number of bytes that each rank pushed."""
        expected = self.new_weights()
        pushed = self.ask("send")
        self.at.expected = expected
        return pushed


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with (
        sending_place(tmp_path_factory.mktemp("sent"), PYTHON, MODEL, "llama") as at,
        trainer(RANKS, at, at.logs) as ranks,
    ):
        at.server.wait_ready()
        yield Place(at, ranks)


@contextlib.contextmanager
def trainer(size: int, at: SendingPlace, logs: Path) -> Iterator[list[Job]]:
    """So many ranks with the model that the server started from."""
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(jobs.running([PYTHON, JOB], logs / f"rank-{rank}.log", at.variables))
            for rank in range(size)
        ]
        for rank, job in enumerate(ranks):
            job.begin("start", rank=rank, ranks=size, meeting=str(logs / "meeting"), folder=str(at.first))
        for job in ranks:
            job.answer()
        yield ranks


@pytest.fixture(autouse=True)
def in_order(place: Place) -> Iterator[None]:
    yield
    place.at.check()


def nbytes(place: Place) -> int:
    return sum(file.stat().st_size for file in place.at.first.glob("*.safetensors"))


def opened(place: Place) -> set[int]:
    """Versions that are being pushed."""
    found = place.at.versions(include_invisible=True)
    return {each.number for each in found if each.state in (VersionState.OPEN, VersionState.RECEIVING)}


def versions(place: Place) -> list[int]:
    return [version.number for version in place.at.versions()]


@pytest.mark.parametrize(
    ("how", "shares"),
    [
        pytest.param({}, [1.0, None], id="rank 0 alone"),
        pytest.param({"ranks": RANKS}, [0.5, 0.5], id="shares"),
        pytest.param({"ranks": RANKS, "stages": True}, None, id="held names"),
    ],
)
def test_a_live_server_answers_as_transformers_does_by_the_weights_that_were_sent(
    place: Place, how: dict[str, Any], shares: list[float | None] | None
) -> None:
    place.connect(**how)
    whole = nbytes(place)
    for _ in range(2):
        pushed = place.send()
        place.at.check()
        assert place.at.server.weight_version() == f"{MODEL}@{versions(place)[0]}"
        # headers of files are not pushed
        assert sum(each or 0 for each in pushed) == pytest.approx(whole, rel=0.02)
        if shares is not None:
            assert pushed == [each and pytest.approx(each * whole, rel=0.1) for each in shares]
        else:
            assert min(each or 0 for each in pushed) > 0.1 * whole
    place.ask("end")


def test_weights_that_are_not_the_models_are_refused_by_name_and_touch_no_engine(place: Place) -> None:
    place.connect(ranks=RANKS)
    had = versions(place)
    place.ask("misname", name="model.norm.weight")
    for rank in place.ranks:
        rank.begin("send")
    said = place.failures()
    assert all(said)
    assert any("model.norm.weights: the model has no such tensor" in each for each in said), said
    assert versions(place) == had
    place.at.check()
    place.ask("misname", name="")
    place.send()


def test_a_service_that_is_killed_in_the_middle_is_said_on_all_ranks_and_the_next_send_works(
    place: Place, tmp_path: Path
) -> None:
    place.connect(ranks=RANKS)
    gate = tmp_path / "go on"
    place.ask("hold", until=str(gate))
    for rank in place.ranks:
        rank.begin("send")

    eventually(lambda: opened(place))
    place.at.service.kill()
    gate.touch()
    said = place.failures()
    assert all(place.at.service.address in each for each in said), said
    place.at.check()
    place.at.service.start()
    place.ask("hold", until="")
    place.send()


def test_a_rank_that_does_not_know_what_it_holds_is_named_on_all_and_the_next_send_works(
    place: Place,
) -> None:
    place.connect(ranks=RANKS, stages=True)
    had = versions(place)
    place.ask("forget", rank=1)
    for rank in place.ranks:
        rank.begin("send")
    first, second = place.failures()
    assert "rank 1: RuntimeError: what this rank holds is not known" in first
    assert "what this rank holds is not known" in second
    assert versions(place) == had
    place.ask("forget", rank=None)
    place.send()


def test_fewer_ranks_than_the_trainer_has_push_and_agree_on_failures_in_a_group_of_theirs(
    place: Place, tmp_path: Path
) -> None:
    with trainer(RANKS + 1, place.at, tmp_path) as ranks:
        three = replace(place, ranks=ranks)
        three.connect(ranks=RANKS, pushing=range(RANKS))
        three.ask("forget", rank=1)
        for rank in ranks:
            rank.begin("send")
        first, second, third = three.failures()
        assert "rank 1: RuntimeError: what this rank holds is not known" in first
        assert "what this rank holds is not known" in second
        assert third == ""
        three.ask("forget", rank=None)
        pushed = three.send()
        assert [each is not None for each in pushed] == [True, True, False]

        for rank in ranks:
            rank.begin(
                "connect",
                url=place.at.server.url,
                said={"model": MODEL, "ranks": RANKS},
                stages=False,
                pushing=[0, 1, 2],
            )
        refused = three.failures()
        assert ["the group has 3 ranks, and 2 push" in each for each in refused] == [True, True, False]


def test_a_version_that_a_killed_trainer_has_left_open_is_in_nobody_s_way(place: Place) -> None:
    place.connect(ranks=RANKS)
    tensor = next(iter(load_file(place.at.first / "model.safetensors").items()))
    before = opened(place)
    with TrainerClient(place.at.service.address) as killed, ThreadPoolExecutor(1) as pool:
        push = pool.submit(killed.push_gathered, MODEL, [tensor], step=1, rank=0, world_size=RANKS, held=[tensor[0]])
        eventually(lambda: opened(place) - before)  # an older push may end in the meantime
        [left] = opened(place) - before
        try:
            place.send()
            assert left in opened(place)
        finally:
            killed.abort(MODEL, left)
        with pytest.raises(VersionFailed):
            push.result().report()
    place.at.check()


def test_an_update_whose_start_was_not_answered_is_ended_and_the_next_send_works(place: Place) -> None:
    place.connect()
    expected = place.new_weights()
    place.ask("lose", on=True)
    for rank in place.ranks:
        rank.begin("send")
    sender, _ = place.failures()
    assert "did not answer start_weight_update: the answer is lost" in sender
    place.at.check()
    place.ask("lose", on=False)
    place.ask("send")
    place.at.expected = expected


@pytest.mark.parametrize("ranks", [1, RANKS])
def test_an_engine_that_cannot_fetch_says_so_in_its_own_words_and_the_next_send_works(place: Place, ranks: int) -> None:
    place.connect(ranks=ranks)
    expected = place.new_weights()
    place.at.gate.cut_after(100_000)
    for rank in place.ranks:
        rank.begin("send")
    sender, other = place.failures()
    assert "the engine refused /update_weights" in sender
    assert place.at.gate.address in sender
    if ranks == RANKS:
        assert "rank 0: the engine refused /update_weights" in other
        assert place.at.gate.address in other
    else:
        assert other == ""
    place.at.check()
    place.at.gate.open()
    place.ask("send")
    place.at.expected = expected


def test_engines_that_do_not_answer_are_named(place: Place) -> None:
    told = {"model": MODEL, "server": place.at.service.address, "ranks": RANKS}
    for rank in place.ranks:
        rank.begin("connect", url="http://127.0.0.1:9", said=told, stages=False)
    for said in place.failures():
        assert re.search(r"did not answer init_weight_transfer_engine: .*127\.0\.0\.1", said)
