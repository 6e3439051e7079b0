"""Campaign: a run over many targets, which shares inputs out, starts a worker for each target, and reports the
results.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tests.fuzz.worker import CURRENT, Tally, read_current

ROOT = Path(__file__).parents[2]
SILENT_SECONDS, STUCK_SECONDS = 200.0, 1800.0
"""Longest silence of a worker, in seconds of processor time and of wall time: it runs one input, or its target begins
or ends. Wall time alone would depend on the load of the machine."""
_MOST_ENDS = 5
"""Workers of one target that may end without a result."""
_COVERAGE = re.compile(r"#\d+\s+(INITED|NEW|REDUCE|pulse|RELOAD|DONE)\s+cov: (\d+) ft: (\d+)")
_KEPT_LINES = 40


@dataclass
class Result:
    """Result of one target.

    Attributes:
        tally: tally of all its workers together.
        coverage: edges that were reached by the samples, and in the end; 0 without coverage guidance.
        lost: inputs that ended their worker, as files.
    """

    tally: Tally
    coverage: tuple[int, int] = (0, 0)
    lost: list[str] = field(default_factory=list)

    @property
    def findings(self) -> int:
        """Number of faults that were found."""
        return len(self.tally.findings) + len(self.lost)

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {**dataclasses.asdict(self.tally), "coverage": self.coverage, "lost": self.lost}


def shares(weights: Mapping[str, float], inputs: int) -> dict[str, int]:
    """Number of inputs of each target, by its weight: at least one, and in total no fewer than requested."""
    total = sum(weights.values())
    return {name: max(-int(-inputs * weight // total), 1) for name, weight in weights.items()}


class Campaign:
    """A run over targets.

    Args:
        folder: folder for findings and for files of workers.
        seed: chooses other inputs.
        plain: without coverage guidance.
        say: called with each line of progress.
    """

    def __init__(self, folder: Path, seed: int, *, plain: bool, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._seed = seed
        self._plain = plain
        self._say = say

    def run(self, target: str, inputs: int) -> Result:
        """Run so many inputs of a target.

        After an input that ends its worker, another worker goes on with other inputs.
        """
        result = Result(Tally(target))
        ends = 0
        while result.tally.inputs < inputs and ends < _MOST_ENDS:
            left = inputs - result.tally.inputs
            before = result.tally.inputs
            if not self._worked(target, left, self._seed + ends, result):
                ends += 1
                result.tally.inputs = max(result.tally.inputs, before + 1)
        return result

    def _worked(self, target: str, inputs: int, seed: int, result: Result) -> bool:
        """Run a worker; returns whether it completed its inputs."""
        folder = self._folder / f"worker-{target}-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        line = [
            *(
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "tests.fuzz.worker",
                target,
                "--inputs",
                str(inputs),
                "--seed",
                str(seed),
            ),
            *("--folder", str(folder)),
            *(["--plain"] if self._plain else []),
        ]
        before = result.tally
        process = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stderr is not None
        spoke = time.monotonic(), 0.0
        last: list[str] = []
        coverage = threading.Thread(target=_follow, args=(process.stderr, result, last), daemon=True)
        coverage.start()
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(5.0):
                since, worked = spoke
                silent = _worked_seconds(process.pid) - worked
                if silent > SILENT_SECONDS or time.monotonic() - since > STUCK_SECONDS:
                    process.kill()

        watching = threading.Thread(target=watch, daemon=True)
        watching.start()
        done = False
        for text in process.stdout:
            spoke = time.monotonic(), _worked_seconds(process.pid)
            try:
                said = json.loads(text)
            except ValueError:
                continue
            if "target" in said:
                result.tally = _sum(before, Tally(**said))
                done = True
            else:
                done_so_far = before.inputs + said["inputs"]
                result.tally = dataclasses.replace(before, inputs=done_so_far, seconds=before.seconds + said["seconds"])
                self._say(f"{target}: {done_so_far:,} inputs, {said['inputs'] / max(said['seconds'], 0.01):,.0f}/s")
        process.stdout.close()
        code = process.wait()
        ended.set()
        watching.join()
        coverage.join()
        process.stderr.close()
        if not done:
            lost = self._folder / f"lost-{target}-{seed}"
            lost.write_bytes(read_current(folder) if (folder / CURRENT).exists() else b"")
            lost.with_suffix(".txt").write_text(f"exit code {code}\n" + "".join(last[-_KEPT_LINES:]), "utf-8")
            result.lost.append(str(lost))
        return done


def _worked_seconds(pid: int) -> float:
    """Seconds of a processor that a process has taken; 0 if it has ended.

    Source: proc(5), the fields utime and stime of stat.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _sum(one: Tally, other: Tally) -> Tally:
    return Tally(
        one.target,
        one.inputs + other.inputs,
        one.seconds + other.seconds,
        max(one.slowest, tuple(other.slowest)),
        max(one.largest, tuple(other.largest)),
        {**one.findings, **other.findings},
    )


def _follow(lines: IO[str], result: Result, last: list[str]) -> None:
    """Read what libFuzzer says of coverage."""
    for line in lines:
        last.append(line)
        del last[: -2 * _KEPT_LINES]
        found = _COVERAGE.search(line)
        if found is not None:
            reached = int(found[2])
            first = reached if found[1] == "INITED" or not result.coverage[0] else result.coverage[0]
            result.coverage = (first, max(reached, result.coverage[1]))


def table(results: Sequence[Result]) -> str:
    """Results as text, one line for each target and one for all."""
    head = (
        "target",
        "inputs",
        "inputs/s",
        "edges: samples",
        "and found",
        "slowest, s",
        "largest, MiB",
        "findings",
    )
    rows = [head]
    for each in results:
        tally = each.tally
        rows.append(
            (
                tally.target, f"{tally.inputs:,}", f"{tally.inputs / max(tally.seconds, 0.001):,.0f}", f"{each.coverage[0]:,}",
                f"{each.coverage[1] - each.coverage[0]:,}", f"{tally.slowest[0]:.2f} ({_size(tally.slowest[1])})",
                f"{tally.largest[0]:.0f} ({_size(tally.largest[1])})", str(each.findings),
            )
        )  # fmt: skip
    inputs, seconds = sum(each.tally.inputs for each in results), sum(each.tally.seconds for each in results)
    rows.append(
        (
            "all",
            f"{inputs:,}",
            f"{inputs / max(seconds, 0.001):,.0f}",
            "",
            "",
            "",
            "",
            str(sum(each.findings for each in results)),
        )
    )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if not column else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def _size(length: int) -> str:
    return f"{length / 1e6:.1f} MB" if length >= 1e6 else f"{length / 1e3:.1f} kB"
