"""Engine of your own that follows a ref: it answers while the next version comes, and no request sees two versions.

    python examples/engine.py acme/fsdp2 latest

Of two copies of the weights one answers, and the other one is filled in place. If a pull fails, the engine keeps its
version. Tensor-parallel ranks, and one copy of the weights instead of two: docs/engines.md.
"""

from __future__ import annotations

import json
import sys
import threading
from contextlib import closing

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from weighbridge import EngineClient, EngineReporter, Version, WeighbridgeError


class Engine:
    """Two copies of a model's weights, and the version of the one that answers."""

    def __init__(self, client: EngineClient, name: str) -> None:
        self.client, self.name, self.version = client, name, 0
        config = AutoConfig.for_model(**json.loads(client.model_files(name)["config.json"]))
        self._serving, self._spare = (AutoModelForCausalLM.from_config(config).eval() for _ in range(2))
        self._lock = threading.Lock()
        self.ready = threading.Event()

    def update(self, version: Version) -> None:
        """Pull a version beside the one that answers, then exchange the two."""
        self.client.pull(self.name, version.number).into(self._spare)
        with self._lock:
            self._serving, self._spare, self.version = self._spare, self._serving, version.number
        self.ready.set()

    @torch.no_grad()
    def next_token(self, tokens: list[int]) -> tuple[int, int]:
        """The likeliest next token, and the version that says so."""
        with self._lock:
            return int(self._serving(torch.tensor([tokens])).logits[0, -1].argmax()), self.version

    def follow(self, ref: str) -> None:
        """Go to each version that the ref names. `weighbridge engines` shows how the engine stands."""
        with closing(EngineReporter(self.client, self.name, kind="example", ref=ref)) as reporter:
            for version in self.client.watch(self.name, ref):
                reporter.say(state="updating", target=version.number)
                try:
                    self.update(version)
                    reporter.say(state="serving", target=0, version=self.version, error="")
                except WeighbridgeError as error:
                    reporter.say(state="failing", error=str(error))


def main(name: str, ref: str) -> None:
    """Follow a ref, and answer each line of token numbers on standard input."""
    client = EngineClient()
    next(client.watch(name, ref))  # the trainer may come later, and register the model then
    engine = Engine(client, name)
    threading.Thread(target=engine.follow, args=(ref,), daemon=True).start()
    engine.ready.wait()
    for line in sys.stdin:
        token, version = engine.next_token([int(word) for word in line.split()])
        print(f"token {token}, by version {version}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if sys.argv[2:] else "latest")
