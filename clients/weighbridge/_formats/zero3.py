"""Parameters that DeepSpeed's ZeRO-3 has partitioned: a rank has a range of each parameter's elements, in row-major
order.

A range has ``ceil(elements / ranks)`` elements; the last ranges are padded, or consist only of padding. The elements of
a range form a few boxes, whose tensors are views of it. Source of the conventions:
``deepspeed.runtime.zero.partition_parameters`` of DeepSpeed 0.19.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from weighbridge._core.boxes import Box
from weighbridge._formats.flat_ranges import StridedView, parts_of_range
from weighbridge.errors import LayoutError

if TYPE_CHECKING:
    import torch


def is_partitioned(value: Any) -> bool:
    """Whether ZeRO-3 has partitioned this parameter."""
    return getattr(value, "ds_tensor", None) is not None and hasattr(value, "ds_shape")


def partition_shards(parameter: Any) -> list[tuple[Box, torch.Tensor]]:
    """The boxes that form this rank's range of a parameter, and for each a tensor of its extent that aliases the range.

    Raises:
        LayoutError: the range is quantised, or not in memory.
    """
    held = parameter.ds_tensor
    shape = tuple(parameter.ds_shape)
    if hasattr(held, "ds_quant_scale"):
        raise LayoutError("its partition is quantised; train without quantised weights")
    if getattr(getattr(held, "status", None), "name", "AVAILABLE") != "AVAILABLE":
        raise LayoutError("its partition is not in memory; do not offload parameters to NVMe")
    size = held.numel()
    parts = parts_of_range(partition_rank(parameter) * size, size, StridedView.dense(shape))
    return [(part.box, part.of(held.detach())) for part in parts]


def gathered_copy(parameter: Any) -> torch.Tensor | None:
    """The whole parameter, if a rank has it in addition to its range, as for small parameters between steps; otherwise
    None.
    """
    status = getattr(getattr(parameter, "ds_status", None), "name", "")
    whole: torch.Tensor = parameter.detach()
    return whole if status == "AVAILABLE" and tuple(whole.shape) == tuple(parameter.ds_shape) else None


def partitioned_state(module: torch.nn.Module) -> Mapping[str, Any] | None:
    """The state dict of a module with the parameter objects themselves, if ZeRO-3 has partitioned them; None
    otherwise.
    """
    if not any(is_partitioned(parameter) for parameter in module.parameters()):
        return None
    state: Mapping[str, Any] = module.state_dict(keep_vars=True)
    return state


def partition_rank(parameter: Any) -> int:
    """Index of this rank among those that share a parameter."""
    known = getattr(parameter, "ds_zero_partition_rank", None)
    if known is not None:
        return int(known)
    import torch.distributed as dist

    return dist.get_rank(parameter.ds_process_group)
