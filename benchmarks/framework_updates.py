"""``python -m benchmarks.framework_updates``: what the adapters to verl and AReaL add to a plain push of the same tensors.

Two actors of a real job push in turn by the adapter and plainly, until rollouts could pull the version: ``make bench-frameworks``. Those of verl hold the
gathered tensors, and push them by the calls that verl makes, and by ``push_gathered``; verl's own gathering is left out of both. Those of AReaL push what
FSDP2 has given them, by their own update without its engines, and by ``push_state_dict``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import processes, report
from benchmarks.vllm_updates import write_version
from tests.support import areal_jobs, verl_jobs

MODEL = "bench/policy"
ACTORS = 2
Seconds = list[dict[str, list[float]]]
"""Of each actor, by way, of each round."""


def _of_verl(folder: Path, server: str, hf: Path, lane: str, rounds: int) -> Seconds:
    with verl_jobs.verl_job(folder) as job:
        said = {"server": server, "model": MODEL, "hf_dir": str(hf), "lane": lane}
        job.ask("start", folder=str(hf), said=said, actors=ACTORS, rollouts=0, bucket_mb=256)
        job.begin("seconds", rounds=rounds)
        found: Seconds = job.answer(600)
    return found


def _of_areal(folder: Path, server: str, hf: Path, lane: str, rounds: int) -> Seconds:
    areal_jobs.write_tokenizer(hf)
    engine = areal_jobs.Engine()
    try:
        with areal_jobs.areal_job(folder, server, MODEL, [engine], lane) as job:
            job.ask("start", 600, folder=str(hf), root=str(folder / "files"))
            return job.ask("seconds", 600, rounds=rounds)
    finally:
        engine.close()


FRAMEWORKS = {"verl": (verl_jobs.PYTHON, _of_verl), "areal": (areal_jobs.PYTHON, _of_areal)}
"""By name, the Python of its environment, and what measures it."""


def measure(framework: str, folder: Path, gigabytes: float, lane: str, rounds: int) -> dict[str, float]:
    """Medians of the seconds of both ways, of the actor that takes longest in each round, and of the rounds' ratios."""
    hf = folder / "hf"
    if not hf.exists():
        write_version(hf, gigabytes, 1)
    nbytes = (hf / "model.safetensors").stat().st_size
    budget = ("--memory-budget", str(3 * nbytes))
    with processes.service(folder / framework / lane, nbytes, *budget) as service:
        found = FRAMEWORKS[framework][1](folder, service.grpc, hf, lane, rounds + 1)
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
    parser.add_argument(
        "--frameworks", nargs="+", choices=FRAMEWORKS, default=[*FRAMEWORKS], help="which (default all)"
    )
    parser.add_argument("--lane", nargs="+", default=["local", "grpc"], help="lanes (default both)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (default 7)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    return parser.parse_args()


def main() -> None:
    """Measure, print a line for each lane, write files."""
    args = _parse()
    absent = [name for name in args.frameworks if not FRAMEWORKS[name][0].exists()]
    if absent:
        raise SystemExit(f"{', '.join(absent)}: in an environment of its own: make bench-frameworks")
    processes.end_tidily()
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="weighbridge-bench-") as name:
        for framework, lane in itertools.product(args.frameworks, args.lane):
            found = measure(framework, Path(name), args.gb, lane, args.rounds)
            cases.append({"framework": framework, "gigabytes": args.gb, "lane": lane, **found})
            print(
                f"{framework}, {args.gb:g} GB, {ACTORS} actors, {lane}: by the adapter {found['adapter']:.3f} s, plainly "
                f"{found['plain']:.3f} s, ratio {found['ratio']:.3f}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps({"machine": report.machine(), "cases": cases}, indent=1))


if __name__ == "__main__":
    main()
