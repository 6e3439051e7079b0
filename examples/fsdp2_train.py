"""FSDP2 trainer that makes a version of every tenth step and, after a crash, goes on from the newest one on any number
of ranks.

    weighbridge serve &
    torchrun --nproc-per-node 2 examples/fsdp2_train.py acme/fsdp2 30

Each rank pushes the shards that it holds: weights for engines, and a training state with the optimizer.
"""

from __future__ import annotations

import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from weighbridge import CheckpointManager, TrainerClient

CONFIG = LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2)


def main(name: str, last_step: int) -> None:
    """Train up to a step."""
    dist.init_process_group()
    model = LlamaForCausalLM(CONFIG).to("cuda" if torch.cuda.is_available() else "cpu")
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with TrainerClient() as trainer, tempfile.TemporaryDirectory() as hf_dir:
        CONFIG.save_pretrained(hf_dir)
        trainer.register_model(name, hf_dir, dtype="fp32")  # no weights; repeating it is harmless
        checkpoints = CheckpointManager(trainer, name, model, optimizer)
        version = checkpoints.restore()  # None where nothing was saved yet
        for step in range(version.step + 1 if version else 1, last_step + 1):
            tokens = torch.randint(0, 128, (2, 16), device=model.device)
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 0:
                checkpoints.save(step)  # returns once this rank's shards are copied out
        checkpoints.wait()  # until the newest version is in the store
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
