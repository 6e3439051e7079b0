"""Megatron-core trainer that pushes its sharded state dict after a step; each rank sends only what it holds.

    weighbridge serve &
    torchrun --nproc-per-node 2 examples/megatron_push.py acme/megatron

The model is tensor-parallel over all ranks. It runs on CPUs with the demonstration's helpers (`pip install '.[demo]'`).
A trainer of yours has its model and its step already: what it adds is `register_model` and `push`.
"""

from __future__ import annotations

import sys
import tempfile

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from transformers import LlamaConfig

from weighbridge import TrainerClient
from weighbridge_demo.megatron_cpu import Parallel, build_model, patch_for_cpu, train_step

CONFIG = LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2)


def main(name: str) -> None:
    """Train one step, and push the weights."""
    patch_for_cpu()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    parallel = Parallel(tp=size)
    parallel_state.initialize_model_parallel(parallel.tp, create_gloo_process_groups=False)
    torch.manual_seed(0)
    model = build_model(CONFIG, parallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 128, (2, 17))
    train_step(model, optimizer, tokens[:, :-1], tokens[:, 1:], parallel)
    with TrainerClient() as trainer, tempfile.TemporaryDirectory() as hf_dir:
        CONFIG.save_pretrained(hf_dir)
        trainer.register_model(name, hf_dir, dtype="fp32")
        handle = trainer.push(name, model.sharded_state_dict(), step=1, rank=rank, world_size=size)
        version = handle.wait()  # until it is in the store, in Hugging Face's names and files
    if rank == 0:
        print(f"{name}@{version.number} is in the store")
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
