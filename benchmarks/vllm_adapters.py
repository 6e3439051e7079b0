"""``python -m benchmarks.vllm_adapters``: the first token of an adapter that a vLLM has not seen, next to the same
adapter from a local folder.

One vLLM on processors, which computes a small random model, is asked for one token of each of many adapters, in two
ways in turn: by the name at the service, and by vLLM's own ``/v1/load_lora_adapter`` of an export of the same version,
and then by that name. For the first way, the report also has the time in which the server asked the service and fetched
the files. Without that time, the first way may take at most 1.2 times as long as the second.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import processes, report
from benchmarks.adapters import write_adapter
from tests.support.vllm_adapters import BASE, Adapters, keeping, serving
from weighbridge import VersionState
from weighbridge.follow import answers
from weighbridge_demo.vllm_server import VllmServer

MODULES = {
    "q_proj": (256, 256),
    "o_proj": (256, 256),
    "gate_proj": (256, 512),
    "up_proj": (256, 512),
    "down_proj": (512, 256),
}
"""Input and output features of linear layers of the model."""
_LAYERS, _RANK = 2, 64
_MOST_TIMES = 1.2
_START_SECONDS, _WAIT_SECONDS = 900.0, 120.0
_PARTS = re.compile(r"is loaded: asked in (\d+) ms, ([\d.]+) MB fetched in (\d+) ms, loaded in (\d+) ms")


def post(server: VllmServer, path: str, **said: Any) -> None:
    """A request, whose answer is read. Raises RuntimeError for an error."""
    request = urllib.request.Request(  # noqa: S310  # a server of this machine
        server.url + path, json.dumps(said).encode(), {"Content-Type": "application/json"}
    )
    answer = answers.ask(request, _WAIT_SECONDS)
    if answer.is_error:
        raise RuntimeError(f"{path} was answered by {answer.status}: {answer.body.decode()}")


def first_token(server: VllmServer, model: str, prompt: str) -> None:
    """Ask for one token."""
    post(server, "/v1/completions", model=model, prompt=prompt, max_tokens=1, temperature=0)


def push(there: Adapters, folder: Path, name: str) -> Path:
    """Push an adapter; returns the folder that it is exported to."""
    handle = there.trainer.import_adapter(name, folder, base=f"{BASE}@1", step=1)
    handle.wait(VersionState.DURABLE, timeout=_WAIT_SECONDS)
    out = there.folder / name.replace("/", "-")
    there.client.export(name, 1, out)
    return out


def measure(there: Adapters, server: VllmServer, adapter: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round: from the service, and from a folder. The first round is not counted."""
    found: dict[str, list[float]] = {"service": [], "folder": []}
    for done in range(rounds + 1):
        name = f"acme/bench{done}"
        out = push(there, adapter, name)
        prompt = f"w{done} w5 w17"
        for way in ("service", "folder")[:: 1 if done % 2 else -1]:
            begun = time.perf_counter()
            if way == "folder":
                post(server, "/v1/load_lora_adapter", lora_name=f"local{done}", lora_path=str(out))
            first_token(server, f"{name}@1" if way == "service" else f"local{done}", prompt)
            if done:
                found[way].append(time.perf_counter() - begun)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print; exits with 1 if the first token takes more times as long as it may."""
    parser = argparse.ArgumentParser(prog="benchmarks.vllm_adapters", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="adapters that are counted (default 20)")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args(argv)
    processes.end_tidily()
    os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch, keeping(Path(scratch)) as there:
        nbytes = write_adapter(there.folder / "adapter", MODULES, _LAYERS, _RANK)
        most = str(2 * args.rounds + 4)
        with serving(there, "--max-lora-rank", str(_RANK), "--max-cpu-loras", most) as server:
            server.wait_ready(_START_SECONDS)
            found = measure(there, server, there.folder / "adapter", args.rounds)
            said = _PARTS.findall(server.log.read_text(errors="replace"))[1:]
    found["asked"] = [int(each[0]) / 1e3 for each in said]
    found["fetched"] = [int(each[2]) / 1e3 for each in said]
    found["loaded"] = [int(each[3]) / 1e3 for each in said]
    found["without fetch"] = [
        whole - asked - fetched
        for whole, asked, fetched in zip(found["service"], found["asked"], found["fetched"], strict=True)
    ]
    typical = {name: statistics.median(each) for name, each in found.items()}
    ratio = typical["without fetch"] / typical["folder"]
    print(report.table(["", "median"], [[name, report.seconds(each)] for name, each in typical.items()]))
    print(
        f"{nbytes / 1e6:.1f} MB an adapter, rank {_RANK}; first token without the fetch "
        f"{ratio:.2f} times that from a folder, with it "
        f"{typical['service'] / typical['folder']:.2f} times; load of the machine {load:.1f} "
        f"before and {os.getloadavg()[0]:.1f} after"
    )
    if args.json is not None:
        report.write_json(args.json, seconds=found, nbytes=nbytes, load=load)
    sys.exit(ratio > _MOST_TIMES)


if __name__ == "__main__":
    main()
