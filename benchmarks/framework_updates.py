"""``python -m benchmarks.framework_updates``: what the adapters to frameworks add to a plain push of the same tensors.

Two actors of a real verl job, or one trainer, hold the gathered tensors, and push them in turn by the calls that verl, TRL or vLLM's trainers
make, and by ``push_gathered`` alone, until rollouts could pull the version: ``make bench-frameworks``. Gathering, and what engines do, are left out of both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import processes, report
from benchmarks.vllm_updates import write_version
from tests.support import jobs, trl_environment, verl_jobs
from tests.support.vllm_environment import environment

MODEL = "bench/policy"
TRAINERS = {"verl": 2, "trl": 1, "vllm": 1}
"""Ranks that push, by framework."""
Seconds = dict[str, list[float]]
_JOB = Path(__file__).parents[1] / "tests" / "support" / "sending_job.py"


def measure(folder: Path, framework: str, gigabytes: float, lane: str, rounds: int) -> dict[str, float]:
    """Medians of the seconds of both ways, of the rank that takes longest in each round, and of the rounds' ratios."""
    hf = folder / "hf"
    if not hf.exists():
        write_version(hf, gigabytes, 1)
    weights = hf / "model.safetensors"
    nbytes = weights.stat().st_size
    budget = ("--memory-budget", str(3 * nbytes))
    with processes.service(folder / framework / lane, nbytes, *budget) as service:
        said = {"server": service.grpc, "model": MODEL, "hf_dir": str(hf), "lane": lane}
        found = (_by_verl if framework == "verl" else _by_trainer)(
            folder, framework, weights, said, rounds + 1
        )
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


def _by_verl(
    folder: Path, _framework: str, weights: Path, said: dict[str, Any], rounds: int
) -> list[Seconds]:
    with verl_jobs.verl_job(folder) as job:
        actors = TRAINERS["verl"]
        job.ask("start", folder=str(weights.parent), said=said, actors=actors, rollouts=0, bucket_mb=256)
        job.begin("seconds", rounds=rounds)
        found: list[Seconds] = job.answer(600)
    return found


def _by_trainer(
    folder: Path, framework: str, weights: Path, said: dict[str, Any], rounds: int
) -> list[Seconds]:
    command: list[str | Path] = [trl_environment.PYTHON, "-W", "ignore", _JOB]
    with jobs.running(command, folder / "trainer.log", {**os.environ, **environment()}) as job:
        job.begin("seconds", how=framework, file=str(weights), said=said, rounds=rounds)
        found: Seconds = job.answer(600)
    return [found]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.framework_updates", description=str(__doc__).partition("\n\n")[2]
    )
    parser.add_argument(
        "--framework", nargs="+", default=[*TRAINERS], choices=TRAINERS, help="frameworks (default all)"
    )
    parser.add_argument("--gb", type=float, default=0.5, help="size of the model (default 0.5)")
    parser.add_argument("--lane", nargs="+", default=["local", "grpc"], help="lanes (default both)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (default 7)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    return parser.parse_args()


def main() -> None:
    """Measure, print a line for each framework and lane, write files."""
    args = _parse()
    python = {"verl": verl_jobs.PYTHON, "trl": trl_environment.PYTHON, "vllm": trl_environment.PYTHON}
    for framework in args.framework:
        if not python[framework].exists():
            raise SystemExit(f"{framework} has an environment of its own: make bench-frameworks")
    processes.end_tidily()
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="weighbridge-bench-") as name:
        for framework in args.framework:
            for lane in args.lane:
                found = measure(Path(name), framework, args.gb, lane, args.rounds)
                cases.append({"framework": framework, "gigabytes": args.gb, "lane": lane, **found})
                print(
                    f"{framework}, {args.gb:g} GB, ranks: {TRAINERS[framework]}, {lane}: by its calls {found['adapter']:.3f} s, "
                    f"plainly {found['plain']:.3f} s, ratio {found['ratio']:.3f}",
                    flush=True,
                )
    if args.json:
        args.json.write_text(json.dumps({"machine": report.machine(), "cases": cases}, indent=1))


if __name__ == "__main__":
    main()
