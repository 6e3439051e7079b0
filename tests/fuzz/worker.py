"""Worker: process that runs one target, under the coverage guidance of atheris (libFuzzer) or without.

``python -m tests.fuzz.worker TARGET --inputs N --seed S --folder DIR [--plain]`` prints lines of JSON:
``{"inputs", "seconds"}`` every few seconds, then one with the whole `Tally`. Before each input is run it stands in
``DIR/current``: what ends the process can be found there.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import mmap
import os
import random
import resource
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.fuzz.judge import Judge, Verdict
    from tests.fuzz.target import Target

PACKAGES = ("weighbridge", "weighbridge_storage", "weighbridge_service")
CURRENT = "current"
_CURRENT_BYTES = 16 << 20
_TOLD_SECONDS = 5.0
_MOST_ADDRESS_SPACE = 12 << 30
_MOST_OF_A_FAULT = 3
"""Inputs that are kept of one fault."""


@dataclasses.dataclass
class Tally:
    """Results of a run.

    Attributes:
        target: its name.
        inputs: number of inputs that were run.
        seconds: wall time of the run.
        slowest: seconds of a processor of the slowest input, and its length.
        largest: MiB by which one input has raised the peak of memory most, and its length.
        findings: files of inputs that are findings, by fault.
    """

    target: str
    inputs: int = 0
    seconds: float = 0.0
    slowest: tuple[float, int] = (0.0, 0)
    largest: tuple[float, int] = (0.0, 0)
    findings: dict[str, list[str]] = dataclasses.field(default_factory=dict)


class Run:
    """A run of one target.

    Args:
        target: the target.
        judge: runs its inputs.
        inputs: number of inputs after which it ends.
        folder: folder for findings.
        done: ends the run; does not return.
    """

    def __init__(self, target: Target, judge: Judge, inputs: int, folder: Path, done: Callable[[], None]) -> None:
        self._target = target
        self._judge = judge
        self._inputs = inputs
        self._folder = folder
        self._done = done
        self._begin = self._told = time.monotonic()
        self.tally = Tally(target.name)
        with (folder / CURRENT).open("wb+") as file:
            file.truncate(_CURRENT_BYTES)
            self._current = mmap.mmap(file.fileno(), _CURRENT_BYTES)

    def one(self, data: bytes) -> None:
        """Run one input, and end the run if it was the last one."""
        self._note(data)
        verdict = self._judge.verdict(data)
        tally = self.tally
        tally.inputs += 1
        tally.slowest = max(tally.slowest, (verdict.seconds, len(data)))
        tally.largest = max(tally.largest, (verdict.grown, len(data)))
        if verdict.problem:
            self._found(data, verdict)
        now = time.monotonic()
        tally.seconds = now - self._begin
        if tally.inputs >= self._inputs:
            self._done()
        elif now - self._told > _TOLD_SECONDS:
            self._told = now
            _tell({"inputs": tally.inputs, "seconds": tally.seconds})

    def ended_badly(self, error: Exception) -> None:
        """Record an error that the target raises at its end as a finding."""
        from tests.fuzz import findings
        from tests.fuzz.judge import Verdict

        verdict = Verdict(0.0, 0.0, "end", type(error).__name__, f"{error!r}")
        self.tally.findings["end"] = [str(findings.save(self._folder, self._target.name, verdict, b""))]

    def _found(self, data: bytes, verdict: Verdict) -> None:
        from tests.fuzz import findings

        known = self.tally.findings.setdefault(verdict.key, [])
        if len(known) >= _MOST_OF_A_FAULT:
            return
        if not known and not self._target.stateful and verdict.problem != "memory":
            key = verdict.key
            seconds = 10.0 if verdict.problem != "time" else 40.0
            data = findings.made_small(data, lambda other: self._judge.verdict(other).key == key, seconds)
        known.append(str(findings.save(self._folder, self._target.name, verdict, data)))

    def _note(self, data: bytes) -> None:
        part = data[: _CURRENT_BYTES - 8]
        self._current[:8] = len(part).to_bytes(8, "little")
        self._current[8 : 8 + len(part)] = part


def read_current(folder: Path) -> bytes:
    """The input that a worker ran last."""
    with (folder / CURRENT).open("rb") as file:
        return file.read(int.from_bytes(file.read(8), "little"))


def _tell(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Run one target."""
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("--inputs", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_ADDRESS_SPACE, resource.RLIM_INFINITY))
    stack = ExitStack()
    if not options.plain:
        import atheris

        stack.enter_context(atheris.instrument_imports(include=list(PACKAGES)))
    from tests.fuzz.findings import kept
    from tests.fuzz.judge import Judge
    from tests.fuzz.target import inputs
    from tests.fuzz.targets import find

    target = find(options.target)
    started = ExitStack()
    parse = started.enter_context(target.start())

    def done() -> None:
        try:
            started.close()
        except Exception as error:
            run.ended_badly(error)
        _tell(dataclasses.asdict(run.tally))
        os._exit(0)

    run = Run(target, Judge(target, parse), options.inputs, options.folder, done)
    samples = target.samples()
    for data in itertools.chain((path.read_bytes() for path in kept(target.name)), target.heavy()):
        run.one(data)
    if options.plain:
        for data in inputs(target, options.seed, samples):
            run.one(data)
    corpus = options.folder / f"corpus-{target.name}"
    corpus.mkdir(exist_ok=True)
    for number, data in enumerate(samples):
        (corpus / f"{number:04}").write_bytes(data[: target.longest])

    def mutate(data: bytes, longest: int, seed: int) -> bytes:
        choose = random.Random(seed)
        if choose.random() < 0.4:
            changed: bytes = atheris.Mutate(data, longest)
            return changed
        return target.mutate(choose, bytes(data))[:longest]

    arguments = [
        *(
            sys.argv[0],
            str(corpus),
            f"-seed={options.seed + 1}",
            f"-max_len={target.longest}",
            "-len_control=0",
            "-timeout=600",
        ),
        *("-rss_limit_mb=0", "-verbosity=1", f"-artifact_prefix={options.folder}/libfuzzer-"),
    ]
    atheris.Setup(arguments, run.one, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
