"""``python -m benchmarks.torch_trainers``: how long a push of a torch state dict holds its ranks.

Real gloo ranks hold one model as DTensors cut by rows, as FSDP2 cuts them, in bf16 and in fp32, and as Megatron's
tensor-parallel shards; on GPUs, which they share if there are fewer, with ``--device cuda``. Each round pushes all
three, and whole tensors that pass by, and lets torch copy as much, with the same cast, so that each ratio is of times
under the same load.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import models, processes, report
from benchmarks.torch_rank import MODEL, Seconds, measure
from weighbridge import Retention, TrainerClient
from weighbridge_demo.ranks import PRELOAD, gloo_job, run_jobs

RATIOS = {
    "a state dict held / Megatron's shards held": ("state_dict", "megatron"),
    "a state dict held / torch's copy": ("state_dict", "copy"),
    "Megatron's shards held / torch's copy": ("megatron", "copy"),
    "a state dict held / the same without the count of non-finite elements": ("counted", "uncounted"),
    "whole tensors that pass by held / a state dict held": ("gathered", "state_dict"),
    "fp32 cast to bf16 held / torch's cast": ("cast", "cast_copy"),
    "a state dict ready / Megatron's shards ready": ("state_dict_ready", "megatron_ready"),
    "fp32 cast to bf16 ready / a state dict ready": ("cast_ready", "state_dict_ready"),
}
"""Reported ratios: one time over another of the same round."""
_SECONDS_EACH_GB = 120.0


@dataclass(frozen=True)
class Ratio:
    """A ratio over rounds.

    Attributes:
        median, least, most: median, least and greatest of the rounds' ratios.
        seconds: median of the time above the line.
    """

    median: float
    least: float
    most: float
    seconds: float


def measured(
    folder: Path, gigabytes: float, ranks: int, lane: str, warm_up: int, rounds: int, device: str = "cpu"
) -> Seconds:
    """Times of the slowest rank in each round, with a service of their own.

    Args:
        folder: an empty folder.
        gigabytes: about how large the model is, in bf16.
        ranks: number of ranks that push.
        lane: ``local`` or ``grpc``.
        warm_up, rounds: number of rounds that do not count, and of those that do.
        device: device of the tensors, ``cpu`` or ``cuda``.

    Raises:
        RankError: a rank failed.
    """
    models.write_model(gigabytes, folder / "hf")
    specs = folder / "hf" / "specs.json"
    nbytes = sum(spec.nbytes for spec in models.read_specs(specs))
    threads = max(len(os.sched_getaffinity(0)) // ranks, 1)
    timeout = 300.0 + _SECONDS_EACH_GB * gigabytes * (warm_up + rounds)
    with processes.service(folder, nbytes) as service:
        with TrainerClient(service.grpc) as admin:
            admin.register_model(MODEL, folder / "hf")
            admin.set_retention(MODEL, Retention(keep_last=1))
        job = gloo_job(ranks, measure, service.grpc, str(specs), lane, warm_up, rounds, threads, device)
        # ranks whose server has asked about GPUs may not use them
        [of_ranks] = run_jobs([job], timeout=timeout, preload=PRELOAD if device == "cpu" else ["torch"])
    return {
        name: [max(times) for times in zip(*(each[name] for each in of_ranks), strict=True)] for name in of_ranks[0]
    }


def ratios(seconds: Seconds) -> dict[str, Ratio]:
    """`RATIOS` of what was measured."""
    found = {}
    for what, (above, below) in RATIOS.items():
        each = [a / b for a, b in zip(seconds[above], seconds[below], strict=True)]
        found[what] = Ratio(statistics.median(each), min(each), max(each), statistics.median(seconds[above]))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.torch_trainers", description=__doc__)
    parser.add_argument("--gb", type=float, default=0.5, help="size of the model in bf16 (default 0.5)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks (default 1 2)")
    parser.add_argument("--lane", default="local", choices=("local", "grpc"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--folder", type=Path, help="where stores are made (default: a temporary folder)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (default 7)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    args = parser.parse_args(argv)
    cases = []
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory(dir=args.folder, prefix="weighbridge-bench-") as folder:
            store = Path(folder).resolve()
            seconds = measured(store, args.gb, ranks, args.lane, 2, args.rounds, args.device)
        case = {"gigabytes": args.gb, "ranks": ranks, "lane": args.lane, "device": args.device}
        cases.append({**case, "seconds": seconds})
        rows = [
            [what, f"{each.median:.2f}", f"{each.least:.2f}-{each.most:.2f}", f"{each.seconds:.3f}"]
            for what, each in ratios(seconds).items()
        ]
        print(report.table([f"{args.gb:g} GB, {ranks} ranks, {args.lane}", "median", "rounds", "s"], rows))
        if args.json is not None:  # after each case: many take long
            report.write_json(args.json, cases=cases)


if __name__ == "__main__":
    processes.end_tidily()
    main()
