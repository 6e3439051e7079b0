"""Weights of a model with peft adapters: merged, under the original names and tensors of the model; or its adapters,
separately.

Names are derived from the tree of modules, not from their spelling: a tensor inside a layer with adapters belongs to
the layer if it is in ``base_layer``, and to an adapter otherwise. Adapters that peft has not merged in place are merged
here by peft's own ``merge`` into a copy of the layer. The model itself is not changed, because unmerging an adapter
would round the base weights.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from weighbridge._core.text.counts import counted, first_lines
from weighbridge._formats.dtensors import cut_alike
from weighbridge.errors import LayoutError

if TYPE_CHECKING:
    import torch

RECIPE = "push the model itself and not its state dict: the push merges the adapters into copies: docs/recipes/lora.md"
APART = (
    "call model.unmerge_adapter() first: a training state stores weights and adapters "
    "separately, and the push merges them into copies for "
    "engines: docs/recipes/lora.md"
)


def has_adapters(module: torch.nn.Module) -> bool:
    """Whether peft has wrapped the module, or layers of it."""
    if "peft" not in sys.modules:  # peft was never imported, so no module has its adapters
        return False
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    return any(isinstance(each, PeftModel | BaseTunerLayer) for each in module.modules())


def peft_model_in(module: Any) -> Any:
    """The module itself if it is a ``PeftModel``, or the ``PeftModel`` that DDP or torch.compile have wrapped; None if
    there is none.
    """
    if "peft" not in sys.modules:  # it was never imported, so there is none
        return None
    from peft import PeftModel

    found = module
    while found is not None and not isinstance(found, PeftModel):
        inner = getattr(found, "module", None)
        found = getattr(found, "_orig_mod", None) if inner is None else inner
    return found


def merged_entries(
    module: torch.nn.Module, entries: Iterable[tuple[str, torch.Tensor]], *, merge: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """The entries of a module's state dict that belong to the model, under their names without adapters.

    Active adapters that are not merged are merged into copies of their base weights, a layer at a time. For a layer
    whose tensors are DTensors this is a collective. For modules that an adapter replaces as a whole
    (``modules_to_save``), the active adapter's tensors replace the model's.

    Args:
        module: a module with adapters.
        entries: entries of its state dict.
        merge: False returns the base weights instead, which have the same names, shapes and dtypes.

    Raises:
        LayoutError: peft cannot merge an adapter, or the model does not compute with these weights because only some of
            the active adapters are merged into them; names the layers.
    """
    apart = _layers_apart(module)
    merged: dict[str, Mapping[str, torch.Tensor]] = {}
    for name, value in entries:
        own = _own_name(module, name.split("."))
        if own is None:
            continue
        layer = next((each for each in _prefixes(name) if each in apart), None)
        if layer is None or not merge:
            yield own, value
            continue
        if layer not in merged:
            merged = {layer: _merged_copy(layer, apart[layer])}  # one layer at a time
        yield own, merged[layer][name[len(layer) + 1 :]]


def adapter_names(module: torch.nn.Module) -> list[str]:
    """The names of a module's adapters, sorted; empty for a module that peft has not wrapped."""
    if not has_adapters(module):
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [each for each in module.modules() if isinstance(each, BaseTunerLayer)]
    return sorted({adapter for each in layers for adapter in _adapters_of(each)})


def merged_layers(module: torch.nn.Module) -> list[str]:
    """The names of a module's layers into whose weights adapters are merged in place."""
    if not has_adapters(module):
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [
        name for name, layer in module.named_modules() if isinstance(layer, BaseTunerLayer) and layer.merged_adapters
    ]


def merges_together(module: object) -> bool:
    """Whether `merged_entries` of a module is a collective, because adapters are merged into DTensors."""
    import torch
    from torch.distributed.tensor import DTensor

    if not isinstance(module, torch.nn.Module) or not has_adapters(module):
        return False
    from peft.tuners.tuners_utils import BaseTunerLayer

    return any(
        isinstance(layer, BaseTunerLayer)
        and not _counts_all(layer)
        and any(isinstance(each, DTensor) for each in _tensors_of(layer))
        for layer in module.modules()
    )


def check_apart(module: torch.nn.Module) -> None:
    """Refuse a module whose adapters are merged in place: a training state would contain them twice.

    Raises LayoutError, which names the layers.
    """
    merged = merged_layers(module)
    if merged:
        raise LayoutError(
            counted(
                len(merged),
                "layer has adapters that are merged into its weights",
                "layers have adapters that are merged into their weights",
            ),
            details=first_lines(merged),
            fix=APART,
        )


def _layers_apart(module: torch.nn.Module) -> dict[str, Any]:
    """The outermost layers with unmerged active adapters, by their names in the state dict."""
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer

    apart: dict[str, Any] = {}
    mixed: list[str] = []
    lost: list[str] = []
    outside = ""
    for name, layer in module.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        if _is_lost(layer):
            lost.append(name)
        if _counts_all(layer):
            continue
        if layer.merged_adapters or layer.disable_adapters:
            mixed.append(name)
        elif not (outside and name.startswith(outside)):
            apart[_state_name(name)] = layer
            outside = f"{name}."
    if lost:
        raise LayoutError(
            counted(len(lost), "layer has", "layers have")
            + " adapters that were merged into DTensors in place, which peft does correctly only for plain LoRA",
            details=first_lines(lost),
            fix="do not call merge_adapter() on such a model: the push merges into copies",
        )
    if mixed:
        raise LayoutError(
            counted(
                len(mixed),
                "layer has adapters that are partly merged",
                "layers have adapters that are partly merged",
            ),
            details=first_lines(mixed),
            fix="merge all active adapters (model.merge_adapter()), or none of them (model.unmerge_adapter())",
        )
    for tuner in module.modules() if apart else ():
        if isinstance(tuner, BaseTuner):
            try:
                with warnings.catch_warnings():  # of ties, which are found below
                    warnings.simplefilter("ignore")
                    tuner._check_merge_allowed()
            except ValueError as error:
                raise LayoutError(f"the adapters cannot be merged: {error}") from error
    _check_not_tied(module, apart)
    return apart


def _check_not_tied(module: torch.nn.Module, apart: Mapping[str, Any]) -> None:
    """Refuse adapters of a weight that another layer shares: a merge would change the weight for only one of them."""
    uses = Counter(id(each) for _, each in module.named_parameters(remove_duplicate=False))
    tied = [
        name for name, layer in apart.items() if any(uses[id(each)] > 1 for each in layer.get_base_layer().parameters())
    ]
    if tied:
        raise LayoutError(
            counted(len(tied), "layer has adapters and a weight that", "layers have adapters and weights that")
            + " another layer shares, and only one of the layers would be merged",
            details=first_lines(tied),
            fix=(
                "register and train the model with tie_word_embeddings=False, or leave that layer out of target_modules"
            ),
        )


def _merged_copy(name: str, layer: Any) -> Mapping[str, torch.Tensor]:
    """The state dict of a layer after peft's merge. Only the base weights of the adapters are copied.

    DTensors are gathered, merged and sharded again, because peft replaces ``weight.data``, which has no effect on a
    DTensor.
    """
    import torch
    from peft.tuners.tuners_utils import BaseTunerLayer
    from torch.distributed.tensor import DTensor

    below = {id(each) for each in _tensors_of(layer.get_base_layer())}
    memo: dict[int, Any] = {id(each): each for each in _tensors_of(layer) if id(each) not in below}
    try:
        with torch.no_grad():
            for each in _tensors_of(layer):
                if isinstance(each, DTensor):
                    memo[id(each)] = torch.nn.Parameter(each.full_tensor(), requires_grad=False)
            made = copy.deepcopy(layer, memo)
            for each in made.modules():
                if isinstance(each, BaseTunerLayer):
                    each.merge()
            whole: dict[str, torch.Tensor] = made.state_dict()
            held = layer.state_dict().items()
            return {key: cut_alike(whole[key], own) if isinstance(own, DTensor) else whole[key] for key, own in held}
    except (ValueError, NotImplementedError, RuntimeError, TypeError, AttributeError) as error:
        raise LayoutError(
            f"peft cannot merge the adapters of {name}: {error}",
            fix="push without adapters, with model.disable_adapter(), or use a method that peft can merge",
        ) from error


def _tensors_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _prefixes(name: str) -> Iterator[str]:
    """The names of the modules that contain a tensor, outermost first."""
    for index, letter in enumerate(name):
        if letter == ".":
            yield name[:index]


def _state_name(name: str) -> str:
    """A module's name in its state dict, where activation checkpointing hides its own part."""
    return name.replace("_checkpoint_wrapped_module.", "")


def _adapters_of(layer: Any) -> set[str]:
    return {adapter for name in layer.adapter_layer_names for adapter in getattr(layer, name)}


def _is_lost(layer: Any) -> bool:
    """Whether an in-place merge by peft was lost: peft replaced the data of a DTensor, which has no effect."""
    from peft.tuners.lora import LoraLayer
    from torch.distributed.tensor import DTensor

    if not layer.merged_adapters or not any(isinstance(each, DTensor) for each in layer.get_base_layer().parameters()):
        return False
    return not isinstance(layer, LoraLayer) or any(
        each in getattr(layer, "lora_variant", ()) for each in layer.merged_adapters
    )


def _counts_all(layer: Any) -> bool:
    """Whether a layer computes only with its own weight."""
    active = set() if layer.disable_adapters else _adapters_of(layer) & set(layer.active_adapters)
    return set(layer.merged_adapters) == active


def _own_name(module: torch.nn.Module, parts: list[str]) -> str | None:
    """The name of a tensor without adapters; None if it belongs to one."""
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
    from peft.utils import other
    from peft.utils.other import ModulesToSaveWrapper

    tokens = getattr(other, "TrainableTokensWrapper", ())  # since peft 0.15
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
            if parts[0] != "model":  # tensors that all layers share, such as VeRA's
                return None
            shown = False
        elif isinstance(at, tokens):
            if parts[0] != "token_adapter":
                return None
            shown = False
        if shown:
            own.append(parts[0])
        for part in parts[:length]:
            at = None if at is None else at._modules.get(part)
        del parts[:length]
    return ".".join(own)


def _unwrapped(module: torch.nn.Module | None, part: str) -> torch.nn.Module | None:
    """Module that a part of a name refers to, inside wrappers that are omitted in names of a state dict, such as those
    of activation checkpointing.
    """
    while module is not None and not _has(module, part) and len(module._modules) == 1:
        (module,) = module._modules.values()
    return module


def _has(module: torch.nn.Module, part: str) -> bool:
    return any(part in each for each in (module._modules, module._parameters, module._buffers))


def _saved_in(wrapper: Any) -> list[str]:
    """Path, inside a wrapper, of the module that it computes with."""
    active = (
        []
        if wrapper.disable_adapters
        else [each for each in wrapper.active_adapters if each in wrapper.modules_to_save]
    )
    return ["modules_to_save", active[0]] if active else ["original_module"]
