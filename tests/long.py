"""Command line of ``make test-long``: the whole suite, and every test that draws at random at its long count, part by
part.

``python -m tests.long [PART ...] [--list] [--again] [--seed S]``. What has passed is kept in ``build/test-long.json``
for the state of the checkout: a run that was interrupted goes on with the part that it was at. The exit code is 1 if a
part has failed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.support.rounds import ROUNDS

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Part:
    """A part of the run: one command, which passes if it exits with 0.

    Attributes:
        name: its name on the command line.
        command: the command.
        environment: variables that it has besides those of this process.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """End of a part: its exit code, its wall time, and its seed."""

    code: int
    seconds: float
    seed: int


def parts(python: str) -> list[Part]:
    """All parts, in the order in which they are run."""
    fuzz = Part("fuzz", (python, "-m", "tests.fuzz"))
    chance = [
        Part(
            each.variable.lower().replace("_", "-"),
            (python, "-m", "pytest", "-q", *each.tests.split()),
            {f"WEIGHBRIDGE_{each.variable}": str(each.long)},
        )
        for each in ROUNDS
    ]
    rolling = Part("rolling", ("make", "--no-print-directory", "test-rolling", f"RELEASE={_last_release()}"))
    return [Part("all", ("make", "--no-print-directory", "test")), *chance, fuzz, rolling]


def _last_release() -> str:
    """The last tag of a release; before the first one, what is committed."""
    command = ["git", "describe", "--tags", "--match", "v*", "--abbrev=0"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip() or "HEAD"


def summary(chosen: Sequence[Part], results: Mapping[str, Result]) -> str:
    """A line for each part, and one for all."""
    lines = []
    for part in chosen:
        result = results.get(part.name)
        if result is None:
            lines.append(f"not run  {part.name}")
        else:
            word = "FAILED " if result.code else "passed "
            lines.append(f"{word}  {part.name:20} {result.seconds:7.0f} s  seed {result.seed}")
    failed = sum(result.code != 0 for result in results.values())
    left = sum(part.name not in results for part in chosen)
    return "\n".join([*lines, f"{len(chosen)} parts: {failed} failed, {left} not run"])


def state(root: Path) -> str:
    """A digest of what git sees of the checkout: its commit, and what differs from it."""
    digest = hashlib.sha256()
    for arguments in (("rev-parse", "HEAD"), ("diff", "HEAD"), ("status", "--porcelain")):
        digest.update(subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=True).stdout)
    return digest.hexdigest()


def main() -> int:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(prog="make test-long")
    parser.add_argument("parts", nargs="*", metavar="PART", help="by default all; --list names them")
    parser.add_argument("--list", action="store_true", help="name the parts")
    parser.add_argument("--again", action="store_true", help="run parts again that have passed")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    options = parser.parse_args()
    all_parts = parts(sys.executable)
    if unknown := set(options.parts) - {part.name for part in all_parts}:
        parser.error(f"there is no part {min(unknown)!r}; --list names them")
    if options.list:
        print("\n".join(part.name for part in all_parts))
        return 0
    chosen = [part for part in all_parts if not options.parts or part.name in options.parts]
    return run(chosen, ROOT, state(ROOT), options.seed, again=options.again)


def run(chosen: Sequence[Part], root: Path, now: str, seed: int, *, again: bool = False) -> int:
    """Run parts in the folder of a checkout, but for those that have passed in its present state.

    Args:
        chosen: the parts, in their order.
        root: the folder.
        now: the state of the checkout.
        seed: of random numbers.
        again: whether parts that have passed are run, too.

    Returns:
        the exit code: 1 if a part has failed.
    """
    file = root / "build" / "test-long.json"
    logs = root / "build" / "test-long"
    logs.mkdir(parents=True, exist_ok=True)
    kept = {} if again else _kept(file, now)
    results = {name: result for name, result in kept.items() if result.code == 0}
    for part in chosen:
        if part.name in results:
            print(f"{part.name}: passed already")
            continue
        print(f"{part.name}: {' '.join(part.command)} (seed {seed})", flush=True)
        results[part.name] = _run(part, root, logs / f"{part.name}.log", seed)
        file.write_text(json.dumps({"state": now, "results": {n: asdict(r) for n, r in results.items()}}))
    print(summary(chosen, results))
    return int(any(results[part.name].code for part in chosen))


def _run(part: Part, root: Path, log: Path, seed: int) -> Result:
    begun = time.monotonic()
    environment = {**os.environ, "WEIGHBRIDGE_SEED": str(seed), **part.environment}
    with log.open("w") as output:
        code = subprocess.run(
            part.command, cwd=root, env=environment, stdout=output, stderr=subprocess.STDOUT
        ).returncode
    result = Result(code, round(time.monotonic() - begun, 1), seed)
    print(f"{part.name}: {f'FAILED, see {log}' if code else 'passed'} after {result.seconds:.0f} s", flush=True)
    return result


def _kept(file: Path, now: str) -> dict[str, Result]:
    try:
        kept = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    return {name: Result(**each) for name, each in kept["results"].items()} if kept["state"] == now else {}


if __name__ == "__main__":
    sys.exit(main())
