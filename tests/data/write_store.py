"""Writer of `store.tar.xz`: a small store as a service writes it, ``python -m tests.data.write_store TARGET.tar.xz``.

``acme/smol`` has the versions 1 (deleted, its tombstone is there), 2 (tagged prod), 3 (with an infinity in it), 5 and 6
(latest); 4 was aborted, 7 is open. Each has two files of weights. ``acme/other`` has one version.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import tarfile
import tempfile
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from tests.support.raw_clients import RawClient
from tests.support.services import RunningService
from weighbridge._clients.client import Client
from weighbridge._formats.safetensors_files import lay_out_files
from weighbridge._trainers.trainer import TrainerClient
from weighbridge_service.models import registered_model

CONFIG = LlamaConfig(
    num_hidden_layers=1, hidden_size=8, num_attention_heads=2, num_key_value_heads=1, intermediate_size=16,
    vocab_size=16, max_position_embeddings=16, tie_word_embeddings=False, torch_dtype="bfloat16",
    bos_token_id=None, eos_token_id=None,
)  # fmt: skip


def folder(place: Path, seed: int, *, infinite: bool = False) -> Path:
    """A Hugging Face folder of a model whose weights compress well."""
    from transformers import LlamaForCausalLM

    place.mkdir()
    CONFIG.save_pretrained(place)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in LlamaForCausalLM(CONFIG).state_dict().items()}
    tensors = {
        name: ((torch.arange(shape.numel()) * 7 + i + seed) % 5 - 2).reshape(shape).bfloat16()
        for i, (name, shape) in enumerate(sorted(shapes.items()))
    }
    if infinite:
        tensors["model.embed_tokens.weight"][2, 3] = torch.inf
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    return place


def main() -> None:
    """Write it."""
    registered_model.lay_out_files = partial(lay_out_files, max_shard_bytes=1000)
    with tempfile.TemporaryDirectory() as name:
        temporary = Path(name)
        running = RunningService(temporary / "store")
        with TrainerClient(running.address) as trainer, Client(running.address) as client:
            for seed in range(1, 7):
                source = folder(temporary / str(seed), seed, infinite=seed == 3)
                if seed == 1:
                    trainer.register_model("acme/smol", source)
                    trainer.register_model("acme/other", source)
                    trainer.push_folder("acme/other", source, step=1).wait(timeout=60)
                if seed == 4:
                    with RawClient(running.address) as raw:
                        trainer.abort("acme/smol", raw.open("acme/smol", step=40))
                    continue
                trainer.push_folder("acme/smol", source, step=10 * seed, allow_nonfinite=seed == 3).wait(timeout=60)
            client.delete_version("acme/smol", 1)
            client.set_ref("acme/smol", "prod", 2)
            with RawClient(running.address) as raw:
                raw.open("acme/smol", step=70)
        models = temporary / "store/models"
        with tarfile.open(sys.argv[1], "w:xz") as tar:
            for path in sorted(each for each in models.rglob("*") if each.is_file()):
                content = path.read_bytes()
                info = tarfile.TarInfo(str(path.relative_to(temporary)))  # by itself: some files are linked to others
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        shutil.rmtree(temporary)
        os._exit(0)  # with version 7 open, which a service that drains would give up


if __name__ == "__main__":
    main()
