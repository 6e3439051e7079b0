"""Weights of a model that peft has given adapters, once they are merged in place: by the names and with the tensors that it had before.

Names are found in the tree of modules and not by their spelling: a tensor inside of a layer with adapters is the layer's own if it lies in
``base_layer``, and an adapter's otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from weighbridge._core.text.counts import counted
from weighbridge.errors import LayoutError

if TYPE_CHECKING:
    import torch

RECIPE = (
    "call model.merge_adapter(), push the model itself and not its state dict, and call model.unmerge_adapter() as soon as the push has "
    "returned: docs/recipes/lora.md"
)
_NAMED = 20

T = TypeVar("T")


def has_adapters(module: torch.nn.Module) -> bool:
    """Whether peft has wrapped the module, or layers of it."""
    if "peft" not in sys.modules:  # nobody has made one
        return False
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    return any(isinstance(each, PeftModel | BaseTunerLayer) for each in module.modules())


def merged_entries(module: torch.nn.Module, entries: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    """The entries of its state dict that are the model's, by the names that they have without adapters.

    Of modules that an adapter replaces as a whole (``modules_to_save``), the active adapter's stand for the model's.

    Args:
        module: one with adapters.
        entries: of its state dict.

    Raises:
        LayoutError: the model does not compute with these weights, since active adapters are not merged into them; names the layers.
    """
    _check_merged(module)
    for name, value in entries:
        own = _own_name(module, name.split("."))
        if own is not None:
            yield own, value


def _check_merged(module: torch.nn.Module) -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer

    apart = [
        name
        for name, layer in module.named_modules()
        if isinstance(layer, BaseTunerLayer) and not _counts_all(layer)
    ]
    if apart:
        raise LayoutError(
            counted(
                len(apart),
                "layer has adapters that are not merged",
                "layers have adapters that are not merged",
            ),
            details=apart[:_NAMED],
            fix=RECIPE,
        )


def _counts_all(layer: Any) -> bool:
    """Whether a layer computes with its own weight alone."""
    own = {adapter for name in layer.adapter_layer_names for adapter in getattr(layer, name)}
    active = set() if layer.disable_adapters else own & set(layer.active_adapters)
    return set(layer.merged_adapters) == active


def _own_name(module: torch.nn.Module, parts: list[str]) -> str | None:
    """The name of a tensor without adapters; None if it belongs to one."""
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    at: torch.nn.Module | None = module
    own: list[str] = []
    parts = list(parts)
    while parts:
        at = _unwrapped(at, parts[0])
        length, shown = 1, True
        if isinstance(at, BaseTunerLayer):
            if parts[0] != "base_layer":
                return None
            shown = False
        elif isinstance(at, ModulesToSaveWrapper):
            inside = _saved_in(at)
            if parts[: len(inside)] != inside:
                return None
            length, shown = len(inside), False
        elif isinstance(at, PeftModel):
            shown = parts[0] != "base_model"
        elif isinstance(at, BaseTuner):
            shown = parts[0] != "model"
        if shown:
            own.append(parts[0])
        for part in parts[:length]:
            at = None if at is None else at._modules.get(part)
        del parts[:length]
    return ".".join(own)


def _unwrapped(module: torch.nn.Module | None, part: str) -> torch.nn.Module | None:
    """The module of which a name speaks: inside of those that names of a state dict leave out, as activation checkpointing's."""
    while module is not None and not _has(module, part) and len(module._modules) == 1:
        (module,) = module._modules.values()
    return module


def _has(module: torch.nn.Module, part: str) -> bool:
    return any(part in each for each in (module._modules, module._parameters, module._buffers))


def _saved_in(wrapper: Any) -> list[str]:
    """Where the module lies that a wrapper computes with."""
    active = (
        []
        if wrapper.disable_adapters
        else [each for each in wrapper.active_adapters if each in wrapper.modules_to_save]
    )
    return ["modules_to_save", active[0]] if active else ["original_module"]
