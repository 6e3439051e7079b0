"""Do the cases of the benchmark of pauses count tokens where they belong, take versions between steps, and compare what
engines have?
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import pause, pause_decoding
from benchmarks.pause_decoding import AFTER, QUIET, STAGING, Decoding, Updates, decode, summary
from weighbridge._core.resources import RECEIVING


class FakeRequests:
    """Gives a token for each request in each step, and fewer in the step after an update."""

    def __init__(self, llm: Any, number: int) -> None:
        self._llm, self._number = llm, number

    def step(self) -> int:
        self._llm.steps += 1
        return self._number - self._llm.behind.pop(0) if self._llm.behind else self._number

    def end(self) -> None:
        self._llm.ended = True


class FakeEngine:
    """An engine that has a version prepared when it is asked for the second time, and hears of what it is given."""

    def __init__(self, news: Sequence[tuple[str, int]] = ()) -> None:
        self.llm = SimpleNamespace(steps=0, behind=[], ended=False)
        self.asked: list[str] = []
        self._looks = itertools.cycle(("on its way", ""))
        self.client = SimpleNamespace(
            watch_refs=lambda _refs: ((ref, SimpleNamespace(number=number)) for ref, number in news)
        )

    def ask(self, method: str, *arguments: str) -> dict[str, Any]:
        what = method.removeprefix("weighbridge_")
        self.asked.append(" ".join([what, *arguments]))
        preparing = ""
        if what == "status" and len(self.asked) > 1:
            preparing = next(self._looks)
        if what == "apply":
            self.llm.behind = [2]
        return {"failed": "", "served": "bench/pause@1", "preparing": preparing, "took": 0.25}


def test_versions_are_staged_and_applied_between_steps_and_pauses_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pause_decoding, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(pause_decoding.threading, "Thread", Inline)
    engine: Any = FakeEngine([("live", 1), (RECEIVING, 2), ("live", 2)])
    updates = Updates(engine, decoding := Decoding())
    kinds, paused = [], []
    for tokens in (4, 4, 2, 4, 4):
        kinds.append(updates.kind)
        paused.append(updates.between_steps(tokens, 4))
    assert kinds == [QUIET, STAGING, AFTER, AFTER, QUIET]
    assert paused == [0.0, 0.25, 0.0, 0.0, 0.0]
    assert engine.asked == ["status", "prepare_early 2", "prepare 2", "status", "status", "apply 2"]
    assert (decoding.versions, decoding.pauses, decoding.failed) == ([2], [0.25], [])


class Inline:
    """A thread that has ended when it has been started."""

    def __init__(self, target: Any, daemon: bool) -> None:
        self.start = target


def test_rates_are_of_steps_alone_and_compared_by_what_went_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pause_decoding, "Requests", FakeRequests)
    clock = itertools.count()
    monkeypatch.setattr(pause_decoding.time, "monotonic", lambda: float(next(clock)))
    engine: Any = FakeEngine()
    found = decode(engine, 5.0, 4, follows=False)
    assert engine.llm.ended
    assert engine.llm.steps == 5
    assert (found["rate"], found["steps"][QUIET]["tokens"]) == (4.0, 20)
    during = Decoding(pauses=[9.0], versions=[7])
    during.steps[QUIET].add(2.0, 8, computed=1.5, queued=0.25)
    during.steps[STAGING].add(2.0, 6, computed=1.0, queued=0.5)
    ratios = summary(found, during.figures())
    assert ratios["ratio"] == pytest.approx(3.5 / 4)
    assert ratios["ratios"] == {QUIET: 1.0, STAGING: 0.75}
    twice = pause_decoding.joined([during.figures()] * 2)
    assert (twice["rate"], twice["pauses"], twice["versions"]) == (3.5, [9.0] * 2, [7] * 2)
    assert twice["steps"][STAGING]["queued"] == 1.0
    assert twice["steps"][QUIET]["longest"] == 2.0
    failed = {**during.figures(), "failed": ["no memory"]}
    assert pause_decoding.joined([during.figures(), failed]) is failed
    line, other = pause.summary(
        {"copy": 0.5, "decode": {"without": found, "during": {}, **ratios}, "ipc": {"updates": [UPDATE]}},
        ["decode", "ipc", "reload"],
    )
    assert line.startswith('decode: {"ratio": 0.875')
    assert other.startswith("ipc: apply 0.250 s (0.50 copies)")
    assert other.endswith("WRONG ['norm']")


class FakePeer:
    """A trainer and an engine in one, of which vLLM alone takes the weights of every other step rightly."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def ask(self, line: str) -> Any:
        what, *given = json.loads(line) if line.startswith("[") else line.split()
        self.asked.append(what)
        if what == "ipc" and given == ["3"]:
            return {"failed": "no card"}
        sent = {
            "ipc": {"begun": 1.0, "held": 0.5, "update": {"names": []}},
            "folder": {"begun": 1.0, "held": 0.5},
        }
        done = {"failed": "", "took": 0.25, "ended": 4.0}
        sums = {"norm": len(self.asked) % 3}
        return {**sent, "receive": done, "reload": done, "checksums": sums}[what]


def test_vllms_own_ways_are_measured_from_the_trainers_first_step_and_compared(tmp_path: Path) -> None:
    both: Any = FakePeer()
    first, second = pause.own_updates(both, both, range(2, 4), "ipc", tmp_path)
    assert both.asked == ["ipc", "receive", "checksums", "checksums", "ipc"]
    assert (first["held"], first["apply"], first["to_engine"], first["wrong"]) == (0.5, 0.25, 3.0, ["norm"])
    assert (second["failed"], second["wrong"]) == ("no card", [])
    (reloaded,) = pause.own_updates(both, both, range(4, 5), "reload", tmp_path)
    assert both.asked[-4:] == ["folder", "reload", "checksums", "checksums"]
    assert reloaded["step"] == 4


def test_a_fresh_load_is_compared_in_parameters_and_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answers = {"start": {"start": 1.0}, "checksums": {"a": 1, "b": 2}, "generate": [4, 5]}
    fresh: Any = SimpleNamespace(ask=lambda line: answers[json.loads(line)[0]])
    monkeypatch.setattr(pause, "peer", lambda *_: contextlib.nullcontext(fresh))
    trainer: Any = SimpleNamespace(ask=lambda _: {})
    arguments = argparse.Namespace(python="python", logs=None)
    same = pause.loaded_anew(arguments, trainer, tmp_path, ("address", {}, {}), ({"a": 1, "b": 2}, [4, 5]))
    assert same == {"compared": 2, "wrong": [], "says": [[4, 5], [4, 5]]}
    other = pause.loaded_anew(arguments, trainer, tmp_path, ("address", {}, {}), ({"a": 1, "c": 2}, [4, 6]))
    assert other["wrong"] == ["b", "c"]


UPDATE = {
    "apply": 0.25, "prepare": 0.0, "held": 0.1, "ready": 0.1, "to_engine": 0.4, "failed": "", "wrong": ["norm"],
}  # fmt: skip
