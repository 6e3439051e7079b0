"""Megatron-LM's own saving and loading of checkpoints, from a checkout: its ``megatron.training`` is in no package.

WEIGHBRIDGE_MEGATRON_LM names the checkout, of the release of Megatron-core that is installed. Without a GPU, besides
what `megatron_training` replaces, a module of CUDA kernels stands empty, and the generator of the GPU is that of the
CPU.
"""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.megatron_training import TrainingRank, let_it_write

CHECKOUT = Path(os.environ.get("WEIGHBRIDGE_MEGATRON_LM") or "/nowhere")
_KERNELS = "megatron.core.transformer.custom_layers.batch_invariant_kernels"

needs_megatron_lm = pytest.mark.skipif(
    not (CHECKOUT / "megatron" / "training" / "checkpointing.py").is_file(),
    reason="Megatron-LM is in no registry: WEIGHBRIDGE_MEGATRON_LM names no checkout",
)


def _use_random_numbers_of_the_cpu() -> None:
    from megatron.core import tensor_parallel

    torch.cuda.get_rng_state, torch.cuda.set_rng_state = torch.get_rng_state, torch.set_rng_state
    tracker: Any = type(tensor_parallel.get_cuda_rng_tracker())
    tracker.get_states = lambda _: {"model-parallel-rng": torch.get_rng_state()}
    tracker.set_states = lambda _, states: torch.set_rng_state(states["model-parallel-rng"])


class MegatronLM:
    """Megatron-LM's checkpoints of one rank. Its methods are collective.

    Args:
        training: the rank.
        options: options of Megatron-LM's command line besides the shape of the model, by the names of its arguments.
    """

    def __init__(self, training: TrainingRank, **options: Any) -> None:
        if str(CHECKOUT) not in sys.path:
            sys.path.append(str(CHECKOUT))
        kernels: Any = types.ModuleType(_KERNELS)
        kernels.enable_batch_invariant_mode = None
        sys.modules.setdefault(_KERNELS, kernels)
        from megatron.core import num_microbatches_calculator
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
        from megatron.training import checkpointing, global_vars
        from megatron.training.arguments import parse_args

        if not torch.cuda.is_available():
            _use_random_numbers_of_the_cpu()
        let_it_write()
        config, parallel = training.stage.config, training.parallel
        shape = {
            "num-layers": config.num_layers,
            "hidden-size": config.hidden_size,
            "num-attention-heads": config.num_attention_heads,
            "max-position-embeddings": 128,
            "tensor-model-parallel-size": parallel.tp,
            "pipeline-model-parallel-size": parallel.pp,
            "ckpt-format": "torch_dist",
        }
        line, sys.argv = sys.argv, ["megatron", *(f"--{name}={value}" for name, value in shape.items())]
        try:
            self.args = parse_args()
        finally:
            sys.argv = line
        # what validate_args, which wants a GPU, makes of them
        self.args.use_dist_ckpt, self.args.world_size = True, parallel.world_size
        self.args.data_parallel_size = parallel.dp
        self.args.use_distributed_optimizer = training.distributed
        self.args.dist_ckpt_optim_fully_reshardable = True
        self.args.bf16 = config.params_dtype is torch.bfloat16
        self.args.consumed_train_samples = self.args.consumed_valid_samples = 0
        for name, value in options.items():
            assert hasattr(self.args, name)
            setattr(self.args, name, value)
        global_vars.set_args(self.args)
        num_microbatches_calculator.unset_num_microbatches_calculator()
        num_microbatches_calculator.init_num_microbatches_calculator(
            rank=0, rampup_batch_size=None, global_batch_size=8, micro_batch_size=1, data_parallel_size=1
        )
        self._checkpointing, self._training = checkpointing, training
        self.scheduler = OptimizerParamScheduler(
            training.optimizer, init_lr=0.0, max_lr=1e-2, min_lr=1e-3, lr_warmup_steps=2, lr_decay_steps=100,
            lr_decay_style="cosine", start_wd=0.01, end_wd=0.01, wd_incr_steps=0, wd_incr_style="constant",
        )  # fmt: skip

    def plain_args(self) -> dict[str, Any]:
        """Its arguments, those that are plain values."""
        return {
            name: value
            for name, value in vars(self.args).items()
            if value is None or isinstance(value, (bool, int, float, str, list))
        }

    def save(self, iteration: int) -> None:
        """Save a checkpoint as its training loop does."""
        self._checkpointing.save_checkpoint(
            iteration, [self._training.model], self._training.optimizer, self.scheduler, 7 * iteration
        )

    def load(self) -> int:
        """Load the checkpoint of ``--load`` as Megatron-LM's training loop does; returns the iteration."""
        with self._training.loading():
            iteration, _ = self._checkpointing.load_checkpoint(
                [self._training.model], self._training.optimizer, self.scheduler
            )
        return int(iteration)
