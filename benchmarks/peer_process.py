"""``python -m benchmarks.peer_process NAME FOLDER [--hub URL] [--memory]``: one peer, once, in a process of its own.

The process runs the peer on the tiny model in FOLDER/tiny-model, makes the weights of the one in FOLDER/model, and runs
it on that. It prints JSON: ``seconds``, the ``bytes`` of the model, and what is wrong with the files if they are meant
to be a Hugging Face folder (``problems``). With --memory it has ``memory`` instead of ``seconds``: the bytes that the
process and its children had at most beyond the weights, or the room for them. If it cannot be done, it prints
``error``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.memory import Sampler, memory_of
from benchmarks.peers import BY_NAME, HUB_PEER, PEERS, Peer, Work


def measure(peer: Peer, folder: Path, hub: str, sampled: bool) -> dict[str, object]:
    """Run a peer on the model in a folder; returns the figures."""
    work = Work(folder / "model", folder, hub)
    with work.stack:
        if peer is not HUB_PEER:
            with tempfile.TemporaryDirectory(dir=folder) as tiny:
                _warm_up(peer, Work(folder / "tiny-model", Path(tiny)))
        peer.prepare(work)
        figures: dict[str, object] = {"bytes": work.nbytes}
        if sampled:
            with Sampler([os.getpid()], [memory_of(os.getpid()).proportional]) as sampler:
                peer.run(work)
                sampler.sample()
            figures["memory"] = sampler.peak_sum
        else:
            started = time.perf_counter()
            peer.run(work)
            figures["seconds"] = time.perf_counter() - started
        figures["problems"] = list(_problems(peer, work)) if peer.ends == "hf files" else []
    return figures


def _warm_up(peer: Peer, work: Work) -> None:
    with work.stack:
        for other in PEERS:
            if other.writes and other.writes == peer.reads:
                other.run(work)
        peer.prepare(work)
        peer.run(work)


def _problems(peer: Peer, work: Work) -> Iterator[str]:
    """Problems of the written files: missing or unexpected tensors, wrong shapes, and wrong bits where the peer had
    whole tensors.
    """
    from safetensors import safe_open

    left = {spec.name: spec for spec in work.specs}
    for path in sorted(work.path(peer.writes).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                spec = left.pop(name, None)
                tensor = file.get_tensor(name)
                if spec is None or (tensor.dtype, tuple(tensor.shape)) != (spec.dtype.torch, spec.shape):
                    yield f"{name} is {tensor.dtype}{list(tensor.shape)}, and should be {spec}"
                elif peer.begins == "tensors" and not _same(tensor, work.tensors[name]):
                    yield f"{name} has other bits"
    yield from (f"{name} is missing" for name in left)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peer_process", description=__doc__)
    parser.add_argument("name", choices=BY_NAME)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hub", default="")
    parser.add_argument("--memory", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    # whatever libraries print goes with what they log
    answers, sys.stdout = sys.stdout, sys.stderr
    try:
        answer = measure(BY_NAME[args.name], args.folder, args.hub, args.memory)
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
