"""Ranks that train by what verl makes of its settings on CPUs, save and load by verl's calls: its FSDP2 engine, and its
Megatron manager with a Megatron-core loop.

Run in verl's environment by `checkpoint_job`.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from verl.trainer.config import CheckpointConfig

EXTERNAL = "weighbridge.integrations.verl.checkpoints"
BEFORE, AFTER = 2, 3
_WHOLE = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)


class FsdpLoop:
    """verl's own FSDP2 engine, made by its registry and its settings, which name `EXTERNAL`."""

    def __init__(self, hf_dir: str, parallel: Any = None) -> None:
        del parallel
        from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
        from verl.workers.engine import EngineRegistry

        ranks = torch.distributed.get_world_size()
        self.engine = EngineRegistry.new(
            model_type="language_model",
            backend="fsdp2",
            model_config=HFModelConfig(
                path=hf_dir,
                load_tokenizer=False,
                use_remove_padding=False,
                override_config={"attn_implementation": "sdpa"},
                external_lib=EXTERNAL,
            ),
            engine_config=FSDPEngineConfig(strategy="fsdp2", fsdp_size=ranks, use_torch_compile=False),
            optimizer_config=FSDPOptimizerConfig(
                lr=1e-2, lr_scheduler_type="cosine", total_training_steps=20, lr_warmup_steps=4
            ),
            checkpoint_config=CheckpointConfig(),
        )
        self.engine.initialize()
        self.manager = self.engine.checkpoint_manager

    def step(self, number: int) -> float:
        """A step on a batch that all ranks share."""
        engine = self.engine
        tokens = torch.randint(0, 128, (2, 9), generator=torch.Generator().manual_seed(number))
        logits = engine.module(input_ids=tokens, use_cache=False).logits.float()
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        engine.optimizer.step()
        engine.lr_scheduler.step()
        engine.optimizer.zero_grad()
        return float(loss)

    def rates(self) -> list[float]:
        return [group["lr"] for group in self.engine.optimizer.param_groups]

    def whole(self) -> dict[str, torch.Tensor]:
        """Copies of all tensors, as torch gathers them."""
        module, optimizer = self.engine.module, self.engine.optimizer
        found = {
            **get_model_state_dict(module, options=_WHOLE),
            **get_optimizer_state_dict(module, optimizer, options=_WHOLE),
        }
        return {name: each.clone() for name, each in found.items() if isinstance(each, torch.Tensor)}

    def save(self, path: str, step: int) -> None:
        self.engine.save_checkpoint(path, global_step=step)

    def load(self, path: str) -> None:
        self.engine.load_checkpoint(path, del_local_after_load=False)


class MegatronLoop:
    """A Megatron-core loop with the manager that verl's Megatron engine would make, with the arguments that it
    gives.
    """

    def __init__(self, hf_dir: str, parallel: Any) -> None:
        import importlib

        from megatron.core import tensor_parallel
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
        from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
        from omegaconf import OmegaConf
        from transformers import AutoConfig

        from tests.support.megatron_training import TrainingRank

        importlib.import_module(EXTERNAL)
        from verl.workers.engine.megatron import transformer_impl

        config = AutoConfig.from_pretrained(hf_dir)
        # as transformers 4 has it
        config.rope_theta = config.rope_parameters["rope_theta"]
        config.rope_scaling = None
        self.rank = TrainingRank(config, parallel, distributed=True, dtype=torch.bfloat16)
        self.scheduler = OptimizerParamScheduler(
            self.rank.optimizer, init_lr=0.0, max_lr=1e-2, min_lr=1e-3, lr_warmup_steps=16, lr_decay_steps=80,
            lr_decay_style="cosine", start_wd=0.01, end_wd=0.1, wd_incr_steps=80, wd_incr_style="linear",
        )  # fmt: skip
        # verl loads no checkpoint without its states, and there are none without CUDA
        tracker = CudaRNGStatesTracker()
        tracker.fork = lambda *_: contextlib.nullcontext()
        tracker.set_states({"model-parallel-rng": torch.get_rng_state()})
        tensor_parallel.get_cuda_rng_tracker = lambda: tracker
        reshardable = {
            "dist_ckpt_optim_fully_reshardable": True,
            "distrib_optim_fully_reshardable_mem_efficient": False,
        }
        self.manager = transformer_impl.MegatronCheckpointManager(
            config=OmegaConf.create({"model": {"path": hf_dir}, "megatron": reshardable}),
            checkpoint_config=CheckpointConfig(async_save=True),
            model_config=config,
            transformer_config=self.rank.stage.config,
            role="actor",
            model=torch.nn.ModuleList([self.rank.model]),
            arch=config.architectures[0],
            hf_config=config,
            param_dtype=torch.bfloat16,
            share_embeddings_and_output_weights=False,
            processing_class=None,
            optimizer=self.rank.optimizer,
            optimizer_scheduler=self.scheduler,
            use_distributed_optimizer=True,
            use_checkpoint_opt_param_scheduler=True,
            use_dist_checkpointing=True,
        )

    def step(self, number: int) -> float | None:
        """A step on the batch of this number."""
        loss = self.rank.step(number)
        self.scheduler.step(8)
        return loss

    def rates(self) -> list[float]:
        return [group["lr"] for group in self.rank.optimizer.param_groups]

    def whole(self) -> Any:
        """The state of this rank that Megatron would save."""
        return self.rank.own_state()

    def save(self, path: str, step: int) -> None:
        self.manager.save_checkpoint(local_path=path, hdfs_path=None, global_step=step, max_ckpt_to_keep=1)

    def load(self, path: str) -> None:
        self.manager.load_checkpoint(local_path=path, hdfs_path=None, del_local_after_load=False)


LOOPS: Mapping[str, Any] = {"fsdp2": FsdpLoop, "megatron": MegatronLoop}


def train(rank: int, kind: str, hf_dir: str, folder: str, parallel: Any) -> None:
    """Train, save, go on, and be killed; the rank's observations are written to the folder."""
    loop = LOOPS[kind](hf_dir, parallel)
    _seed(rank)
    for number in range(BEFORE):
        loop.step(number)
    whole = loop.whole()
    loop.save(f"{folder}/global_step_{BEFORE}/actor", BEFORE)
    if kind == "fsdp2":
        loop.save(f"{folder}/global_step_{BEFORE}/critic", BEFORE)
    torch.save((type(loop.manager).__name__, whole, _after(loop)), Path(folder, f"saved-{rank}"))
    torch.distributed.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def resume(rank: int, kind: str, hf_dir: str, folder: str, parallel: Any) -> tuple[Any, Any]:
    """Load what was saved, and go on."""
    loop = LOOPS[kind](hf_dir, parallel)
    _seed(100 + rank)
    loop.load(f"{folder}/global_step_{BEFORE}/actor")
    return loop.whole(), _after(loop)


def _seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def _after(loop: Any) -> tuple[list[float | None], list[float], list[float]]:
    """Losses, random numbers and learning rates of the steps that follow."""
    losses = [loop.step(number) for number in range(BEFORE, BEFORE + AFTER)]
    return losses, [random.random(), float(np.random.rand()), float(torch.rand(1))], loop.rates()
