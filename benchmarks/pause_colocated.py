"""Trainer and engine of `benchmarks.pause` in one process and on one card, which take turns: by one call, or by hand
with ``state_dict`` and ``load_weights``.

Run by vLLM's Python, as `benchmarks.pause_engine`, with the same lines. Each turn begins and ends with the engine
awake.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from benchmarks.pause_engine import Engine, answer_lines
from benchmarks.pause_models import MODEL, checksum, fused, shapes_of
from weighbridge import PushHandle, TrainerClient
from weighbridge.integrations.vllm.colocated import ColocatedEngine, Peak, used_bytes

Figures = dict[str, dict[str, float]]
"""Seconds and peak bytes, by part."""


class Trainer:
    """Tensors that are on the card while it trains, and in pinned memory else.

    Args:
        config: config of the model.
        device: device that it trains on.
    """

    def __init__(self, config: Mapping[str, Any], device: str) -> None:
        self._config, self._device = config, device
        pins = device == "cuda"
        self._host = {
            name: torch.empty(shape, dtype=torch.bfloat16, pin_memory=pins) for name, shape in shapes_of(config).items()
        }
        self.tensors: dict[str, torch.Tensor] = {}

    def train(self, step: int) -> dict[str, int]:
        """Take the card, and make new weights; returns the checksums of the parameters that an engine fuses from
        them.
        """
        generator = torch.Generator(self._device).manual_seed(step)
        for name, there in self._host.items():
            self.tensors[name] = there.to(self._device, copy=True).normal_(std=0.02, generator=generator)
        return {name: checksum(tensor) for name, tensor in fused(self._config, self.tensors)}

    def offload(self) -> None:
        """Leave the card."""
        for name, tensor in self.tensors.items():
            self._host[name].copy_(tensor, non_blocking=True)
        if self._device == "cuda":
            torch.cuda.synchronize()
        self.tensors.clear()


class Turns:
    """A trainer and an engine that take turns.

    Args:
        server: address of the service.
        config: config of the model.
        options: options of `vllm.LLM`.
        level: level of the engine's sleep.
    """

    def __init__(self, server: str, config: Mapping[str, Any], options: dict[str, Any], level: int) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._base = _used_at_all()
        self._engine = Engine(server, {**options, **({"enable_sleep_mode": True} if device == "cuda" else {})}, {})
        self._level = level
        self._colocated = ColocatedEngine(self._engine.llm, MODEL, server, level=level, memory=self._used)
        self._trainer = Trainer(config, device)
        self._client = TrainerClient(server, run="colocated")
        self._pushed: PushHandle | None = None

    def facts(self) -> dict[str, Any]:
        """Facts of the engine, and the bytes of its weights."""
        weights = 2 * sum(math.prod(each.shape) for each in self._trainer._host.values())
        return {**self._engine.facts(), "weights": weights}

    def by_call(self, step: int) -> dict[str, Any]:
        """One turn by weighbridge."""
        expected = self._train(step)
        found = self._colocated.update(partial(self._push, step), self._trainer.offload)
        figures = {name: _figures(part.seconds, part.peak_bytes) for name, part in found.parts.items()}
        return self._seen(figures, expected)

    def by_hand(self, step: int) -> dict[str, Any]:
        """One turn as trainers do it without: a copy in host memory, which the model's own loader takes."""
        expected = self._train(step)
        figures: Figures = {}
        state: dict[str, torch.Tensor] = {}
        llm = self._engine.llm
        # else the wake-up would bring back what it has discarded, as it knows nothing of the weights that are loaded
        # here
        self._engine.ask("weighbridge_connect", json.dumps({"when_asleep": "refuse"}))

        def load(model: torch.nn.Module) -> None:
            loader: Any = model
            loader.load_weights(iter(state.items()))
            if torch.cuda.is_available():
                torch.cuda.synchronize()

        def offload() -> None:
            self._trainer.offload()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

        steps: dict[str, Callable[[], object]] = {
            "push": lambda: state.update((name, t.cpu()) for name, t in self._trainer.tensors.items()),
            "offload": offload,
            "wake_weights": lambda: llm.wake_up(["weights"]),
            "update": lambda: llm.apply_model(load),
            "wake_cache": lambda: llm.wake_up(["kv_cache"]),
        }
        for name, take in steps.items():
            begun = time.monotonic()
            with Peak(self._used) as peak:
                take()
            figures[name] = _figures(time.monotonic() - begun, peak.nbytes)
        return self._seen(figures, expected)

    def _train(self, step: int) -> dict[str, int]:
        if self._pushed is not None:
            self._pushed.wait("durable", timeout=600)
        self._colocated.sleep()
        return self._trainer.train(step)

    def _push(self, step: int) -> PushHandle:
        self._pushed = self._client.push_state_dict(MODEL, self._trainer.tensors, step=step)
        return self._pushed

    def _seen(self, figures: Figures, expected: Mapping[str, int]) -> dict[str, Any]:
        found = self._engine.checksums()
        wrong = [name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)]
        says = self._engine.generate() if torch.cuda.is_available() else []  # not every CPU computes in bf16
        return {"parts": figures, "wrong": sorted(wrong)[:5], "says": says}

    def _used(self) -> int:
        return max(used_bytes() - self._base, 0)


def _figures(seconds: float, nbytes: int) -> dict[str, float]:
    return {"seconds": seconds, "peak_gb": nbytes / 1e9}


def _used_at_all() -> int:
    """Bytes of the card that are in use before there is an engine."""
    if torch.cuda.is_available():
        torch.cuda.init()  # type: ignore[no-untyped-call]
    return used_bytes()


if __name__ == "__main__":
    answer_lines(Turns)
