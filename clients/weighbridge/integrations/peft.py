"""Weights of a model that peft has given adapters, for pushes of whole tensors.

`TrainerClient.push_state_dict` takes the model itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from weighbridge._formats.peft_models import merged_entries

if TYPE_CHECKING:
    import torch


def merged_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a model with its active adapters merged, by the names that they have without adapters.

    The model is not changed.

    Adapters that are not already merged in place (``model.merge_adapter()``) are merged into copies, one layer at a
    time.

    Args:
        model: a model that ``peft.get_peft_model`` returned, or a module that wraps it.

    Yields:
        Names and tensors of its state dict. Tensors that needed no merge alias the model's own. DTensors are yielded
        unchanged; all their ranks must iterate in step.

    Raises:
        LayoutError: peft cannot merge an adapter, or active adapters are merged in part; names the layers.
    """
    return merged_entries(model, model.state_dict().items())
