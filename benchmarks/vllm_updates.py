"""``python -m benchmarks.vllm_updates``: what an update costs a real vLLM model, by its loader on whole tensors and by
what was recorded.

Both are measured in turn in the same processes, over the same lane: ``make bench-vllm``. The loader's way is vLLM's own
layerwise reloading.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks import models, processes, report
from benchmarks.vllm_process import Job
from weighbridge import TrainerClient

MODEL = "bench/vllm"
_LIMIT_SECONDS = 1800.0


def write_version(folder: Path, gigabytes: float, seed: int) -> Path:
    """A folder with a model of random weights."""
    config = models.write_config(models.config_of(gigabytes), folder)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        spec.name: torch.empty(spec.shape, dtype=torch.bfloat16).normal_(std=0.02, generator=generator)
        for spec in models.hugging_face_specs(config)
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _measure(job: Job, python: str, folder: Path) -> dict[str, float]:
    """Medians of one case in seconds; of the rank that takes longest."""
    root = Path(__file__).parent.parent
    environment = {
        **os.environ,
        "PYTHONPATH": f"{root / 'clients'}:{root}",
        "WEIGHBRIDGE_CACHE": str(folder / "cache"),
    }
    running = [
        subprocess.Popen(
            [
                python,
                "-W",
                "ignore",
                "-m",
                "benchmarks.vllm_process",
                json.dumps(asdict(replace(job, rank=rank))),
            ],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(job.ranks)
    ]
    try:
        answers = [process.communicate(timeout=_LIMIT_SECONDS)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    if any(process.returncode for process in running):
        raise SystemExit("a rank of vLLM has failed; what it said is above")
    found: list[dict[str, list[float]]] = [json.loads(answer.splitlines()[-1]) for answer in answers]
    return {name: max(statistics.median(each[name]) for each in found) for name in found[0]}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.vllm_updates", description=str(__doc__).partition("\n\n")[2]
    )
    parser.add_argument("--gb", type=float, default=1.0, help="size of the model (default 1)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="tensor-parallel ranks (default 1 2)")
    parser.add_argument("--lane", nargs="+", default=["local", "grpc"], help="lanes (default both)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count (default 3)")
    parser.add_argument("--python", default=".venv-vllm/bin/python", help="Python of vLLM's environment")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    return parser.parse_args()


def main() -> None:
    """Measure, print a table, write files."""
    args = _parse()
    processes.end_tidily()
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="weighbridge-bench-") as name:
        folder = Path(name)
        hf = [write_version(folder / f"hf{seed}", args.gb, seed) for seed in (1, 2)]
        nbytes = (hf[0] / "model.safetensors").stat().st_size
        with processes.service(folder, nbytes) as service, TrainerClient(service.grpc) as trainer:
            trainer.register_model(MODEL, hf[0])
            for each in hf:
                trainer.push_folder(MODEL, each).wait()
            for ranks in args.ranks:
                for lane in args.lane:
                    meeting = str(folder / f"meeting-{ranks}-{lane}")
                    job = Job(service.grpc, MODEL, str(hf[0]), lane, ranks, 0, meeting, args.rounds)
                    seconds = _measure(job, str(Path(args.python).absolute()), folder)
                    cases.append({"gigabytes": args.gb, "ranks": ranks, "lane": lane, "seconds": seconds})
                    print(_row(cases[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"machine": report.machine(), "cases": cases}, indent=1))


def _row(case: dict[str, Any]) -> str:
    s = case["seconds"]
    loader, recorded = (s[f"{way} bytes"] + s[f"{way} pause"] for way in ("loader", "recorded"))
    return (
        f"{case['gigabytes']:g} GB, {case['ranks']} ranks, {case['lane']}: "
        f"loader {s['loader bytes']:.2f} + {s['loader pause']:.2f} s paused, "
        f"recorded {s['recorded bytes']:.2f} + {s['recorded pause']:.2f} s paused; "
        f"{loader / recorded:.1f} times as fast, pause {s['loader pause'] / s['recorded pause']:.1f} times as short"
    )


if __name__ == "__main__":
    main()
