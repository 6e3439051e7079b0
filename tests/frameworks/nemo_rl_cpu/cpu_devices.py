"""Patches that let NeMo-RL's workers run on CPUs: a device that reports its memory, gloo, and a vLLM that does not
repack its weights.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed
import torch.distributed.device_mesh

MEMORY_BYTES = 2 << 30
"""Of each device; buckets are a part of it."""

_init_process_group = torch.distributed.init_process_group
_init_device_mesh = torch.distributed.device_mesh.init_device_mesh


def stand_in() -> None:
    """Let this process take its CPU for a GPU."""
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(total_memory=MEMORY_BYTES)  # type: ignore[assignment, return-value]
    torch.cuda.current_stream = lambda *_: SimpleNamespace(synchronize=lambda: None)  # type: ignore[assignment, return-value]
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: 0  # type: ignore[assignment]
    torch.distributed.init_process_group = _on_gloo
    torch.distributed.device_mesh.init_device_mesh = _of_cpus


def prepare_vllm() -> None:
    """Have vLLM compute by torch, since its kernels for CPUs pack weights once, and NeMo-RL loads new ones into the
    parameters; and have its workers be as those of 0.25, for which NeMo-RL's extension is written, which has a method
    of a name that newer ones took.
    """
    from vllm.model_executor.layers import utils
    from vllm.v1.worker.worker_base import WorkerBase

    def by_torch(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = by_torch
    del WorkerBase.synchronize_device


def _on_gloo(backend: str | None = None, **arguments: Any) -> None:
    _init_process_group("gloo", **arguments)


def _of_cpus(device_type: str, *arguments: Any, **named: Any) -> Any:
    return _init_device_mesh("cpu", *arguments, **named)
