"""Layers that vLLM has wrapped for LoRA: their original names, and a view of the model without the wrappers while
weights are loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from weighbridge.errors import FailedPrecondition

_WRAPPED = ".base_layer"
"""Part of the name of a layer that vLLM has wrapped."""


def name_before(name: str) -> str:
    """Name that a layer, or a tensor of it, had before it was wrapped."""
    return name.replace(_WRAPPED, "")


def named_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """Layers of a model by the names that they had before they were wrapped.

    A wrapper has no tensors, and has the name of the layer that it wraps.
    """
    for name, layer in model.named_modules():
        yield name_before(name), layer


def check_wrapped(model: Any) -> None:
    """Refuse a model with wrapped experts: their wrapper changes the wrapped layer and cannot be removed.

    Raises:
        FailedPrecondition: names them.
    """
    for _, name, wrapper in _wrappers(model):
        if "MoE" in type(wrapper).__name__:
            raise FailedPrecondition(
                f"{name}: vLLM has wrapped experts for LoRA, and updates of such engines are not supported",
                fix=(
                    "start the engine with --lora-target-modules that are not experts, or start "
                    "it again from the new version"
                ),
            )


@contextmanager
def unwrapped(model: Any) -> Iterator[None]:
    """The model without wrappers, as its loader expects it.

    It must not compute meanwhile, because adapters would not be applied.
    """
    taken = list(_wrappers(model))
    for parent, name, wrapper in taken:
        parent._modules[name] = wrapper._modules["base_layer"]
    try:
        yield
    finally:
        for parent, name, wrapper in taken:
            parent._modules[name] = wrapper


def _wrappers(model: Any) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Module]]:
    """Each wrapper, its parent module, and its name there."""
    for _, parent in list(model.named_modules()):
        for name, child in parent._modules.items():
            if _is_wrapper(child) and not _is_wrapper(parent):
                yield parent, name, child


def _is_wrapper(module: Any) -> bool:
    return isinstance(module, torch.nn.Module) and any(
        each.__name__ == "BaseLayerWithLoRA" for each in type(module).__mro__
    )
