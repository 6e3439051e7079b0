"""``python -m benchmarks.sglang_pause``: how long a SGLang on a card stands still for an update, next to its own
``update_weights_from_tensor``.

A trainer, a service and SGLang's server are processes of this machine; requests go on all the time. Of each version
that the server takes from the service, the digests of all its parameters are compared with those of the version's bytes
(`weighbridge prove`). After that the trainer hands handles of its tensors to SGLang by SGLang's own way, as colocated
trainers do.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import torch

from benchmarks import processes
from benchmarks.pause import Peer, copy_seconds, trainer_of
from benchmarks.pause_models import CONFIGS, MODEL, config_of, write_model
from tests.support.ports import reserved_ports
from weighbridge import EngineClient
from weighbridge.errors import WeighbridgeError
from weighbridge.follow.proving import prove
from weighbridge.follow.sglang import SglangServer

_START_SECONDS = 600.0
_TOKENS = 64
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass
class Load:
    """Requests that a server answers meanwhile.

    Args:
        url: URL of the server.
        tokens: their ids are below this number.
    """

    url: str
    tokens: int

    def __post_init__(self) -> None:
        self.answered = 0
        self.failed: list[str] = []
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []

    def begin(self, clients: int) -> None:
        """Begin to send requests, each client one after another."""
        self._threads = [threading.Thread(target=self._send, args=(seed,)) for seed in range(clients)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Send no more, and wait for the last answers."""
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _send(self, seed: int) -> None:
        dice = random.Random(seed)
        while not self._ended.is_set():
            try:
                self.answered += self.ask(dice)
            except (OSError, KeyError, ValueError) as error:
                self.failed.append(f"{type(error).__name__}: {error}")
                self._ended.wait(0.1)

    def ask(self, dice: random.Random) -> int:
        """Send one request. Returns the number of tokens in its response."""
        found = post(
            self.url + "/generate",
            {
                "input_ids": [dice.randrange(5, self.tokens) for _ in range(16)],
                "sampling_params": {"temperature": 0, "max_new_tokens": _TOKENS, "ignore_eos": True},
            },
        )
        return len(found["output_ids"])


def post(url: str, body: Any) -> Any:
    """Answer of one of the server's routes."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})  # noqa: S310
    with _DIRECT.open(request, timeout=300) as answer:
        return json.load(answer)


@contextmanager
def suppress_missing() -> Iterator[None]:
    """Block in which a route that the server does not have is no error."""
    try:
        yield
    except urllib.error.HTTPError as error:
        if error.code != HTTPStatus.NOT_FOUND:
            raise


@contextmanager
def sglang(arguments: argparse.Namespace, server: str, log: Path) -> Iterator[str]:
    """URL of a SGLang that was started from the service."""
    (port,) = reserved_ports(1)
    command = [
        *(arguments.python, "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(port)),
        *("--model-path", f"weighbridge://{server}/{MODEL}@latest", "--served-model-name", MODEL),
        *("--skip-tokenizer-init", "--skip-server-warmup", "--dtype", "bfloat16", *arguments.serve),
    ]
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=log.parent, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        begun = time.monotonic()
        while True:
            if process.poll() is not None or time.monotonic() - begun > _START_SECONDS:
                raise SystemExit(f"SGLang did not start: {log.read_text()[-6000:]}")
            with suppress(OSError), _DIRECT.open(url + "/model_info", timeout=5):
                break
            time.sleep(0.2)
        print(f"SGLang answers after {time.monotonic() - begun:.1f} s", flush=True)
        yield url
    finally:
        processes.kill_group(process)


def update(trainer: Peer, driver: SglangServer, client: EngineClient, step: int) -> dict[str, Any]:
    """Push a version, take the server to it as an agent does, and compare all its parameters."""
    pushed = trainer.ask(f"push {step}")
    begun = time.monotonic()
    driver.prepare(pushed["version"])
    prepared = time.monotonic()
    driver.pause()
    try:
        driver.apply(pushed["version"], f"{MODEL}@{pushed['version']}")
    finally:
        driver.resume()
    ended = time.monotonic()
    proof = prove(client, driver.evidence, MODEL, pushed["version"])
    return {
        "version": pushed["version"],
        "held": pushed["held"],
        "ready": pushed["ready"],
        "prepare": prepared - begun,
        "pause": ended - prepared,
        "to_engine": ended - pushed["begun"],
        "compared": sum(rank.compared for rank in proof.ranks.values()),
        "wrong": [name for rank in proof.ranks.values() for name in rank.wrong][:5],
    }


def own_update(trainer: Peer, url: str, step: int) -> dict[str, Any]:
    """Give the server handles of the trainer's tensors, by SGLang's own way."""
    sent = trainer.ask(f"sglang {step}")
    if "failed" in sent:
        return {"failed": sent["failed"]}
    begun = time.monotonic()
    post(url + "/pause_generation", {"mode": "retract"})
    try:
        with suppress_missing():  # 0.5.15 and older have no sessions
            post(url + "/begin_weight_update", {"selector": "target"})
        said = post(
            url + "/update_weights_from_tensor",
            {"serialized_named_tensors": [sent["payload"]], "flush_cache": True},
        )
        with suppress_missing():
            post(url + "/end_weight_update", {})
    except urllib.error.HTTPError as error:
        said = {"message": error.read().decode()}
    finally:
        post(url + "/continue_generation", {})
    ended = time.monotonic()
    failed = "" if said.get("success") else str(said.get("message"))
    return {"pause": ended - begun, "to_engine": ended - sent["begun"], "failed": failed}


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Updates by the service, and as many by SGLang's own way."""
    hf, model_bytes = write_model(folder, arguments.model)
    logs = arguments.logs or folder
    found: dict[str, Any] = {"model": arguments.model, "bytes": model_bytes, "updates": [], "own": []}
    with ExitStack() as stack:
        service_log = stack.enter_context((logs / "service.log").open("w"))
        service = stack.enter_context(
            processes.service(folder, model_bytes, "--collect-every", "5", stderr=service_log.fileno())
        )
        trainer = stack.enter_context(
            trainer_of(service.grpc, hf, arguments.device, logs / "trainer.log", arguments.python)
        )
        trainer.ask("")
        found["copy"] = copy_seconds(model_bytes, arguments.device)
        trainer.ask("push 1")
        trainer.ask("durable")
        url = stack.enter_context(sglang(arguments, service.grpc, logs / "engine.log"))
        client = stack.enter_context(EngineClient(service.grpc))
        driver = SglangServer(url, service.grpc, MODEL)
        driver.connect()
        load = Load(url, config_of(arguments.model)["vocab_size"])
        load.ask(random.Random(0))  # compiles kernels
        load.begin(arguments.clients)
        stack.callback(load.end)
        for step in range(2, arguments.updates + 2):
            try:
                found["updates"].append(update(trainer, driver, client, step))
            except WeighbridgeError as error:
                found["updates"].append({"failed": str(error)})
            print(json.dumps(found["updates"][-1]), flush=True)
        for step in range(arguments.updates + 2, 2 * arguments.updates + 2):
            try:
                found["own"].append(own_update(trainer, url, step))
            except OSError as error:  # it has ended
                found["own"].append({"failed": str(error)})
            print("own", json.dumps(found["own"][-1]), flush=True)
        load.end()
        found["answered"], found["unanswered"] = load.answered, load.failed[:3]
    return found


def summary(found: dict[str, Any]) -> str:
    """Medians of both ways, and what went wrong."""
    wrong = [each for each in found["updates"] if each.get("wrong") or each.get("failed")]
    lines = [f"{found['bytes'] / 1e9:.2f} GB, a pinned copy {found['copy']:.3f} s; {found['answered']} tokens"]
    for name, updates in (("weighbridge", found["updates"]), ("update_weights_from_tensor", found["own"])):
        good = [each for each in updates if not each.get("failed")]
        if good:
            pauses, ways = ([each[key] for each in good] for key in ("pause", "to_engine"))
            lines.append(
                f"{name}: pause {statistics.median(pauses):.3f} s ({min(pauses):.3f} to "
                f"{max(pauses):.3f}), from the trainer's call until the "
                f"engine goes on {statistics.median(ways):.3f} s, {len(good)} of {len(updates)} updates"
            )
    wrong += [each for each in found["own"] if each.get("failed")]
    if wrong or found["unanswered"]:
        lines.append(f"WRONG: {json.dumps([*wrong, *found['unanswered']])}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print what was found; exits with 1 if a parameter was wrong or a request failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="qwen3-4b", choices=CONFIGS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--python", default=sys.executable, help="of an environment with SGLang and the SDK")
    parser.add_argument("--updates", type=int, default=10, help="each way")
    parser.add_argument("--clients", type=int, default=8, help="that send requests, one after another")
    parser.add_argument("--logs", type=Path, help="keep what the processes write in this folder")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("serve", nargs="*", help="more arguments of SGLang's server, after --")
    arguments = parser.parse_args(argv)
    processes.end_tidily()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(arguments, Path(folder))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1))
    said = summary(found)
    print(said, flush=True)
    if "WRONG" in said:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
