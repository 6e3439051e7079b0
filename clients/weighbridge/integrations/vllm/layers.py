"""Layers of a vLLM model, in checkpoint format and in kernel format."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

from weighbridge import _lazy as lazy
from weighbridge.integrations.engine_rank import storageless
from weighbridge.integrations.vllm.releases import is_deferred, put_back
from weighbridge.integrations.vllm.watching import Tensors, own_tensors
from weighbridge.integrations.vllm.wrapped import named_layers

PACKED = " (packed)"
_ROWS_AT_ONCE = 512
_OF_EACH_MODULE = frozenset(vars(torch.nn.Module()))
"""Attributes in which torch stores the parts of a module."""


def tensors_of(model: torch.nn.Module) -> Tensors:
    """Parameters and buffers that loaders write to, by name. Shared tensors appear once.

    Those of attention layers (scales of the KV cache) are not included, because vLLM loads them differently.
    """
    parameters: Tensors = {}
    buffers: Tensors = {}
    seen: set[int] = set()
    for prefix, layer in named_layers(model):
        if is_deferred(layer):
            continue
        for name, tensor in own_tensors(layer).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                kind = parameters if name in layer._parameters else buffers
                kind[full_name(prefix, name)] = tensor
    # parameters first: a buffer may be a view of another layer's, as in mixers of Mamba, and reloading knows none of
    # these
    return {**parameters, **buffers}


def names_loaded(model: torch.nn.Module) -> set[str]:
    """Names of the layers' tensors, both in checkpoint format and in their current format."""
    return {
        full_name(prefix, name)
        for prefix, layer in named_layers(model)
        for names in (*get_layerwise_info(layer).restore_metadata, own_tensors(layer))
        for name in names
    }


def packed_weights(model: torch.nn.Module) -> Tensors:
    """Transposed weights that CPU kernels of linear layers multiply by, under the weights' names with the suffix
    `PACKED`.

    They are recovered from products with rows of an identity matrix: all but one of the summands are zeros, so that
    nothing is rounded.
    """
    found: Tensors = {}
    for prefix, layer in named_layers(model):
        loaded = get_layerwise_info(layer).restore_metadata[0].get("weight")
        if loaded is None or loaded.ndim != 2 or not hasattr(layer, "cpu_linear"):
            continue
        weight: Any = layer.weight
        rows = torch.eye(loaded.shape[1], dtype=loaded.dtype, device=weight.device)
        parts = [rows[start : start + _ROWS_AT_ONCE] for start in range(0, len(rows), _ROWS_AT_ONCE)]
        with torch.no_grad():
            products = [layer.cpu_linear(each, weight, None) for each in parts]
        found[full_name(prefix, "weight") + PACKED] = torch.cat(products)
    return found


def full_name(prefix: str, name: str) -> str:
    """The name in the model of a layer's tensor."""
    return f"{prefix}.{name}" if prefix else name


def shapes_loaded(model: torch.nn.Module) -> list[lazy.Shape]:
    """Shapes of the tensors that a version is loaded into, as far as they are known before a loader is recorded.

    Shared tensors appear once.
    """
    found: list[lazy.Shape] = []
    seen: set[int] = set()
    for layer in model.modules():
        if is_deferred(layer):
            continue
        own, remade = own_tensors(layer), as_made(layer)
        for name, tensor in {**own, **remade}.items():
            shared = id(own.get(name, tensor))
            if shared not in seen:
                seen.add(shared)
                found.append(lazy.Shape.of(tensor))
    return found


def as_made(layer: torch.nn.Module) -> Tensors:
    """A layer's tensors, without storage, as they were when the model was created; only those that reloading
    recreates.
    """
    parameters, buffers = get_layerwise_info(layer).restore_metadata
    return {**parameters, **buffers}


def is_buffer(layer: torch.nn.Module, name: str) -> bool:
    """Whether a tensor that a version is loaded into is a buffer."""
    parameters, buffers = get_layerwise_info(layer).restore_metadata
    return name in buffers or (name not in parameters and name in layer._buffers)


def dressed(layer: torch.nn.Module, shadow: torch.nn.Module, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor for a copy of a layer, with the class and attributes that the layer's tensor had when the model was
    created, as reloading sets them.
    """
    like: Any = as_made(layer).get(name, own_tensors(layer).get(name))
    found: Any = tensor
    found.__class__ = like.__class__
    found.__dict__ = like.__dict__.copy()
    loader = original_loader(getattr(like, "weight_loader", None))
    if loader is not None:
        found.weight_loader = loader
    restore_layer_refs(tensor, shadow)
    return tensor


def quantizes_while_loading(model: torch.nn.Module) -> bool:
    """Whether vLLM quantizes weights as they are loaded; then there are no parameters to load into."""
    methods = (getattr(layer, "quant_method", None) for layer in model.modules())
    return any(getattr(method, "uses_meta_device", False) for method in methods)


@contextmanager
def reloading(model: torch.nn.Module, model_config: Any) -> Iterator[None]:
    """Block in which the layers are in checkpoint format, without storage.

    Layers that are filled in the block are processed and copied to the tensors that kernels read. The other layers are
    restored, and so are layers that were incomplete when an error occurred.
    """
    initialize_layerwise_reload(model)
    try:
        yield
    except BaseException:
        for layer in model.modules():
            info = get_layerwise_info(layer)
            info.loaded_weights.clear()
            info.load_numel = 0
        _finish(model, model_config)
        raise
    _finish(model, model_config)


def _finish(model: torch.nn.Module, model_config: Any) -> None:
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load() and not info.load_numel and not is_deferred(layer):
            put_back(layer)  # it receives nothing, or was filled in place
    finalize_layerwise_reload(model, model_config)


@contextmanager
def without_storage(model: torch.nn.Module, model_config: Any) -> Iterator[Tensors]:
    """The tensors of a model as its own loader expects them in a newly created model, but without storage.

    The model cannot compute meanwhile, and is restored afterwards.
    """
    shared = {(layer, name): id(t) for layer in model.modules() for name, t in own_tensors(layer).items()}
    bare: dict[int, torch.Tensor] = {}
    with reloading(model, model_config):
        for layer in model.modules():
            for name, tensor in own_tensors(layer).items():
                key = shared.get((layer, name), id(tensor))
                if key not in bare:
                    bare[key] = _bare(tensor)
                # not with setattr: a tensor that vLLM leaves in place may be one that modules do not accept as a
                # parameter
                where: Any = layer._parameters if name in layer._parameters else layer._buffers
                where[name] = bare[key]
        with _attributes_kept(model):
            yield tensors_of(model)


@contextmanager
def _attributes_kept(model: torch.nn.Module) -> Iterator[None]:
    """Block after which the attributes of all layers are restored, except parameters, buffers and sublayers. Loaders of
    some models, such as DFlash drafters, store values derived from parameters in attributes, and here the parameters
    have no storage.
    """
    before = [(vars(layer), _plain_attributes(layer)) for layer in model.modules()]
    try:
        yield
    finally:
        for attributes, kept in before:
            for name in attributes.keys() - kept.keys() - _OF_EACH_MODULE:
                del attributes[name]
            attributes.update(kept)


def _plain_attributes(layer: torch.nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(layer).items() if name not in _OF_EACH_MODULE}


def _bare(tensor: Any) -> Any:
    """A tensor without storage, with the loader that it had when the model was created."""
    found = tensor if tensor.is_meta else to_meta_tensor(tensor)
    loader = getattr(found, "weight_loader", None)
    if getattr(loader, "__name__", "") == "online_process_loader":
        found.weight_loader = original_loader(loader)
    return found


def twin_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without storage, with the layout of another tensor and the loader that it had when the model was
    created.
    """
    found: torch.Tensor = _bare(storageless.twin_of(tensor))
    return found


def original_loader(loader: Any) -> Any:
    """A loader without the wrapper with which vLLM processes complete layers."""
    while getattr(loader, "__name__", "") == "online_process_loader":
        loader = loader.__wrapped__
    return loader
