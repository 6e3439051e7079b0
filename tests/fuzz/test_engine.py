"""Does fuzzing find what is planted, tell faults apart, and make inputs small?"""

from __future__ import annotations

import random
import time
from itertools import islice
from pathlib import Path

import pytest

from tests.fuzz import mutators
from tests.fuzz.campaign import Campaign, shares, table
from tests.fuzz.findings import kept, made_small, save
from tests.fuzz.judge import Judge
from tests.fuzz.target import Bounds, Target, inputs, stateless
from tests.fuzz.targets import find
from tests.support.alone import alone
from weighbridge.errors import InvalidArgument, WeighbridgeError


def planted(data: bytes) -> None:
    """A parser with a fault of each kind."""
    if b"crash" in data:
        raise KeyError("x")
    if b"slow" in data:
        deadline = time.process_time() + 0.35
        while time.process_time() < deadline:
            pass
    if b"large" in data:
        bytearray(b"x" * (64 << 20))
    if b"refused" in data:
        raise InvalidArgument("no")


TARGET = Target(
    "planted",
    stateless(planted),
    lambda: [b"nothing"],
    mutators.texts("crash", "slow", "large", "refused"),
    (WeighbridgeError,),
    bounds=Bounds(seconds=0.3, mb=32.0),
)


@pytest.mark.parametrize(
    ("data", "problem"),
    [(b"x", ""), (b"refused", ""), (b"a crash", "KeyError"), (b"is slow", "time"), (b"is large", "memory")],
)
@alone
def test_a_verdict_says_what_is_wrong(data: bytes, problem: str) -> None:
    assert Judge(TARGET, planted).verdict(data).problem == problem


@alone
def test_memory_is_seen_below_what_the_process_has_had_before() -> None:
    judge = Judge(TARGET, planted)
    before = bytearray(b"x" * (300 << 20))
    judge.verdict(b"x")
    del before
    assert [judge.verdict(data).problem for data in (b"x", b"large", b"x", b"large")] == [
        "",
        "memory",
        "",
        "memory",
    ]


@alone
def test_planted_faults_are_found() -> None:
    judge = Judge(TARGET, planted)
    found = {judge.verdict(data).problem for data in islice(inputs(TARGET, seed=3), 40)}
    assert found == {"", "KeyError", "time", "memory"}


def test_the_same_seed_gives_the_same_inputs() -> None:
    target = find("manifests")
    assert list(islice(inputs(target, 5), 50)) == list(islice(inputs(target, 5), 50))
    assert list(islice(inputs(target, 5), 50)) != list(islice(inputs(target, 6), 50))


@alone
def test_an_input_is_made_small_without_losing_its_fault() -> None:
    judge = Judge(TARGET, planted)
    data = bytes(random.Random(0).choices(b"xyz", k=3000)) + b"a crash" + b"z" * 2000
    key = judge.verdict(data).key
    assert made_small(data, lambda other: judge.verdict(other).key == key) == b"crash"


def test_a_finding_is_kept_with_what_was_said(tmp_path: Path) -> None:
    verdict = Judge(TARGET, planted).verdict(b"crash")
    path = save(tmp_path, "planted", verdict, b"crash")
    assert kept("planted", tmp_path) == [path]
    assert path.read_bytes() == b"crash"
    assert "KeyError" in (tmp_path / f"planted-{path.name}.txt").read_text()


def test_inputs_are_shared_out_by_weight() -> None:
    found = shares({"a": 2.0, "b": 1.0, "c": 0.001}, 1000)
    assert sum(found.values()) >= 1000
    assert found["c"] == 1
    assert found["a"] == pytest.approx(2 * found["b"], abs=2)


@pytest.mark.process
def test_a_campaign_runs_its_targets_in_processes_and_tells_what_came_of_it(tmp_path: Path) -> None:
    said: list[str] = []
    campaign = Campaign(tmp_path, seed=1, plain=True, say=said.append)
    result = campaign.run("references", 400)
    assert result.tally.inputs == 400
    assert not result.findings
    assert "references" in table([result])
    assert "400" in table([result])


@pytest.mark.process
def test_an_input_that_ends_its_process_is_a_finding(tmp_path: Path) -> None:
    """As one of a target that there is not, which a worker cannot even begin with."""
    result = Campaign(tmp_path, seed=1, plain=True, say=lambda text: None).run("no such target", 3)
    assert result.lost
    assert "KeyError" in Path(result.lost[0]).with_suffix(".txt").read_text()
