"""Partitioned parameters as DeepSpeed's ZeRO-3 makes them, where DeepSpeed itself is not installed."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch


class Status(Enum):
    """Names as those of DeepSpeed's ``ZeroParamStatus``."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2


def partition(parameter: Any, rank: int, ranks: int, *, persistent: bool = False) -> None:
    """Partition a parameter: the rank keeps its range, padded with numbers of no parameter, and the whole parameter too
    if it is persistent.
    """
    whole = parameter.detach().clone()
    size = -(-whole.numel() // ranks)
    padded = torch.cat([whole.reshape(-1), torch.full((size * ranks - whole.numel(),), -77.0, dtype=whole.dtype)])
    parameter.ds_id, parameter.ds_shape, parameter.ds_numel = 0, whole.shape, whole.numel()
    parameter.ds_tensor = padded[rank * size : (rank + 1) * size].clone()
    parameter.ds_tensor.ds_numel = size
    parameter.ds_tensor.status = Status.AVAILABLE
    parameter.ds_zero_partition_rank, parameter.ds_zero_partition_world_size = rank, ranks
    parameter.ds_status = Status.AVAILABLE if persistent else Status.NOT_AVAILABLE
    parameter.data = whole if persistent else torch.empty(0, dtype=whole.dtype)


def gathered(parameters: list[Any]) -> torch.Tensor:
    """The parameter of which these are all ranks' ranges."""
    flat = torch.cat([parameter.ds_tensor for parameter in parameters])
    found: torch.Tensor = flat[: parameters[0].ds_numel].view(parameters[0].ds_shape)
    return found
