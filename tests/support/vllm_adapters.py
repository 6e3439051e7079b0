"""A service with a base and adapters on it, vLLM servers that serve them, and what the merged models of transformers
and peft say in their place.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.support.services import RunningService, running_service
from tests.support.vllm_environment import PYTHON, environment
from tests.support.word_models import LONG_PROMPT, PROMPT, TOKENS, make_folder
from weighbridge import EngineClient, TrainerClient
from weighbridge_demo.vllm_server import EAGER, VllmServer

BASE = "acme/smol"
MIDDLEWARE = "weighbridge.integrations.vllm_adapters.middleware.Adapters"
MODULES = ("q_proj", "v_proj", "down_proj")
PROMPTS = (PROMPT, LONG_PROMPT)
_MARGIN = 0.02
"""Least lead of a logit, far above what the order of sums changes in float32."""
_ASK_SECONDS = 300


@dataclass(frozen=True)
class Refused:
    """An answer that is an error.

    Attributes:
        status: HTTP status; 0 if no answer came.
        text: the message.
    """

    status: int
    text: str


@dataclass(frozen=True)
class Said:
    """An answer.

    Attributes:
        model: the version that it names.
        text: text of the new tokens.
        logprobs: log-probability of each of them, if the request asked for it.
    """

    model: str
    text: str
    logprobs: tuple[float, ...] = ()


@dataclass
class Adapters:
    """A service, and what each version of each model in it says.

    Attributes:
        said: completions by the merged model, by version of the adapter or of the base and by prompt.
        bases: folders of the base, by version.
    """

    running: RunningService
    trainer: TrainerClient
    client: EngineClient
    folder: Path
    said: dict[tuple[str, str], str] = field(default_factory=dict)
    bases: dict[int, Path] = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=dict)

    def push_base(self, seed: int) -> int:
        """A version of the base."""
        folder = self.folder / f"base-{seed}"
        model = make_folder(folder, seed)
        number = self.trainer.push_folder(BASE, folder, step=seed).wait("durable", timeout=120).number
        self.bases[number] = folder
        self._note(f"{BASE}@{number}", {each: goes_on(model, each)[0] for each in PROMPTS})
        return number

    def push(
        self,
        name: str,
        seed: int,
        base: int = 1,
        before: Callable[[int], object] = lambda _number: None,
        **options: Any,
    ) -> str:
        """A version of an adapter that goes on with the prompts in a way that no rounding changes.

        Args:
            name: name of the adapter.
            seed: seed of its weights.
            base: version of the base.
            before: called with the number that it gets, before any ref names it.
            options: options of the adapter's config.
        """
        texts, margin = dict[str, str](), 0.0
        while margin < _MARGIN:
            model = adapted(self.bases[base], seed, **options)
            merged = adapted(self.bases[base], seed, **options).merge_and_unload()
            found = {each: goes_on(merged, each) for each in PROMPTS}
            texts, margin = (
                {each: text for each, (text, _) in found.items()},
                min(m for _, m in found.values()),
            )
            seed += 1_000_003
        number = self._numbers.get(name, 0) + 1
        self._numbers[name] = number
        before(number)
        pushed = self.trainer.push_adapter(name, model, base=f"{BASE}@{base}", step=number)
        assert pushed.wait("durable", timeout=120).number == number
        self._note(f"{name}@{number}", texts)
        return f"{name}@{number}"

    def _note(self, version: str, texts: Mapping[str, str]) -> None:
        self.said.update({(version, prompt): text for prompt, text in texts.items()})


def adapted(base: Path, seed: int, **options: Any) -> Any:
    """A base with a random adapter."""
    torch.manual_seed(seed)
    said = {"r": 4, "lora_alpha": 16, "target_modules": list(MODULES), "init_lora_weights": False, **options}
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), LoraConfig(**said))
    with torch.no_grad():
        for name, each in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(each, std=0.1)
    return model


def goes_on(model: Any, prompt: str) -> tuple[str, float]:
    """Greedy completion of a prompt, and the smallest lead of a chosen token's logit over the next best one."""
    asked = torch.tensor([[int(word[1:]) for word in prompt.split()]])
    with torch.no_grad():
        found = model.eval().generate(
            asked,
            attention_mask=torch.ones_like(asked),
            max_new_tokens=TOKENS,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        best = model(found).logits[0, asked.shape[1] - 1 : -1].topk(2).values
    text = " ".join(f"w{token}" for token in found[0, asked.shape[1] :].tolist())
    return text, float((best[:, 0] - best[:, 1]).min())


@contextmanager
def keeping(folder: Path) -> Iterator[Adapters]:
    """A service with one version of the base."""
    with (
        running_service(folder / "store") as running,
        TrainerClient(running.address) as trainer,
        EngineClient(running.address) as client,
    ):
        make_folder(folder / "base-1", 1)
        trainer.register_model(BASE, folder / "base-1")
        found = Adapters(running, trainer, client, folder)
        found.push_base(1)
        yield found


@contextmanager
def serving(
    there: Adapters,
    *arguments: str,
    settings: dict[str, Any] | None = None,
    server: str | None = None,
    from_folder: Path | None = None,
    name: str = "vllm",
) -> Iterator[VllmServer]:
    """A vLLM that serves adapters of ``acme/*``."""
    address = server or there.running.address
    said = {"patterns": ["acme/*"], "server": address, "retry_seconds": 1.0, "unknown_seconds": 1.0}
    with VllmServer(
        PYTHON, None if from_folder else address, str(from_folder or BASE), there.folder / f"{name}.log", *EAGER,
        "--enable-lora", "--max-lora-rank", "8", "--max-loras", "4", "--max-cpu-loras", "4",
        "--enable-prefix-caching", "--middleware", MIDDLEWARE, *arguments,
        extra={"retry_seconds": 2.0, "lane": "grpc"},
        environment={
            **environment(), "WEIGHBRIDGE_CACHE": str(there.folder / "cache"),
            "WEIGHBRIDGE_ADAPTERS": json.dumps({**said, **(settings or {})}),
        },
        module="tests.support.vllm_api_servers",
    ) as found:  # fmt: skip
        yield found


def engine_of(server: VllmServer) -> int:
    """The process of the core of a server's engine."""
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getsid(int(each.name)) == server.pid and b"EngineCore" in (each / "cmdline").read_bytes():
                return int(each.name)
    raise AssertionError("the server has no engine")


def ask(
    server: VllmServer,
    model: str,
    path: str = "/v1/completions",
    prompt: str | Sequence[int] = PROMPT,
    **more: Any,
) -> Said | Refused:
    """Greedy completion of a prompt, given as a text or as tokens, by a model of a server."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "skip_special_tokens": False,
        "ignore_eos": True, **more,
    }  # fmt: skip
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_ASK_SECONDS) as answer:
            if more.get("stream"):
                return _streamed(answer)
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        return Refused(error.code, error.read().decode())
    except OSError as error:  # the server ends
        return Refused(0, str(error))
    [choice] = found["choices"]
    logprobs = choice.get("logprobs") or {}
    return Said(found["model"], choice["text"].strip(), tuple(logprobs.get("token_logprobs", ())))


def _streamed(answer: Any) -> Said | Refused:
    model, text = "", ""
    for line in answer:
        data = line.decode().strip().removeprefix("data: ")
        if not data or data == "[DONE]":
            continue
        found = json.loads(data)
        if "error" in found:
            return Refused(int(found["error"]["code"]), json.dumps(found))
        model, text = found["model"], text + found["choices"][0]["text"]
    return Said(model, text.strip())
