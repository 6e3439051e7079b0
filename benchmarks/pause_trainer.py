"""Trainer of `benchmarks.pause`: holds a model on its device, and pushes new random weights when it is told to.

Each line of its standard input is the number of a step, or ``checksums``. The answer is a line of JSON: how long the push held the trainer and how
long it took until the version was ready; or the checksum of each parameter as the engine fuses them.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from benchmarks.pause_models import MODEL, checksum, fused, shapes_of
from weighbridge import PushHandle, TrainerClient


def main(server: str, folder: str, device: str) -> None:
    """Push until the standard input ends."""
    config = json.loads((Path(folder) / "config.json").read_text())
    if device == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
    tensors = {
        name: torch.empty(shape, dtype=torch.bfloat16, device=device)
        for name, shape in shapes_of(config).items()
    }
    with TrainerClient(server) as client:
        client.register_model(MODEL, folder, tensors=tensors, weight_map=False)
        print(json.dumps({"bytes": sum(t.nbytes for t in tensors.values())}), flush=True)
        handle: PushHandle | None = None
        for line in sys.stdin:
            if line.strip() == "checksums":
                sums = {name: checksum(tensor) for name, tensor in fused(config, tensors)}
                print(json.dumps(sums), flush=True)
                continue
            step = int(line)
            if handle is not None:
                handle.wait("durable", timeout=600)  # so that no two versions wait for the store at once
            generator = torch.Generator(device).manual_seed(step)
            for tensor in tensors.values():
                tensor.normal_(std=0.02, generator=generator)
            if device == "cuda":
                torch.cuda.synchronize()
            begun = time.monotonic()
            handle = client.push_state_dict(MODEL, tensors, step=step)
            held = time.monotonic() - begun
            version = handle.wait("ready", timeout=600)
            ready = time.monotonic() - begun
            said = {"version": version.number, "begun": begun, "held": held, "ready": ready}
            print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
