"""Does the benchmark of pauses measure both ways of a trainer and an engine on one card, and compare what the engine
has?
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import pause_colocated, pause_models
from benchmarks.pause import lines, summed
from benchmarks.pause_colocated import Turns
from benchmarks.pause_models import MODEL, checksum, config_of, fused, shapes_of
from tests.support.services import running_service
from weighbridge import EngineClient, TrainerClient

CONFIG = {**config_of("tiny"), "num_hidden_layers": 1, "vocab_size": 64, "hidden_size": 128}


class FakeEngine:
    """An engine that pulls whole versions, and is its own `LLM` and model."""

    def __init__(self, server: str, options: dict[str, Any], extra: dict[str, Any]) -> None:
        assert not extra
        assert options == {}
        self.asked: list[str] = []
        self._client = EngineClient(server)
        self._tensors: dict[str, torch.Tensor] = {}
        self.forgets = ""

    @property
    def llm(self) -> FakeEngine:
        return self

    def facts(self) -> dict[str, Any]:
        return {"kv_tokens": 7}

    def ask(self, method: str, *arguments: str) -> Any:
        return self.collective_rpc(method, arguments)

    def collective_rpc(self, method: str, args: Any = ()) -> list[dict[str, Any]]:
        self.asked.append(method.removeprefix("weighbridge_"))
        if method == "weighbridge_apply":
            self._tensors = dict(self._client.pull(MODEL, int(args[0])))
        if method == "weighbridge_connect":
            self.asked[-1] = json.loads(args[0])["when_asleep"]
        return [{"served": "", "failed": ""}]

    def sleep(self, level: int) -> None:
        self.asked.append(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        self.asked += tags

    def apply_model(self, do: Callable[[Any], None]) -> None:
        self.asked.append("load")
        do(self)

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._tensors = dict(weights)

    def checksums(self) -> dict[str, int]:
        found = {name: checksum(tensor) for name, tensor in fused(CONFIG, self._tensors)}
        return {name: each for name, each in found.items() if name != self.forgets}


@pytest.fixture
def turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Turns]:
    monkeypatch.setattr(pause_models, "_CHUNK", 1 << 12)
    monkeypatch.setattr(pause_colocated, "Engine", FakeEngine)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(CONFIG))
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes_of(CONFIG).items()}
    with running_service(tmp_path / "store") as service:
        with TrainerClient(service.address) as trainer:
            trainer.register_model(MODEL, tmp_path / "hf", tensors=tensors, weight_map=False)
        yield Turns(service.address, CONFIG, {}, 2)


PARTS = ["push", "offload", "wake_weights", "update", "wake_cache"]


def test_both_ways_have_the_same_parts_and_the_engine_has_what_was_trained(turns: Turns) -> None:
    engine: Any = turns._engine
    weights = 2 * sum(torch.Size(shape).numel() for shape in shapes_of(CONFIG).values())
    assert turns.facts() == {"kv_tokens": 7, "weights": weights}
    seen: dict[str, list[Any]] = {"by_call": [turns.by_call(1)], "by_hand": [turns.by_hand(2)]}
    seen["by_call"].append(turns.by_call(3))
    for each in (*seen["by_call"], *seen["by_hand"]):
        assert list(each["parts"]) == PARTS
        assert each["wrong"] == []
        assert all(part["seconds"] >= 0 and part["peak_gb"] == 0 for part in each["parts"].values())
    call = ["sleep 2", "wait", "prepare", "weights", "apply", "kv_cache"]
    hand = ["sleep 2", "refuse", "weights", "load", "kv_cache"]
    assert engine.asked == [*call, *hand, *call]
    engine.forgets = "model.norm.weight"
    assert turns.by_call(4)["wrong"] == ["model.norm.weight"]


def test_a_turn_is_printed_with_its_sum_its_peak_and_what_went_wrong() -> None:
    parts: Mapping[str, Any] = {
        name: {"seconds": 0.1 * (at + 1), "peak_gb": 8.0 + (at == 4)} for at, name in enumerate(PARTS)
    }
    good, wrong = {"parts": parts, "wrong": []}, {"parts": parts, "wrong": ["norm"]}
    assert summed(good) == (pytest.approx(1.5), 9.0)
    found = list(lines({"by_call": [good], "by_hand": [wrong, {"failed": "no card"}]}))
    assert found[0].startswith("colocated, by_call: 1.500 s, at most 9.00 GB: push 0.100 s 8.00 GB, ")
    assert found[1].endswith("wake_cache 0.500 s 9.00 GB, WRONG ['norm']")
    assert found[2] == "colocated, by_hand: FAILED no card"
