"""Stand-in engine that answers golden prompts over HTTP, in the forms of vLLM and of SGLang, with what transformers
computes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from tests.support.json_servers import Answer, json_server
from weighbridge.follow.engines import Prepared, Serving
from weighbridge.follow.status import Status
from weighbridge.follow.vllm import VllmServer


def logprobs_of(model: PreTrainedModel, tokens: list[int]) -> list[float]:
    """Log probability of each token after the first, by the model's own loss: transformers shifts labels itself."""
    found = []
    for at in range(1, len(tokens)):
        ids = torch.tensor([tokens[: at + 1]])
        labels = torch.full_like(ids, -100)
        labels[0, -1] = tokens[at]
        with torch.no_grad():
            found.append(-model(input_ids=ids, labels=labels).loss.item())
    return found


@dataclass
class StandIn:
    """Engine whose weights and cached prefixes are given.

    Attributes:
        model: model that answers.
        cached: model that has computed the cached prefixes; the model itself if None.
        asleep: whether it sleeps.
        paused: whether it is paused.
        key: key that requests must carry.
        served: label of the version that its one worker says it serves; None for a vLLM without weighbridge.
        asked: paths of requests, with their bodies.
    """

    model: PreTrainedModel
    cached: PreTrainedModel | None = None
    asleep: bool = False
    paused: bool = False
    key: str = ""
    served: str | None = None
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    @contextmanager
    def serving(self) -> Iterator[str]:
        with json_server(self._answer, key=lambda: self.key) as url:
            yield url

    def _answer(self, path: str, body: dict[str, Any]) -> Answer:
        self.asked.append((path, body))
        if path == "/is_sleeping":
            return 200, {"is_sleeping": self.asleep}
        if path == "/is_paused":
            return 200, {"is_paused": self.paused}
        if path == "/v1/completions":
            assert not self.asleep
            assert not self.paused
            return 200, {"choices": [self._vllm(body)]}
        if path == "/collective_rpc" and self.served is not None:
            place = {"engine": 0, "rank": 0, "ranks": 1, "engines": 1, "group": 1}
            return 200, {"results": [{**Status(served=self.served).to_json(), **place, "failed": ""}]}
        if path == "/weights_checker" and self.asleep:  # as the plug-in in SGLang says it
            return 200, {"success": True, "message": json.dumps({"ranks": [], "asleep": ["kv_cache"]})}
        if path == "/generate":
            assert not self.asleep
            return 200, {"meta_info": self._sglang(body)}
        return 404, {"detail": "Not Found"}

    def _last(self, tokens: list[int], last: int) -> float:
        return logprobs_of(self.cached or self.model, [*tokens, last])[-1]

    def _vllm(self, body: dict[str, Any]) -> dict[str, Any]:
        assert (body["max_tokens"], body["temperature"]) == (1, 0)
        tokens = body["prompt"]
        if "prompt_logprobs" in body:  # vLLM reads no cached prefix for it
            found = zip(tokens[1:], logprobs_of(self.model, tokens), strict=True)
            return {
                "logprobs": None,
                "prompt_logprobs": [None, *({str(token): {"logprob": each}} for token, each in found)],
            }
        [allowed] = body["allowed_token_ids"]
        assert body["logprobs"] == 0
        return {"logprobs": {"token_logprobs": [self._last(tokens, allowed)]}, "prompt_logprobs": None}

    def _sglang(self, body: dict[str, Any]) -> dict[str, Any]:
        assert body["return_logprob"]
        assert body["sampling_params"]["max_new_tokens"] == 1
        tokens = body["input_ids"]
        if body.get("logprob_start_len") == 0:
            found = zip([None, *logprobs_of(self.model, tokens)], tokens, strict=True)
            return {"input_token_logprobs": [[each, token, None] for each, token in found]}
        [wanted] = body["token_ids_logprob"]
        return {"output_token_ids_logprobs": [[[self._last(tokens, wanted), wanted, None]]]}


class Vllm(VllmServer):
    """Driver of a stand-in that takes versions by a call, and is asked prompts as a vLLM is.

    Args:
        url: URL of the stand-in.
        model: ``namespace/name``.
        change: called with the number of a version that the engine is to have.
    """

    def __init__(self, url: str, model: str, change: Any = lambda number: None) -> None:
        super().__init__(url, model, "service:1")
        self._name, self._change = model, change
        self.has: int | None = None
        self.waiting: int | None = None
        self.applied: list[int] = []
        self.brought = 0

    def connect(self) -> None: ...

    def serving(self) -> Serving:
        return Serving(self.has, model=self._name, waiting=self.waiting, brought=self.brought)

    def prepare(self, version: int) -> Prepared:
        return Prepared(1, 0.0)

    def prepare_early(self, version: int) -> None: ...

    def discard(self) -> None: ...

    def pause(self) -> None: ...

    def apply(self, version: int, label: str) -> None:
        self.has = version
        self.applied.append(version)
        self._change(version)

    def resume(self) -> None: ...

    def label(self, label: str) -> None: ...
