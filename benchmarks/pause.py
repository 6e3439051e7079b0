"""``python -m benchmarks.pause``: how long a real vLLM stands still for a new version, and how long the version takes
from trainer to engine.

``make bench-pause``. A trainer process holds the model on the same device, a service is between the two, and after each
update the checksum of every parameter of the engine is compared with the trainer's own tensors. Ways of one run: with
memory of the card for the next version, without, vLLM's own ways, and a plain copy of as many bytes from pinned memory,
which is what the seconds are compared with.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks import pause_decoding, processes
from benchmarks.pause_models import CONFIGS, MODEL, config_of, write_model

_ROOT = Path(__file__).parent.parent
OWN = ("ipc", "reload")
"""Cases of updates by vLLM alone."""
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "sleep": {"enable_sleep_mode": True},
    "ipc": {"weight_transfer_config": {"backend": "ipc"}},
    "fp8": {"quantization": "fp8"},
    # a step ends before an update begins, as the engine is stepped by hand
    "decode": {"async_scheduling": False},
}
"""Options of `vllm.LLM`, by case."""


class Peer:
    """A process that answers lines with lines."""

    def __init__(self, command: list[str], log: Path, mark: str) -> None:
        path = os.pathsep.join(str(_ROOT / each) for each in ("", "clients", "storage", "service"))
        known = os.environ.get("PYTHONPATH", "")
        self._mark, self._log = mark, log
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("a"),
            text=True,
            env={**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{known}"},
        )

    @property
    def pid(self) -> int:
        """Process ID of the process."""
        return self._process.pid

    def tell(self, line: str) -> None:
        """Send a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def ask(self, line: str) -> Any:
        """Send a line, and wait for the answer; an empty one only waits. Raises RuntimeError if the process ends."""
        if line:
            self.tell(line)
        assert self._process.stdout is not None
        with self._log.open("a") as log:
            for said in self._process.stdout:
                if said.startswith(self._mark):
                    return json.loads(said.removeprefix("="))
                log.write(said)
        raise RuntimeError(f"{self._process.args!r} has ended: {self._log.read_text()[-3000:]}")

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def peer(command: list[str], log: Path, mark: str = "=") -> Iterator[Peer]:
    """A process for as long as the context lasts."""
    made = Peer(command, log, mark)
    try:
        yield made
    finally:
        made.close()


def trainer_of(
    server: str, hf: Path, device: str, log: Path, python: str = sys.executable
) -> AbstractContextManager[Peer]:
    """The trainer of a model's folder (`benchmarks.pause_trainer`), for as long as the context lasts."""
    return peer([python, "-m", "benchmarks.pause_trainer", server, str(hf), device], log, "{")


def copy_seconds(nbytes: int, device: str) -> float:
    """Median seconds of a copy of so many bytes from pinned memory to the device."""
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device == "cuda")
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    found = []
    for _ in range(4):
        begun = time.monotonic()
        there.copy_(host, non_blocking=True)
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.monotonic() - begun)
    del there
    if device == "cuda":
        torch.cuda.empty_cache()  # the engines need the card
    return statistics.median(found[1:])


def differing(trainer: Peer, engine: Peer) -> list[str]:
    """Names of parameters that are not what the trainer has."""
    found = engine.ask(json.dumps(["checksums"]))
    ranks = len({name.rpartition(":")[0] for name in found})
    expected = trainer.ask(f"checksums {ranks}")
    return sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))


def updates(trainer: Peer, engine: Peer, steps: range, *, early: bool, compares: bool = True) -> list[dict[str, Any]]:
    """Push, prepare and apply so many versions, which the engine stages while they arrive if ``early``; all parameters
    are compared, unless the engine has others than the trainer."""
    found = []
    for step in steps:
        if early:
            engine.tell(json.dumps(["expect"]))
        pushed = trainer.ask(f"push {step}")
        expected = engine.ask("") if early else {}
        prepared = engine.ask(json.dumps(["prepare", pushed["version"]]))
        applied = engine.ask(json.dumps(["apply", pushed["version"]]))
        wrong = differing(trainer, engine) if compares else []
        found.append(
            {
                "version": pushed["version"],
                "held": pushed["held"],
                "ready": pushed["ready"],
                "heard": round(expected.get("heard", pushed["begun"]) - pushed["begun"], 4),
                "prepare": prepared["took"],
                "apply": applied["took"],
                "to_engine": applied["ended"] - pushed["begun"],
                "failed": applied["failed"] or prepared["failed"],
                "wrong": wrong[:5],
            }
        )
        print(json.dumps(found[-1]), flush=True)
    return found


def own_updates(trainer: Peer, engine: Peer, steps: range, way: str, folder: Path) -> list[dict[str, Any]]:
    """Updates by vLLM alone, by handles of the trainer's memory (``ipc``) or from a folder that the trainer writes
    (``reload``); figures as of `updates`.
    """
    found = []
    for step in steps:
        there = str(folder / str(step))
        sent = trainer.ask(f"ipc {step}" if way == "ipc" else f"folder {step} {there}")
        if "failed" in sent:
            applied = sent
        else:
            command = ["receive", sent["update"]] if way == "ipc" else ["reload", there]
            applied = engine.ask(json.dumps(command))
        shutil.rmtree(there, ignore_errors=True)
        failed = applied["failed"]
        found.append(
            {
                "step": step,
                "held": sent.get("held", 0.0),
                "ready": sent.get("held", 0.0),
                "prepare": 0.0,
                "apply": applied.get("took", 0.0),
                "to_engine": 0.0 if failed else applied["ended"] - sent["begun"],
                "failed": failed,
                "wrong": [] if failed else differing(trainer, engine)[:5],
            }
        )
        print(json.dumps(found[-1]), flush=True)
    return found


def decoded(arguments: argparse.Namespace, trainer: Peer, engine: Peer, step: int) -> tuple[dict[str, Any], int]:
    """Rates of generation without updates and with them, while the trainer makes as many new weights in both; and the
    last step.

    Before that, versions are brought to all memory of the service, as long-running engines have seen it.
    """

    def run(seconds: float, order: str) -> dict[str, Any]:
        nonlocal step
        trainer.ask("durable")
        begun = time.monotonic()
        engine.tell(json.dumps(["decode", seconds, arguments.requests, order == "hurry"]))
        for turn in range(int((seconds - 1.0) // arguments.every)):
            time.sleep(max(begun + 0.5 + turn * arguments.every - time.monotonic(), 0.0))
            if time.monotonic() - begun > seconds - 1.0:  # pushes take longer than that
                break
            step += 1
            trainer.ask(f"{order} {step}")
        found: dict[str, Any] = engine.ask("")
        print(order, json.dumps(found), flush=True)
        return found

    for _ in range(math.ceil(arguments.images) or 2):  # memory of the service is registered with CUDA once
        step += 1
        pushed = trainer.ask(f"hurry {step}")
        engine.ask(json.dumps(["prepare", pushed["version"]]))
        engine.ask(json.dumps(["apply", pushed["version"]]))
    run(3.0, "make")
    turns = [
        run(arguments.seconds / arguments.turns, order) for _ in range(arguments.turns) for order in ("make", "hurry")
    ]
    found = {"without": pause_decoding.joined(turns[::2]), "during": pause_decoding.joined(turns[1::2])}
    if any("failed" in each and each["failed"] for each in found.values()):
        return found, step
    found |= pause_decoding.summary(found["without"], found["during"])
    step += 1
    trainer.ask("durable")
    pushed = trainer.ask(f"push {step}")
    engine.ask(json.dumps(["prepare", pushed["version"]]))
    engine.ask(json.dumps(["apply", pushed["version"]]))
    return {**found, "wrong": differing(trainer, engine)[:5]}, step


def start(arguments: argparse.Namespace, engine: Peer, *given: Any) -> dict[str, Any]:
    """Start an engine; returns its facts, or why it could not be started."""
    facts: dict[str, Any] = engine.ask(json.dumps(["start", *given]))
    print(json.dumps(facts), flush=True)
    if "failed" in facts and arguments.logs:
        print((arguments.logs / "engine.log").read_text()[-6000:])
    return facts


def loaded_anew(
    arguments: argparse.Namespace, trainer: Peer, log: Path, given: tuple[Any, ...], seen: tuple[Any, Any]
) -> dict[str, Any]:
    """Differences between an engine that is started with the newest version and one that was updated to it: parameters
    and generated text.
    """
    trainer.ask("durable")
    with peer([arguments.python, "-m", "benchmarks.pause_engine"], log) as engine:
        facts = start(arguments, engine, *given)
        if "failed" in facts:
            return facts
        sums, says = engine.ask(json.dumps(["checksums"])), engine.ask(json.dumps(["generate"]))
    wrong = sorted(name for name in sums.keys() | seen[0].keys() if sums.get(name) != seen[0].get(name))
    return {"compared": len(sums), "wrong": wrong[:5], "says": [says, seen[1]]}


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All that is asked for."""
    hf, model_bytes = write_model(folder, arguments.model)
    logs = {name: (arguments.logs or folder) / f"{name}.log" for name in ("service", "trainer", "engine")}
    found: dict[str, Any] = {"model": arguments.model}
    more = ["--collect-every", "5"]
    if arguments.images:
        more += ["--memory-budget", str(int(arguments.images * model_bytes * 1.1))]
    with (
        logs["service"].open("w") as service_log,
        processes.service(folder, model_bytes, *more, stderr=service_log.fileno()) as service,
        trainer_of(service.grpc, hf, arguments.device, logs["trainer"]) as trainer,
    ):
        found["bytes"] = trainer.ask("")["bytes"]
        found["copy"] = copy_seconds(found["bytes"], arguments.device)
        print(json.dumps(found), flush=True)
        step = 1
        trainer.ask(f"push {step}")
        for name in arguments.cases:
            if name == "colocated":
                found[name] = take_turns(arguments, service.grpc, logs["engine"], step + 1)
                step += 2 * arguments.updates
                continue
            early = name in ("early", "decode", "fp8")
            extra: dict[str, Any] = {}
            if name == "grpc":
                extra = {"lane": "grpc"}
            elif name not in ("auto", "sleep", *OWN):
                extra = {"card_share": 1.0 if early else float(name)}
            options = {**json.loads(arguments.options), **OPTIONS.get(name, {})}
            step += 1
            if name == "reload":
                trainer.ask(f"folder {step} {folder / 'first'}")
                options["model"] = str(folder / "first")
            with peer([arguments.python, "-m", "benchmarks.pause_engine"], logs["engine"]) as engine:
                print(name, flush=True)
                facts = start(arguments, engine, service.grpc, options, extra)
                if "failed" in facts:
                    found[name] = {"facts": facts, "updates": []}
                    continue
                first = step + 1
                if name == "decode":
                    found[name], step = decoded(arguments, trainer, engine, step)
                    continue
                step += arguments.updates
                steps = range(first, step + 1)
                found[name] = {
                    "facts": facts,
                    "updates": own_updates(trainer, engine, steps, name, folder)
                    if name in OWN
                    else updates(trainer, engine, steps, early=early, compares="quantization" not in options),
                }
                if name in OWN:
                    continue
                found[name]["proof"] = engine.ask(json.dumps(["proof"]))
                if name == "sleep":
                    found[name]["slept"] = asleep(trainer, engine, step + 1)
                    step += 2
                    found[name]["woken"] = woken(trainer, engine, service.grpc, step + 1)
                    step += 2
                if arguments.profile:
                    step += 1
                    pushed = trainer.ask(f"push {step}")
                    engine.ask(json.dumps(["prepare", pushed["version"]]))
                    print(engine.ask(json.dumps(["profile", pushed["version"]])), flush=True)
                print(name, json.dumps(engine.ask(json.dumps(["facts"]))), flush=True)
                says = engine.ask(json.dumps(["generate"])) if arguments.says else []
                print("says", says, flush=True)
                seen = engine.ask(json.dumps(["checksums"])), says
            if "quantization" in options:
                given = (service.grpc, options, extra)
                found[name]["loaded anew"] = loaded_anew(arguments, trainer, logs["engine"], given, seen)
                print(name, "loaded anew", json.dumps(found[name]["loaded anew"]), flush=True)
    return found


def asleep(trainer: Peer, engine: Peer, step: int) -> list[Any]:
    """An update of an engine that sleeps: refused, and made once its weights are awake."""
    found = []
    for level in (1, 2):
        engine.ask(json.dumps(["sleep", level]))
        pushed = trainer.ask(f"push {step}")
        step += 1
        engine.ask(json.dumps(["prepare", pushed["version"]]))
        refused = engine.ask(json.dumps(["apply", pushed["version"]]))
        engine.ask(json.dumps(["wake_up", "weights"]))
        applied = engine.ask(json.dumps(["apply", pushed["version"]]))
        engine.ask(json.dumps(["wake_up", "kv_cache"]))
        wrong = differing(trainer, engine)
        said = engine.ask(json.dumps(["generate"]))
        found.append([level, refused["failed"], applied["failed"], applied["took"], not wrong, said])
        print("slept", json.dumps(found[-1]), flush=True)
    return found


def woken(trainer: Peer, engine: Peer, server: str, step: int) -> list[Any]:
    """Updates of an engine that sleeps, which its wake-up brings; and after level 2 a wake-up without one, which brings
    back what was there.
    """
    found = []

    def tell(when_asleep: str) -> None:
        said = json.dumps({"model": MODEL, "server": server, "when_asleep": when_asleep})
        engine.ask(json.dumps(["ask", "weighbridge_connect", said]))

    tell("wait")
    for level, pushes in ((1, True), (2, True), (2, False)):
        engine.ask(json.dumps(["sleep", level]))
        waits = ""
        if pushes:
            pushed = trainer.ask(f"push {step}")
            step += 1
            engine.ask(json.dumps(["prepare", pushed["version"]]))
            waits = engine.ask(json.dumps(["apply", pushed["version"]]))["waiting"]
        begun = time.monotonic()
        failed = engine.ask(json.dumps(["wake_up"]))
        took = time.monotonic() - begun
        served = engine.ask(json.dumps(["ask", "weighbridge_status"]))["served"]
        wrong = differing(trainer, engine)
        said = engine.ask(json.dumps(["generate"]))
        found.append([level, waits, failed, took, served, not wrong, said])
        print("woken", json.dumps(found[-1]), flush=True)
    tell("refuse")
    return found


def take_turns(arguments: argparse.Namespace, server: str, log: Path, step: int) -> dict[str, list[Any]]:
    """Turns of a trainer and an engine on one card: by one call, and by hand."""
    found: dict[str, list[Any]] = {"by_call": [], "by_hand": []}
    with peer([arguments.python, "-m", "benchmarks.pause_colocated"], log) as both:
        config, options = config_of(arguments.model), json.loads(arguments.options)
        facts = both.ask(json.dumps(["start", server, config, options, arguments.level]))
        print("colocated", json.dumps(facts), flush=True)
        if "failed" in facts:
            print(log.read_text()[-6000:])
            return {"start": [facts]}
        for _ in range(arguments.updates):
            for way, turns in found.items():
                turns.append(both.ask(json.dumps([way, step])))
                print(way, json.dumps(turns[-1]), flush=True)
                step += 1
    return found


def summed(turn: Mapping[str, Any]) -> tuple[float, float]:
    """Seconds of a turn, and its peak in GB."""
    parts = turn["parts"].values()
    return sum(part["seconds"] for part in parts), max(part["peak_gb"] for part in parts)


def lines(turns: Mapping[str, list[dict[str, Any]]]) -> Iterator[str]:
    """Printed lines of turns: one for each turn, with seconds and GB of each part."""
    for way, each in ((way, each) for way, those in turns.items() for each in those):
        if "failed" in each:
            yield f"colocated, {way}: FAILED {each['failed']}"
            continue
        seconds, peak = summed(each)
        parts = ", ".join(
            f"{name} {part['seconds']:.3f} s {part['peak_gb']:.2f} GB" for name, part in each["parts"].items()
        )
        wrong = f", WRONG {each['wrong']}" if each["wrong"] else ""
        yield f"colocated, {way}: {seconds:.3f} s, at most {peak:.2f} GB: {parts}{wrong}"


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny", choices=CONFIGS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--python", default=sys.executable, help="of an environment with vLLM")
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument(
        "--cases",
        nargs="+",
        default=["early", "1", "0"],
        help="early (staged while it arrives, card_share 1), values of card_share, auto, grpc "
        "(brought over gRPC), sleep, fp8 (as early, with vLLM's online quantisation, compared "
        "with a fresh load), colocated, decode (rates of generation as early), or vLLM's own ipc and reload",
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of the case decode without updates, and with them")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two updates of the case decode")
    parser.add_argument(
        "--turns", type=int, default=2, help="of the case decode, without updates and with them, in turn"
    )
    parser.add_argument("--requests", type=int, default=16, help="at once, in the case decode")
    parser.add_argument(
        "--images",
        type=float,
        default=0.0,
        help="memory of the service, in versions; 0 for two if there is room",
    )
    parser.add_argument("--silent", dest="says", action="store_false", help="generate nothing after updates")
    parser.add_argument("--level", type=int, default=2, help="of sleep, in the case colocated")
    parser.add_argument("--options", default="{}", help="of vllm.LLM, as JSON")
    parser.add_argument("--profile", action="store_true", help="print where the time of one more update goes")
    parser.add_argument("--logs", type=Path, help="keep what the processes write in this folder")
    parser.add_argument("--json", type=Path, help="write all figures there")
    arguments = parser.parse_args()
    processes.end_tidily()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(arguments, Path(folder))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    copy = found["copy"]
    print(f"{found['model']}: {found['bytes'] / 1e9:.2f} GB, a pinned copy {copy:.3f} s")
    for line in lines(found.pop("colocated", {})):
        print(line)
    for line in summary(found, arguments.cases):
        print(line)


def summary(found: Mapping[str, Any], cases: Sequence[str]) -> Iterator[str]:
    """Printed lines of the other cases: one for each update, and those of rates."""
    copy = found["copy"]
    for name in cases:
        case = found.get(name, {})
        if "during" in case:
            yield f"decode: {json.dumps({key: case[key] for key in case if key not in ('without', 'during')})}"
        if "loaded anew" in case:
            yield f"{name}, a fresh load: {json.dumps(case['loaded anew'])}"
        if "proof" in case:
            yield f"{name}: digests of all parameters and the answer, first and later: {json.dumps(case['proof'])}"
        for each in case.get("updates", []):
            yield (
                f"{name}: apply {each['apply']:.3f} s ({each['apply'] / copy:.2f} copies), "
                f"prepare {each['prepare']:.3f}, "
                f"held {each['held']:.3f}, ready {each['ready']:.3f}, to the engine {each['to_engine']:.3f}"
                + (f", FAILED {each['failed']}" if each["failed"] else "")
                + (f", WRONG {each['wrong']}" if each["wrong"] else "")
            )


if __name__ == "__main__":
    main()
