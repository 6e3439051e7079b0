"""``python -m benchmarks.slime_updates``: what the updater for slime and Miles adds to a plain push of the same shards.

Megatron-core ranks on CPUs (TP2 x PP2) push their shards in turn by the calls that slime makes, and by
``TrainerClient.push`` alone, until engines could pull the version: ``make bench-slime``. Engines are left out of both.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import processes, report
from tests.support.megatron_ranks import run_ranks
from tests.support.reference import tiny_config
from tests.support.slime_actors import TrainerActor, arguments
from weighbridge import PushHandle, Retention, TrainerClient, VersionState
from weighbridge_demo.megatron_cpu import Parallel, build_model

MODEL = "bench/slime"
PARALLEL = Parallel(tp=2, pp=2)
HIDDEN, INNER, VOCABULARY = 1024, 4096, 32768
_LAYER_BYTES = 2 * (4 * HIDDEN**2 + 3 * HIDDEN * INNER)
_EMBEDDING_BYTES = 2 * 2 * VOCABULARY * HIDDEN
_START_SECONDS, _SECONDS_PER_GB = 300.0, 60.0
"""Timeouts on a busy machine: for the start of the ranks, and for both ways of a round, which end when the version is
on disk.
"""


def config_of(gigabytes: float) -> Any:
    """A qwen3 in bf16 of about that size, whose layers divide by the stages."""
    layers = max(round((gigabytes * 1e9 - _EMBEDDING_BYTES) / _LAYER_BYTES / PARALLEL.pp), 1) * PARALLEL.pp
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "vocab_size": VOCABULARY, "head_dim": 128}
    return tiny_config(
        "qwen3", tied=False, **sizes, num_key_value_heads=8, num_hidden_layers=layers, torch_dtype="bfloat16"
    )


def seconds(rank: int, config: Any, more: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    """Seconds of each round on this rank, by way."""
    model = build_model(config, PARALLEL, dtype=torch.bfloat16)
    actor = TrainerActor("slime", arguments("slime", **more), [model])
    actor.weight_updater._bring = lambda *_: {}  # what engines take is not measured here
    settings = more["weighbridge"]
    found: dict[str, list[float]] = {"adapter": [], "plain": []}
    with TrainerClient(settings["server"], lane=settings["lane"], run="plain") as client:

        def by_slime(step: int) -> PushHandle:
            actor.update_weights([], new_engines=int(step == 1))
            handle: PushHandle = actor.weight_updater.pushed
            return handle

        def plainly(step: int) -> PushHandle:
            weights = model.sharded_state_dict()
            handle = client.push(MODEL, weights, step=step, rank=rank, world_size=PARALLEL.world_size)
            handle.wait(VersionState.READY)
            return handle

        ways = [("adapter", by_slime), ("plain", plainly)]
        for step in range(1, rounds + 1):
            for way, push in ways if step % 2 else ways[::-1]:
                dist.barrier()
                started = time.monotonic()
                handle = push(step)
                dist.barrier()
                found[way].append(time.monotonic() - started)
                handle.wait()  # the upload to the store must not slow the next push
                if rank == 0:
                    client.set_retention(MODEL, Retention(keep_last=1))
                    client.collect(MODEL)
    return found


def measure(folder: Path, gigabytes: float, lane: str, rounds: int) -> dict[str, float]:
    """As `report.next_to_plain`."""
    config = config_of(gigabytes)
    config.save_pretrained(folder / "hf")
    nbytes = _EMBEDDING_BYTES + config.num_hidden_layers * _LAYER_BYTES
    with processes.service(folder / lane, nbytes, "--memory-budget", str(3 * nbytes)) as service:
        settings = {"model": MODEL, "server": service.grpc, "lane": lane}
        more = {"weighbridge": settings, "hf_checkpoint": str(folder / "hf")}
        limit = _START_SECONDS + (rounds + 1) * gigabytes * _SECONDS_PER_GB
        of_ranks = run_ranks(PARALLEL, seconds, config, more, rounds + 1, timeout=limit)
    return report.next_to_plain(of_ranks)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.slime_updates", description=str(__doc__).partition("\n\n")[2]
    )
    parser.add_argument("--gb", type=float, default=0.5, help="size of the model (default 0.5)")
    parser.add_argument("--lane", nargs="+", default=["local", "grpc"], help="lanes (default both)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (default 7)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    return parser.parse_args()


def main() -> None:
    """Measure, print a line for each lane, write files."""
    args = _parse()
    processes.end_tidily()
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="weighbridge-bench-") as name:
        for lane in args.lane:
            print(
                f"{args.gb:g} GB, {PARALLEL.world_size} ranks, {lane}: {args.rounds + 1} rounds",
                file=sys.stderr,
            )
            found = measure(Path(name), args.gb, lane, args.rounds)
            cases.append({"gigabytes": args.gb, "lane": lane, **found})
            print(
                f"{args.gb:g} GB, {PARALLEL.world_size} ranks, {lane}: by slime's calls "
                f"{found['adapter']:.3f} s, plainly "
                f"{found['plain']:.3f} s, ratio {found['ratio']:.3f}",
                flush=True,
            )
    if args.json:
        report.write_json(args.json, cases=cases)


if __name__ == "__main__":
    main()
