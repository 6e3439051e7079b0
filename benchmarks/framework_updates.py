"""``python -m benchmarks.framework_updates``: what the adapter to verl adds to a plain push of the same tensors.

Two actors of a real verl job hold the gathered tensors, and push them in turn by the calls that verl makes, and by ``push_gathered`` alone, until
rollouts could pull the version: ``make bench-frameworks``. verl's own gathering is left out of both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import processes, report
from benchmarks.vllm_updates import write_version
from tests.support.verl_jobs import PYTHON, verl_job

MODEL = "bench/verl"
ACTORS = 2


def measure(folder: Path, gigabytes: float, lane: str, rounds: int) -> dict[str, float]:
    """Medians of the seconds of both ways, of the actor that takes longest in each round, and of the rounds' ratios."""
    hf = folder / "hf"
    if not hf.exists():
        write_version(hf, gigabytes, 1)
    nbytes = (hf / "model.safetensors").stat().st_size
    budget = ("--memory-budget", str(3 * nbytes))
    with processes.service(folder / lane, nbytes, *budget) as service, verl_job(folder) as job:
        said = {"server": service.grpc, "model": MODEL, "hf_dir": str(hf), "lane": lane}
        job.ask("start", folder=str(hf), said=said, actors=ACTORS, rollouts=0, bucket_mb=256)
        job.begin("seconds", rounds=rounds + 1)
        found: list[dict[str, list[float]]] = job.answer(600)
    # the first round makes memory for versions
    ways = {
        way: [max(of_round) for of_round in zip(*(each[way] for each in found), strict=True)][1:]
        for way in found[0]
    }
    ratios = [adapter / plain for adapter, plain in zip(ways["adapter"], ways["plain"], strict=True)]
    return {
        **{way: statistics.median(each) for way, each in ways.items()},
        "ratio": statistics.median(ratios),
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.framework_updates", description=str(__doc__).partition("\n\n")[2]
    )
    parser.add_argument("--gb", type=float, default=0.5, help="size of the model (default 0.5)")
    parser.add_argument("--lane", nargs="+", default=["local", "grpc"], help="lanes (default both)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (default 7)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    return parser.parse_args()


def main() -> None:
    """Measure, print a line for each lane, write files."""
    args = _parse()
    if not PYTHON.exists():
        raise SystemExit("verl has an environment of its own: make bench-frameworks")
    processes.end_tidily()
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="weighbridge-bench-") as name:
        for lane in args.lane:
            found = measure(Path(name), args.gb, lane, args.rounds)
            cases.append({"gigabytes": args.gb, "lane": lane, **found})
            print(
                f"{args.gb:g} GB, {ACTORS} actors, {lane}: by verl's calls {found['adapter']:.3f} s, plainly {found['plain']:.3f} s, "
                f"ratio {found['ratio']:.3f}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps({"machine": report.machine(), "cases": cases}, indent=1))


if __name__ == "__main__":
    main()
