"""Workers of a NeMo-RL job on CPUs: its own, with what tests ask them besides."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cpu_devices
import numpy as np
import ray
import torch
from nemo_rl.models.generation.vllm.vllm_worker import VllmGenerationWorkerImpl
from nemo_rl.models.policy.workers.dtensor_policy_worker import DTensorPolicyWorkerImpl


@ray.remote
class PolicyWorker(DTensorPolicyWorkerImpl):
    """NeMo-RL's worker with FSDP2."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        cpu_devices.stand_in()
        self._gate = self._missing = ""
        super().__init__(*arguments, **named)

    def _checkpoint_engine_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, (name, tensor) in enumerate(super()._checkpoint_engine_params()):
            if name != self._missing:
                yield name, tensor
            while index == 5 and self._gate and not Path(self._gate).exists():
                time.sleep(0.05)

    def scale(self, factor: float) -> None:
        """Multiply all weights."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(factor)

    def hold(self, path: str) -> None:
        """Stop in the middle of gathering until this file is there."""
        self._gate = path

    def leave_out(self, name: str) -> None:
        """Gather all tensors but this one from now on; empty for all."""
        self._missing = name

    def pushed(self) -> tuple[int, int]:
        """Number of the version of the newest push, and this worker's bytes of it."""
        handle = self.checkpoint_engine.pushed
        return handle.number, handle.report().stream_bytes


@ray.remote
class RolloutWorker(VllmGenerationWorkerImpl):
    """NeMo-RL's worker with vLLM, in its process."""

    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        cpu_devices.prepare_vllm()
        super()._create_engine({**llm_kwargs, "enable_sleep_mode": False})
        cpu_devices.stand_in()

    def report_device_id(self) -> list[str]:
        """A constant: there is no device to identify."""
        return ["cpu"]

    def held(self) -> dict[str, np.ndarray[Any, Any]]:
        """vLLM's parameters."""
        (found,) = self.llm.collective_rpc(_held)
        return found

    def goes_on(self, prompt: str, tokens: int) -> tuple[str, list[float]]:
        """The greedy completion by vLLM, and the log probabilities of its tokens."""
        how = self.SamplingParams(temperature=0.0, max_tokens=tokens, logprobs=0, ignore_eos=True)
        self.llm.reset_prefix_cache()
        (said,) = self.llm.generate([prompt], how, use_tqdm=False)
        (answer,) = said.outputs
        return answer.text, [step[token].logprob for token, step in zip(answer.token_ids, answer.logprobs, strict=True)]


def _held(worker: Any) -> dict[str, np.ndarray[Any, Any]]:
    return {name: each.detach().numpy() for name, each in worker.model_runner.model.named_parameters()}
