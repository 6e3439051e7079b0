"""Command line: ``python -m tests.fuzz [TARGET ...] [--inputs N] [--seed S] [--plain] [--json FILE] [--folder DIR]``,
or ``python -m tests.fuzz TARGET --replay FILE ...``.

Without targets all of them run, and share the inputs by their weights; ``WEIGHBRIDGE_FUZZ_INPUTS`` says how many if
``--inputs`` does not. The exit code is 1 if there are findings.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.fuzz.campaign import Campaign, Result, shares, table
from tests.fuzz.judge import Judge
from tests.fuzz.targets import NAMES, find

_INPUTS = 200_000


def main() -> int:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(prog="make fuzz")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(NAMES))
    parser.add_argument("--inputs", type=int, default=int(os.environ.get("WEIGHBRIDGE_FUZZ_INPUTS", _INPUTS)))
    parser.add_argument("--seed", type=int, default=int(os.environ.get("WEIGHBRIDGE_SEED", "0")))
    parser.add_argument("--plain", action="store_true", help="without coverage guidance: atheris is not needed")
    parser.add_argument("--workers", type=int, default=2, help="targets that run at one time")
    parser.add_argument("--folder", type=Path, help="for findings")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument(
        "--replay",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="run these inputs of one target, and say what each leads to",
    )
    options = parser.parse_args()
    unknown = [name for name in options.targets if name not in NAMES]
    if unknown or (options.replay and len(options.targets) != 1):
        parser.error(f"targets are {', '.join(NAMES)}" if unknown else "an input is replayed for one target")
    if options.replay:
        return _replay(options.targets[0], options.replay)
    names = options.targets or list(NAMES)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="weighbridge-fuzz-"))
    folder.mkdir(parents=True, exist_ok=True)
    campaign = Campaign(folder, options.seed, plain=options.plain, say=lambda text: print(text, flush=True))
    weights = {name: find(name).weight for name in names}
    wanted = shares(weights, options.inputs)
    order = sorted(names, key=weights.__getitem__)  # what takes longest first
    with ThreadPoolExecutor(options.workers) as pool:
        found = dict(zip(order, pool.map(lambda name: campaign.run(name, wanted[name]), order), strict=True))
    results: list[Result] = [found[name] for name in names]
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps([each.to_json() for each in results], indent=1))
    for each in results:
        for fault, files in each.tally.findings.items():
            print(f"{each.tally.target}: {fault}: {files[0]}")
        for file in each.lost:
            print(f"{each.tally.target}: the process ended: {file}")
    return 1 if any(each.findings for each in results) else 0


def _replay(name: str, files: list[Path]) -> int:
    target = find(name)
    failed = False
    with target.start() as parse:
        judge = Judge(target, parse)
        for file in files:
            verdict = judge.verdict(file.read_bytes())
            failed = failed or bool(verdict.problem)
            print(
                f"{file}: {verdict.key or 'as documented'}, {verdict.seconds:.3f} s, "
                f"{verdict.grown:.1f} MiB\n{verdict.said}"
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
