"""Weights of a model that peft has given adapters, for pushes of whole tensors. `TrainerClient.push_state_dict` takes the model itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from weighbridge._formats.peft_models import merged_entries

if TYPE_CHECKING:
    import torch


def merged_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a model with its active adapters merged, by the names that they have without adapters. The model stays as it is.

    What is not merged in place (``model.merge_adapter()``) is merged into copies, those of one layer at a time.

    Args:
        model: what ``peft.get_peft_model`` has made, or a module around it.

    Yields:
        Names and tensors of its state dict, which alias the model's own where nothing had to be merged; DTensors as they are, whose ranks
        all take the same steps.

    Raises:
        LayoutError: peft cannot merge an adapter, or active adapters are merged in part; names the layers.
    """
    return merged_entries(model, model.state_dict().items())
