"""A TRL job on a CPU: a real ``AsyncGRPOTrainer``, with its own rollout worker beside a vLLM server.

Asked over a pipe what it is to do.

TRL trains on GPUs only, by a kernel of FlashAttention and by the name of the device; both are stood in for here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["VLLM_TARGET_DEVICE"] = "cpu"

import torch
from datasets import Dataset
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, packing

from tests.support.jobs import serve
from weighbridge.integrations.trl import WeighbridgeTransfer
from weighbridge_demo.vllm_server import START_SECONDS

TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
RESPONSE = {"defaults": {"role": "assistant"}, "fields": {"content": {"content": "text"}}}


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_ends: torch.Tensor,
    key_ends: torch.Tensor,
    *_longest: int,
    softmax_scale: float,
    **_options: Any,
) -> torch.Tensor:
    """FlashAttention's ``flash_attn_varlen_func``, causal: segments of tokens, of which each sees all keys of its own
    path.

    Args:
        query: ``[tokens, heads, head_dim]``.
        key, value: ``[keys, kv_heads, head_dim]``.
        query_ends, key_ends: where the segments lie in both, as cumulated lengths from 0.
    """
    found = []
    for segment in range(len(query_ends) - 1):
        mine = slice(*query_ends[segment : segment + 2].tolist())
        seen = slice(*key_ends[segment : segment + 2].tolist())
        q, k, v = (x.transpose(0, 1)[None] for x in (query[mine], key[seen], value[seen]))
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=softmax_scale, enable_gqa=True)
        found.append(out[0].transpose(0, 1))
    return torch.cat(found)


def reward(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """The number of different words in each completion."""
    return [float(len(set(each[0]["content"].split()))) for each in completions]


class HeldTrainer(AsyncGRPOTrainer):
    """TRL's, which can stop in the middle of gathering."""

    until = ""

    def _streaming_iter(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, each in enumerate(super()._streaming_iter()):
            yield each
            while index == 5 and self.until and not Path(self.until).exists():
                time.sleep(0.05)


class Trl:
    """One job; its methods are what it can be asked."""

    def start(self, folder: str, url: str, said: dict[str, Any], output: str) -> None:
        """A trainer as a user makes it."""
        torch.cuda.get_device_name = lambda *_: "CPU"
        packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attention)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template, tokenizer.response_template = TEMPLATE, RESPONSE
        tokenizer.pad_token = tokenizer.eos_token = "w0"
        self._transfer = WeighbridgeTransfer(urls=url, step=lambda: int(self._trainer.state.global_step), **said)
        self._trainer = HeldTrainer(
            model=folder,
            args=AsyncGRPOConfig(
                output,
                vllm_server_base_url=url,
                vllm_server_timeout=START_SECONDS,
                learning_rate=1e-2,
                per_device_train_batch_size=4,
                num_generations=4,
                max_completion_length=8,
                max_steps=2,
                report_to="none",
                save_strategy="no",
                gradient_checkpointing=False,
                bf16=False,
                use_cpu=True,
            ),
            train_dataset=Dataset.from_dict(
                {"prompt": [[{"role": "user", "content": f"w{word} w17 w99"}] for word in range(1, 33)]}
            ),
            processing_class=tokenizer,
            reward_funcs=reward,
            weight_transfer=self._transfer,
        )

    def train(self, result: str) -> list[dict[str, Any]]:
        """Train two steps on the server's completions, and save the trained weights; TRL's log."""
        self._trainer.train()
        self._trainer.model.save_pretrained(result)
        log: list[dict[str, Any]] = self._trainer.state.log_history
        return log

    def load(self, folder: str) -> None:
        """Take the weights of a folder."""
        found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._trainer.model.load_state_dict(found.state_dict())

    def hold(self, until: str) -> None:
        """Stop in the middle of gathering until this file is there; empty for no longer."""
        self._trainer.until = until

    def sync(self) -> int:
        """Synchronize the weights as TRL does after each step; the number of bytes that the server fetched."""
        self._trainer._sync_weight()
        return int(self._transfer.updated.nbytes)


if __name__ == "__main__":
    serve(Trl())
