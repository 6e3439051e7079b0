"""``python -m benchmarks.pause_faults``: does a proof find and name every fault that is put into a real vLLM on a card,
and invent none?

A trainer, a service and a vLLM of one worker; each fault is one of `KINDS`, and after each there is a proof of the
engine without it.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks import processes
from benchmarks.pause import Peer, peer, trainer_of
from benchmarks.pause_models import CONFIGS, MODEL, write_model
from tests.support.engine_faults import KEEP, NEXT, RESTORE, WRONG, order, told
from weighbridge import EngineClient
from weighbridge._core.engines.facts import FAILED
from weighbridge.errors import FailedPrecondition
from weighbridge.follow.evidence import Evidence, RankProof
from weighbridge.follow.proving import prove

KINDS = ("flip", "swap_rows", "stale", "skip", "half", "record")
_RANK = "rank 0"


class Proved:
    """The engine and the proofs of it.

    Args:
        engine: its process.
        client: client of the service.
    """

    def __init__(self, engine: Peer, client: EngineClient) -> None:
        self._engine, self._client = engine, client
        self.seconds: list[float] = []

    def order(self, kind: str, **said: Any) -> list[str]:
        """Send an order of `engine_faults`; returns the parameters that it has made wrong."""
        return told(self.evidence, order(kind, **said))[_RANK]

    def take_to(self, version: int) -> None:
        """Update the engine."""
        for what in ("prepare", "apply"):
            self._said(what, version)

    def wrong(self, version: int) -> list[str] | None:
        """Parameters that a proof names; None if it does not fail."""
        begun = time.monotonic()
        proof = prove(self._client, self.evidence, MODEL, version)
        self.seconds.append(time.monotonic() - begun)
        return sorted(proof.ranks[_RANK].wrong) if proof.verdict == FAILED else None

    def wrong_by_load(self) -> list[str]:
        """Parameters that differ from a load by vLLM's own loader."""
        found = RankProof.from_json(self._said("ask", "weighbridge_compare_with_load")["proof"])
        return sorted(found.wrong)

    def evidence(self, known: Collection[str] = ()) -> Mapping[str, Evidence]:
        """Evidence that the worker returns."""
        return {_RANK: Evidence.from_json(self._said("ask", "weighbridge_evidence", ",".join(known))["evidence"])}

    def _said(self, *what: Any) -> dict[str, Any]:
        found: dict[str, Any] = self._engine.ask(json.dumps(what))
        if found["failed"]:
            raise FailedPrecondition(f"{what[0]}: {found['failed']}")
        return found


def inject(proved: Proved, faults: int, versions: tuple[int, int]) -> Counter[str]:
    """Put faults in; how many of each kind were found and named, and how many were not (``missed``), had nothing to
    change (``not there``), or were found where none is (``invented``)."""
    chance, counts = random.Random(1), Counter[str]()
    served, other = versions[1], versions[0]
    for number in range(faults):
        kind = KINDS[number % len(KINDS)]
        said = {"seed": chance.randrange(1 << 30), "name": "embed_tokens.weight" if kind == "stale" else ""}
        if kind in ("stale", *NEXT):
            proved.order(KEEP)
            served, other = other, served
        wrong = proved.order(kind, **said) if kind in NEXT else []
        if kind in ("stale", *NEXT):
            proved.take_to(served)
        if kind not in NEXT:
            wrong = proved.order(kind, **said)
        elif kind != "record":
            wrong = proved.order(WRONG)
        found = proved.wrong_by_load() if kind == "record" else proved.wrong(served)
        # a CPU's kernels have packed all matrices out of the sight of digests
        counts["not there" if not wrong else kind if found == sorted(wrong) else "missed"] += 1
        if wrong and found != sorted(wrong):
            print(f"{kind}: {wrong[:4]} were made wrong, {found} were named", flush=True)
        proved.order(RESTORE)
        if kind in NEXT:
            proved.take_to(served)
        invented = proved.wrong(served)
        counts["without a fault"] += 1
        if invented is not None:
            counts["invented"] += 1
            print(f"after {kind}: {invented[:4]} were named", flush=True)
    return counts


def main() -> None:
    """Inject, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny", choices=CONFIGS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--python", default=sys.executable, help="of an environment with vLLM")
    parser.add_argument("--faults", type=int, default=12)
    parser.add_argument("--options", default="{}", help="of vllm.LLM, as JSON")
    parser.add_argument("--logs", type=Path, help="keep what the processes write in this folder")
    arguments = parser.parse_args()
    processes.end_tidily()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        logs = arguments.logs or folder
        hf, nbytes = write_model(folder, arguments.model)
        with (
            (logs / "service.log").open("w") as log,
            processes.service(folder, nbytes, stderr=log.fileno()) as service,
            trainer_of(service.grpc, hf, arguments.device, logs / "trainer.log") as trainer,
            peer([arguments.python, "-m", "benchmarks.pause_engine"], logs / "engine.log") as engine,
            EngineClient(service.grpc) as client,
        ):
            trainer.ask("")
            first, second = (trainer.ask(f"push {step}")["version"] for step in (1, 2))
            trainer.ask("durable")
            options = {"enforce_eager": True, **json.loads(arguments.options)}
            facts = engine.ask(json.dumps(["start", service.grpc, options, {}]))
            if "failed" in facts:
                raise SystemExit(f"vLLM has not started: {facts['failed']}")
            engine.ask(json.dumps(["inject"]))
            proved = Proved(engine, client)
            counts = inject(proved, arguments.faults, (first, second))
    print(
        f"{arguments.model}: {nbytes / 1e9:.2f} GB, {dict(counts)}; a proof takes {min(proved.seconds):.2f} s or more"
    )
    if counts["missed"] or counts["invented"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
