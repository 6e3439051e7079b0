"""Models made on the spot for measuring: their size is chosen, their weights are random bits of finite numbers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weighbridge._core import dtypes
from weighbridge._core.layouts import Layout, TensorSpec

KEY_VALUE_HEADS = 8
"""As many as the ranks that a model can be cut for."""
_POOL_BYTES = 1 << 30
_ALIGNMENT = 64
_PAGE = 4096
_LEAST_LAYERS = 8


def config_of(gigabytes: float) -> dict[str, object]:
    """A llama config with about this many GB of bf16 weights, of a real model's proportions."""
    parameters = gigabytes * 1e9 / 2
    hidden = 8192
    while hidden > 128 and _outside(hidden) + _LEAST_LAYERS * _layer(hidden) > parameters:
        hidden //= 2
    head = _head_size(hidden)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": hidden * 7 // 2,
        "num_hidden_layers": max(1, round((parameters - _outside(hidden)) / _layer(hidden))),
        "num_attention_heads": hidden // head,
        "num_key_value_heads": KEY_VALUE_HEADS,
        "head_dim": head,
        "vocab_size": _vocabulary(hidden),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def _head_size(hidden: int) -> int:
    return min(128, hidden // 16)


def _vocabulary(hidden: int) -> int:
    return 32_000 if hidden >= 1024 else hidden * 8


def _outside(hidden: int) -> int:
    return 2 * _vocabulary(hidden) * hidden


def _layer(hidden: int) -> int:
    return hidden * (2 * hidden + 2 * KEY_VALUE_HEADS * _head_size(hidden) + 3 * (hidden * 7 // 2))


def write_config(config: dict[str, object], folder: Path) -> bytes:
    """Write the model's folder, without weights; returns the content of ``config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config).encode()
    (folder / "config.json").write_bytes(text)
    return text


def hugging_face_specs(config_json: bytes) -> list[TensorSpec]:
    """The model's tensors in Hugging Face's space, in bf16."""
    from weighbridge_service.models.bridges import bridge_for
    from weighbridge_service.models.model_tensors import ModelTensors

    return list(ModelTensors(dtypes.parse("bf16")).specs(bridge_for(config_json)).values())


def write_specs(specs: Iterable[TensorSpec], path: Path) -> None:
    """Write tensors down for processes that need not import what finds them out."""
    path.write_text(json.dumps([[spec.name, spec.dtype.name, spec.shape] for spec in specs]))


def write_model(gigabytes: float, folder: Path) -> None:
    """Write the folder of a model of about this size, without weights: ``config.json``, and ``specs.json`` as
    `write_specs` does.
    """
    write_specs(hugging_face_specs(write_config(config_of(gigabytes), folder)), folder / "specs.json")


def read_specs(path: Path) -> list[TensorSpec]:
    """Specs of tensors from a file of `write_specs`."""
    return [TensorSpec(name, dtypes.parse(dtype), tuple(shape)) for name, dtype, shape in json.loads(path.read_text())]


_FINITE = 0xBFBF_BFBF_BFBF_BFBF
"""Mask that clears the highest bit of each exponent, so that no number of any dtype is NaN or infinite: versions with
such elements are held.
"""


class RandomBits:
    """Tensors of random bits that are finite numbers, cut out of one buffer that is smaller than all of them together.

    So a model of any size costs at most 1 GiB, or its largest tensor, and reading it still goes to memory: the buffer
    is larger than any cache. Each tensor has a storage of its own, as trainers' parameters have.

    Args:
        sizes: bytes of the tensors to be made.
        seed: seed of the bits.
        device: device of the tensors; on a GPU they share one storage.
    """

    def __init__(self, sizes: Iterable[int], seed: int = 0, device: str = "cpu") -> None:
        all_sizes = list(sizes)
        room = max(min(sum(all_sizes), _POOL_BYTES), max(all_sizes, default=0)) + 2 * _PAGE
        words = np.random.default_rng(seed).integers(0, 2**64, room // 8 + 1, np.uint64)
        words &= np.uint64(_FINITE)
        self._pool: NDArray[np.uint8] = words.view(np.uint8)
        self._on_device = None if device == "cpu" else torch.from_numpy(self._pool).to(device)

    def tensors(self, shapes: Sequence[tuple[torch.dtype, tuple[int, ...]]], generation: int = 0) -> list[Tensor]:
        """Tensors of these dtypes and shapes; each generation has other bits in each of them."""
        made = []
        position = generation * _PAGE
        for dtype, shape in shapes:
            count = int(np.prod(shape, dtype=np.int64))
            nbytes = count * dtype.itemsize
            offset = position % (len(self._pool) - nbytes) // _ALIGNMENT * _ALIGNMENT
            if self._on_device is not None:
                made.append(self._on_device[offset : offset + nbytes].view(dtype).reshape(shape))
            else:
                pool = self._pool
                made.append(torch.frombuffer(pool, dtype=dtype, count=count, offset=offset).reshape(shape))
            position += nbytes
        return made

    def of_specs(self, specs: Iterable[TensorSpec], generation: int = 0) -> dict[str, Tensor]:
        """Whole tensors, by name."""
        listed = list(specs)
        made = self.tensors([(spec.dtype.torch, spec.shape) for spec in listed], generation)
        return {spec.name: tensor for spec, tensor in zip(listed, made, strict=True)}

    def of_layout(self, layout: Layout, generation: int = 0) -> list[Tensor]:
        """The shards of a layout, in its order."""
        return self.tensors(shapes_of(layout), generation)


def shapes_of(layout: Layout) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of each shard of a layout, in its order."""
    return [(layout.tensors[p.shard.tensor].dtype.torch, tuple(p.shard.box.extent)) for p in layout.placements]
