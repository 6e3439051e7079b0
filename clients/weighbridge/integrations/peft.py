"""Weights of a model that peft has given adapters, for pushes of whole tensors. `TrainerClient.push_state_dict` takes the model itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from weighbridge._formats.peft_models import merged_entries

if TYPE_CHECKING:
    import torch


def merged_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a model whose adapters are merged (``model.merge_adapter()``), by the names that they have without adapters.

    Args:
        model: what ``peft.get_peft_model`` has made, or a module around it.

    Yields:
        Names and tensors of its state dict, which alias the model's own; DTensors as they are.

    Raises:
        LayoutError: active adapters are not merged; names the layers.
    """
    return merged_entries(model, model.state_dict().items())
