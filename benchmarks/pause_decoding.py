"""Rate at which the engine of `benchmarks.pause` generates while new versions are brought to it, and while none are.

The engine is stepped by hand, and taken from version to version between two steps, as an agent does it. Steps are
counted by what goes on beside them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from benchmarks.pause_models import MODEL
from weighbridge._core.resources import RECEIVING, REF_LIVE

if TYPE_CHECKING:
    from benchmarks.pause_engine import Engine

_PROMPT_TOKENS, _TOKENS = 16, 256
_LOOK_SECONDS = 0.005
"""Interval at which the engine checks whether a version is prepared."""
QUIET, STAGING, AFTER = "quiet", "staging", "after"
"""Kinds of steps: without an update; while a version is being prepared; while running requests are computed again by a
new version.
"""


@dataclass
class Steps:
    """Steps of one kind.

    Attributes:
        seconds: seconds that they took.
        tokens: tokens that they returned.
        longest: seconds of the longest one.
        count: number of steps.
        computed: seconds for which the engine's thread had a processor.
        queued: seconds for which it could have run, and had none.
    """

    seconds: float = 0.0
    tokens: int = 0
    longest: float = 0.0
    count: int = 0
    computed: float = 0.0
    queued: float = 0.0

    def add(self, seconds: float, tokens: int, computed: float, queued: float) -> None:
        """Count one."""
        self.seconds += seconds
        self.tokens += tokens
        self.longest = max(self.longest, seconds)
        self.count += 1
        self.computed += computed
        self.queued += queued


@dataclass
class Decoding:
    """One run.

    Attributes:
        steps: steps by kind.
        pauses: seconds for which the engine stood still, of each update.
        versions: versions that were applied.
        failed: errors of updates that failed.
    """

    steps: dict[str, Steps] = field(default_factory=lambda: {kind: Steps() for kind in (QUIET, STAGING, AFTER)})
    pauses: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """All of it, with tokens per second: of each kind of steps, and of all of them, which leaves the pauses out."""
        each = {
            kind: {**vars(steps), "rate": steps.tokens / steps.seconds if steps.seconds else 0.0}
            for kind, steps in self.steps.items()
        }
        seconds = sum(steps.seconds for steps in self.steps.values())
        rate = sum(steps.tokens for steps in self.steps.values()) / max(seconds, 1e-9)
        return {
            "rate": rate,
            "steps": each,
            "pauses": self.pauses,
            "versions": self.versions,
            "failed": self.failed,
        }


class Requests:
    """Requests under way: as many as there shall be, and a new one for each that ends. They end at different times.

    Args:
        llm: vLLM's.
        number: number of requests.
    """

    def __init__(self, llm: Any, number: int) -> None:
        self._engine = llm.llm_engine
        self._number = number
        self._running = 0
        self._names = count()

    def step(self) -> int:
        """Run one step of the engine; returns the number of its tokens."""
        while self._running < self._number:
            self._add()
        tokens = 0
        for output in self._engine.step():
            tokens += sum(len(each.token_ids) for each in output.outputs)
            self._running -= bool(output.finished)
        return tokens

    def end(self) -> None:
        """End all of them."""
        self._engine.abort_request([str(each) for each in range(next(self._names))])
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def _add(self) -> None:
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        name = next(self._names)
        tokens = _TOKENS if name >= self._number else _TOKENS * (name + 1) // self._number
        said = SamplingParams(
            max_tokens=tokens,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = tokens_input([5 + (name + at) % 1000 for at in range(_PROMPT_TOKENS)])
        self._engine.add_request(str(name), prompt, said)
        self._running += 1


class Updates:
    """Versions that come while the engine generates, each taken as its agent would take it.

    Args:
        engine: the engine.
        decoding: record of the updates.
    """

    def __init__(self, engine: Engine, decoding: Decoding) -> None:
        self._engine, self._decoding = engine, decoding
        self._news: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._served = _number(engine.ask("weighbridge_status")["served"])
        self._wanted = 0
        self._looked = 0.0
        self.kind = QUIET
        threading.Thread(target=self._listen, daemon=True).start()

    def between_steps(self, tokens: int, requests: int) -> float:
        """Do what is to be done now; seconds for which that was the pause of an update.

        Args:
            tokens: tokens of the previous step.
            requests: number of running requests.
        """
        if self.kind == AFTER and tokens >= requests:
            self.kind = QUIET
        while not (self._wanted or self._news.empty()):  # an agent takes one version after the other
            ref, number = self._news.get()
            if number <= self._served:
                continue
            self.kind = STAGING
            if ref == RECEIVING:
                self._ask("weighbridge_prepare_early", str(number))
            else:
                self._wanted = number
                self._ask("weighbridge_prepare", str(number))
        now = time.monotonic()
        if not self._wanted or now - self._looked < _LOOK_SECONDS:
            return 0.0
        self._looked = now
        if self._ask("weighbridge_status")["preparing"]:
            return 0.0
        applied = self._ask("weighbridge_apply", str(self._wanted))
        self._served, self._wanted, self.kind = self._wanted, 0, AFTER
        self._decoding.pauses.append(applied["took"])
        self._decoding.versions.append(self._served)
        return float(applied["took"])

    def _ask(self, method: str, *arguments: str) -> dict[str, Any]:
        found = self._engine.ask(method, *arguments)
        if found["failed"]:
            self._decoding.failed.append(found["failed"])
        return found

    def _listen(self) -> None:
        watched = [(MODEL, RECEIVING), (MODEL, REF_LIVE)]
        for ref, version in self._engine.client.watch_refs(watched):
            self._news.put((ref, version.number))


def decode(engine: Engine, seconds: float, number: int, *, follows: bool) -> dict[str, Any]:
    """Generate for some time, with so many requests at once.

    Args:
        engine: the engine.
        seconds: how long to decode.
        number: number of requests.
        follows: whether versions that come are taken.
    """
    decoding, requests = Decoding(), Requests(engine.llm, number)
    updates = Updates(engine, decoding) if follows else None
    begun = last = time.monotonic()
    with Path("/proc/thread-self/schedstat").open() as schedule:
        had = _scheduled(schedule)
        while last - begun < seconds:
            kind = QUIET if updates is None else updates.kind
            tokens = requests.step()
            has = _scheduled(schedule)
            paused = 0.0 if updates is None else updates.between_steps(tokens, number)
            now = time.monotonic()
            decoding.steps[kind].add(now - last - paused, tokens, has[0] - had[0], has[1] - had[1])
            last, had = now, _scheduled(schedule)
    requests.end()
    return decoding.figures()


def _scheduled(schedule: IO[str]) -> tuple[float, float]:
    """Seconds for which the calling thread has had a processor so far, and for which it waited for one."""
    schedule.seek(0)
    computed, queued, _ = schedule.read().split()
    return int(computed) / 1e9, int(queued) / 1e9


def _number(label: str) -> int:
    return int(label.rpartition("@")[2] or 0)


def joined(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of several runs as those of one; of a run that failed, these alone."""
    failed = next((each for each in found if each["failed"]), None)
    if failed is not None:
        return failed
    together = Decoding()
    for each in found:
        for kind, steps in together.steps.items():
            for name, value in vars(steps).items():
                join = max if name == "longest" else sum
                setattr(steps, name, join((value, each["steps"][kind][name])))
        together.pauses += each["pauses"]
        together.versions += each["versions"]
    return together.figures()


def summary(without: dict[str, Any], during: dict[str, Any]) -> dict[str, Any]:
    """Ratios of the rates with updates to those without."""
    ratios = {kind: each["rate"] / without["rate"] for kind, each in during["steps"].items() if each["seconds"]}
    kinds = Counter({kind: round(each["seconds"], 2) for kind, each in during["steps"].items()})
    return {
        "ratio": during["rate"] / without["rate"],
        "ratios": ratios,
        "seconds": dict(kinds),
        "taken": len(during["versions"]),
        "longest_step": [without["steps"][QUIET]["longest"], during["steps"][STAGING]["longest"]],
    }
