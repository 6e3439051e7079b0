"""``python -m benchmarks.training_states``: what it costs a training step that the whole training state is pushed after
each.

Real gloo ranks train a model under FSDP2 with AdamW in fp32; on GPUs, which they share if there are fewer, with
``--device cuda``. In each round the same steps run with nothing saved, with pushes that copy until the next optimizer
step, with pushes that return once all is copied, and with the asynchronous saves of torch.distributed.checkpoint and,
on GPUs, of Megatron-core of the same state; then saves and loads that wait, so that each ratio is of times under the
same load.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import processes, report
from benchmarks.training_rank import MODEL, Seconds, hidden_size, measure, model_of
from weighbridge import Retention, TrainerClient
from weighbridge_demo.ranks import PRELOAD, gloo_job, run_jobs

RATIOS = {
    "a step, each pushed until the next optimizer step / plain": ("until", "plain"),
    "a step, each pushed and copied at once / plain": ("held_step", "plain"),
    "a step, each saved by DCP's async_save / plain": ("dcp_async", "plain"),
    "a step, each saved by Megatron's async save / plain": ("megatron_async", "plain"),
    "a push held / torch's copy of the state": ("held", "copy"),
    "a training state durable / DCP's save": ("durable", "dcp_save"),
    "a training state durable / Megatron's save": ("durable", "megatron_save"),
    "a training state restored / DCP's load": ("restore", "dcp_load"),
    "a training state restored / Megatron's load": ("restore", "megatron_load"),
}
"""Reported ratios: one time over another of the same round."""
_SECONDS_EACH_GB = 240.0
_VERSIONS_AT_ONCE = 4


def measured(folder: Path, args: argparse.Namespace, ranks: int) -> Seconds:
    """Times of the slowest rank in each round, with a service of their own.

    Args:
        folder: an empty folder.
        args: arguments of the command line.
        ranks: number of ranks that train.

    Raises:
        RankError: a rank failed.
    """
    hf = folder / "hf"
    hf.mkdir()
    (hf / "config.json").write_text("{}")
    (folder / "peers").mkdir()
    threads = max(len(os.sched_getaffinity(0)) // ranks, 1)
    rounds = args.warm_up + args.rounds
    seconds_a_round = 6 * (args.steps + 2) * args.step_seconds + _SECONDS_EACH_GB * args.gb
    with processes.service(folder, round(_VERSIONS_AT_ONCE * args.gb * 1e9)) as service:
        with TrainerClient(service.grpc) as admin, torch.device("meta"):
            admin.register_model(MODEL, hf, tensors=model_of(hidden_size(args.gb)), dtype="bf16", weight_map=False)
            admin.set_retention(MODEL, Retention(keep_last=1))
        job = gloo_job(
            ranks, measure, service.grpc, args.lane, str(folder / "peers"), args.gb, args.step_seconds, args.steps,
            args.warm_up, args.rounds, threads, args.device,
        )  # fmt: skip
        # ranks whose server has asked about GPUs may not use them
        preload = PRELOAD if args.device == "cpu" else ["torch"]
        [of_ranks] = run_jobs([job], timeout=300.0 + seconds_a_round * rounds, preload=preload)
    return {
        name: [max(times) for times in zip(*(each[name] for each in of_ranks), strict=True)] for name in of_ranks[0]
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training_states", description=__doc__)
    parser.add_argument("--gb", type=float, default=0.5, help="size of the training state (default 0.5)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks (default 1 2)")
    parser.add_argument("--step-seconds", type=float, default=2.0, help="about how long a step takes (default 2)")
    parser.add_argument("--steps", type=int, default=4, help="steps that follow each other (default 4)")
    parser.add_argument("--lane", default="local", choices=("local", "grpc"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--folder", type=Path, help="where stores are made (default: a temporary folder)")
    parser.add_argument("--warm-up", type=int, default=1, help="rounds that do not count (default 1)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (default 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    args = parser.parse_args(argv)
    cases = []
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory(dir=args.folder, prefix="weighbridge-bench-") as folder:
            seconds = measured(Path(folder).resolve(), args, ranks)
        case = {name: getattr(args, name) for name in ("gb", "step_seconds", "steps", "lane", "device")}
        cases.append({**case, "ranks": ranks, "seconds": seconds})
        rows = []
        for what, (above, below) in RATIOS.items():
            if not {above, below} <= seconds.keys():
                continue
            each = [a / b for a, b in zip(seconds[above], seconds[below], strict=True)]
            median = f"{statistics.median(seconds[above]):.3f}"
            rows.append([what, f"{statistics.median(each):.3f}", f"{min(each):.3f}-{max(each):.3f}", median])
        print(
            report.table([f"{args.gb:g} GB, {ranks} ranks, {args.lane}, {args.device}", "median", "rounds", "s"], rows)
        )
        if args.json is not None:  # after each case: many take long
            report.write_json(args.json, cases=cases)


if __name__ == "__main__":
    processes.end_tidily()
    main()
