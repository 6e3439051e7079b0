"""``python -m benchmarks.framework_updates``: what the adapters to frameworks add to a plain push of the same tensors.

The ranks of a real job push in turn by the calls that their framework makes, and plainly, until engines could pull the
version: ``make bench-frameworks``. Two actors of verl, and one trainer of TRL or to vLLM's factory, hold the gathered
tensors, and push them plainly by ``push_gathered``; two ranks of AReaL hold what FSDP2 has given them, and push it
plainly by ``push_state_dict``. Gathering, and what engines do, are left out of both.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import processes, report
from benchmarks.vllm_updates import write_version
from tests.support import areal_jobs, jobs, trl_environment, verl_jobs
from tests.support.vllm_environment import environment
from weighbridge import Retention, TrainerClient

MODEL = "bench/policy"
Seconds = list[dict[str, list[float]]]
"""For each rank, seconds of each round by way."""
_SENDING_JOB = Path(__file__).parents[1] / "tests" / "support" / "sending_job.py"


@dataclass(frozen=True)
class Work:
    """Work of a framework's ranks.

    Attributes:
        folder: folder for logs.
        server: address of the service.
        hf: folder of the model.
        lane: lane of the weights.
        rounds: how often each way is measured.
    """

    folder: Path
    server: str
    hf: Path
    lane: str
    rounds: int

    @property
    def said(self) -> dict[str, Any]:
        """Settings of the service that the ranks receive."""
        return {"server": self.server, "model": MODEL, "hf_dir": str(self.hf), "lane": self.lane}


def _of_verl(work: Work) -> Seconds:
    with verl_jobs.verl_job(work.folder) as job:
        job.ask("start", folder=str(work.hf), said=work.said, actors=2, rollouts=0, bucket_mb=256)
        job.begin("seconds", rounds=work.rounds)
        found: Seconds = job.answer(600)
    return found


def _of_trainer(how: str) -> Callable[[Work], Seconds]:
    def found(work: Work) -> Seconds:
        command: list[str | Path] = [trl_environment.PYTHON, "-W", "ignore", _SENDING_JOB]
        with jobs.running(command, work.folder / "trainer.log", {**os.environ, **environment()}) as job:
            file = str(work.hf / "model.safetensors")
            job.begin("seconds", how=how, file=file, said=work.said, rounds=work.rounds)
            return [job.answer(600)]

    return found


def _of_areal(work: Work) -> Seconds:
    with (
        areal_jobs.areal_engine() as engine,
        areal_jobs.areal_job(work.folder, work.server, MODEL, [engine], work.lane) as job,
    ):
        job.ask("start", 600, folder=str(work.hf), root=str(work.folder / "files"))
        return job.ask("seconds", 600, rounds=work.rounds)


FRAMEWORKS = {
    "verl": (verl_jobs.PYTHON, _of_verl),
    "trl": (trl_environment.PYTHON, _of_trainer("trl")),
    "vllm": (trl_environment.PYTHON, _of_trainer("vllm")),
    "areal": (areal_jobs.PYTHON, _of_areal),
}
"""For each framework, the Python of its environment and the function that measures it."""


def measure(framework: str, folder: Path, gigabytes: float, lane: str, rounds: int) -> dict[str, float]:
    """As `report.next_to_plain`, and how many ranks there are."""
    hf = folder / "hf"
    if not hf.exists():
        write_version(hf, gigabytes, 1)
        areal_jobs.write_tokenizer(hf)
    nbytes = (hf / "model.safetensors").stat().st_size
    options = ("--memory-budget", str(3 * nbytes), "--collect-every", "5")
    with (
        tempfile.TemporaryDirectory(dir=folder) as store,
        processes.service(Path(store), nbytes, *options) as service,
    ):
        with TrainerClient(service.grpc) as admin:
            admin.register_model(MODEL, hf)
            admin.set_retention(MODEL, Retention(keep_last=1))  # the disk need not hold all rounds
        found = FRAMEWORKS[framework][1](Work(folder, service.grpc, hf, lane, rounds + 1))
    return {"ranks": len(found), **report.next_to_plain(found)}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.framework_updates", description=str(__doc__).partition("\n\n")[2]
    )
    parser.add_argument(
        "--framework", nargs="+", default=[*FRAMEWORKS], choices=FRAMEWORKS, help="frameworks (default all)"
    )
    parser.add_argument("--gb", type=float, default=0.5, help="size of the model (default 0.5)")
    parser.add_argument("--lane", nargs="+", default=["local", "grpc"], help="lanes (default both)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (default 7)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    return parser.parse_args()


def main() -> None:
    """Measure, print a line for each framework and lane, write files."""
    args = _parse()
    absent = [name for name in args.framework if not FRAMEWORKS[name][0].exists()]
    if absent:
        raise SystemExit(f"{', '.join(absent)}: in an environment of its own: make bench-frameworks")
    processes.end_tidily()
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="weighbridge-bench-") as name:
        for framework, lane in itertools.product(args.framework, args.lane):
            found = measure(framework, Path(name), args.gb, lane, args.rounds)
            cases.append({"framework": framework, "gigabytes": args.gb, "lane": lane, **found})
            print(
                f"{framework}, {args.gb:g} GB, ranks: {found['ranks']}, {lane}: by its calls {found['adapter']:.3f} s, "
                f"plainly {found['plain']:.3f} s, ratio {found['ratio']:.3f}",
                flush=True,
            )
    if args.json:
        report.write_json(args.json, cases=cases)


if __name__ == "__main__":
    main()
