"""Shadows of layers: vLLM's processing of a version runs on copies of layers while the engine continues to compute.

Does not need vLLM.

A shadow is a layer with the attributes of the live one and tensors of its own. Its processing is the layer's own, by a
copy of the layer's method. Checks instead of lists of names ensure that the result differs from the live layer only in
the values of its tensors: the first run uses an `OperationsGuard` that blocks operations on live tensors, and each run
compares all attributes of layer and method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from weighbridge.integrations.vllm.watching import (
    AttributesSnapshot,
    OperationsGuard,
    Tensors,
    Unsuitable,
    WritesInPlace,
    has_attributes,
    lies,
    own_tensors,
    same_state,
    silent,
    state,
    storage_of,
)

_DONE = "_already_called_process_weights_after_loading"
"""Attribute by which vLLM's methods and its reloading recognise processed layers."""


@dataclass(frozen=True)
class Subject:
    """A layer whose weights are processed after loading.

    Attributes:
        layer: the live layer.
        method: method that processes it.
        loaded: its tensors with the values of a version; not the live ones.
        kept: names of live tensors that stay in place while a version is loaded.
        constant: names of those kept tensors that no version fills.
        dress: gives a tensor the layer's class and attributes that the model's loader expects, for the shadow.
        buffers: names of tensors that are buffers when a version is loaded.
    """

    layer: torch.nn.Module
    method: Any
    loaded: Tensors
    kept: frozenset[str]
    constant: frozenset[str]
    dress: Callable[[torch.nn.Module, torch.nn.Module, str, torch.Tensor], torch.Tensor]
    buffers: frozenset[str]

    @property
    def live(self) -> Tensors:
        """Tensors that the layer computes with, including those that processing may have created."""
        return {name: tensor for name, tensor in own_tensors(self.layer).items() if name not in self.kept}


class Shadows:
    """Processes the layers of one model outside the model. For one thread at a time."""

    def __init__(self) -> None:
        self._copied: WeakKeyDictionary[torch.nn.Module, bool] = WeakKeyDictionary()
        """Layers whose processing has been observed, and whether processing receives copies because it writes to its
        inputs.
        """
        self._unsuitable: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()

    def process(self, subject: Subject, live: set[int], most_bytes: int) -> Tensors:
        """Tensors like those that the live layer computes with, created from a version.

        Args:
            subject: the layer.
            live: storages of all tensors that the engine has.
            most_bytes: maximum memory in addition to the loaded tensors.

        Raises:
            Unsuitable: states why the live layer itself must be processed. The loaded tensors are unchanged.
        """
        layer = subject.layer
        if layer in self._unsuitable:
            raise Unsuitable(self._unsuitable[layer])
        try:
            if layer not in self._copied:
                self._copied[layer] = self._watch(subject, live, most_bytes)
            return _run(subject, live, None, most_bytes, copied=self._copied[layer])
        except torch.OutOfMemoryError as error:
            raise Unsuitable("there was not enough memory") from error
        except Unsuitable as error:
            self._unsuitable[layer] = str(error)
            raise
        except Exception as error:
            self._unsuitable[layer] = f"it raised {type(error).__name__}: {error}"
            raise Unsuitable(self._unsuitable[layer]) from error

    def _watch(self, subject: Subject, live: set[int], most_bytes: int) -> bool:
        """Whether processing must receive copies of the loaded tensors."""
        constant = {storage_of(own_tensors(subject.layer)[name]) for name in subject.constant}
        given = {storage_of(tensor) for tensor in subject.loaded.values()}
        before, inner = state(subject.layer, subject.method), AttributesSnapshot(subject.layer, subject.method)
        copied = False
        try:
            _run(subject, live, OperationsGuard(given, live, constant), most_bytes, copied=False)
        except WritesInPlace:
            copied = True
            _run(subject, live, OperationsGuard(given, live, constant), most_bytes, copied=True)
        same = before == state(subject.layer, subject.method)
        if not same or inner.facts != AttributesSnapshot(subject.layer, subject.method).facts:
            raise Unsuitable("it changes attributes of the layer that the engine computes with")
        return copied


def _run(
    subject: Subject, storages: set[int], guard: OperationsGuard | None, most_bytes: int, *, copied: bool
) -> Tensors:
    live = subject.live
    needed = sum(tensor.nbytes for tensor in (*live.values(), *(subject.loaded.values() if copied else ())))
    if needed > most_bytes:
        raise Unsuitable(f"it takes {needed / 1e9:.1f} GB in addition to the weights")
    shadow, method = shadow_of(subject, copied=copied)
    if guard is None:
        method.process_weights_after_loading(shadow)
    else:
        with guard, silent():
            method.process_weights_after_loading(shadow)
    all_made, own = own_tensors(shadow), own_tensors(subject.layer)
    for name in subject.kept:
        if all_made.pop(name, None) is not own[name]:
            raise Unsuitable(f"it replaces {name}")
    if all_made.keys() != live.keys():
        raise Unsuitable(f"it creates {', '.join(sorted(all_made))} in place of {', '.join(sorted(live))}")
    for name, tensor in all_made.items():
        if lies(tensor) != lies(live[name]) or tensor.device != live[name].device:
            raise Unsuitable(f"{name} has a different memory layout than before")
        if (name in shadow._buffers) != (name in subject.layer._buffers):
            raise Unsuitable(f"{name} is a buffer in only one of the two layers")
    if any(storage_of(tensor) in storages - {0} for tensor in all_made.values()):
        raise Unsuitable("it returns a tensor that the engine computes with")
    pairs = [(live[name], tensor) for name, tensor in all_made.items()]
    pairs += [(own[name], own[name]) for name in subject.kept]
    if differs := same_state((subject.layer, subject.method), (shadow, method), pairs):
        raise Unsuitable(f"{differs} is a different one afterwards")
    return {name: tensor.detach() for name, tensor in all_made.items()}


def shadow_of(subject: Subject, *, copied: bool) -> tuple[torch.nn.Module, Any]:
    """Copies of the live layer and of its processing method; the layer contains a newly loaded version.

    Args:
        subject: the layer.
        copied: whether processing may write to its input tensors.
    """
    layer, method = subject.layer, _copy_of(subject.method)
    vars(method).pop("process_weights_after_loading", None)  # it may be observed
    if "moe_kernel" in vars(method):  # vLLM's CPU kernel of experts packs weights only when it is created
        method.moe_kernel = None
    shadow = _copy_of(layer)
    found: dict[str, Any] = vars(shadow)
    found.pop(_DONE, None)
    for key, value in vars(layer).items():
        if value is subject.method:
            found[key] = method
    found["_modules"] = {key: method if each is subject.method else each for key, each in layer._modules.items()}
    parameters: dict[str, Any] = {name: None for name, each in layer._parameters.items() if each is None}
    buffers: dict[str, Any] = {name: None for name, each in layer._buffers.items() if each is None}
    found["_parameters"], found["_buffers"] = parameters, buffers
    for name, tensor in own_tensors(layer).items():
        if name in subject.kept:
            (parameters if name in layer._parameters else buffers)[name] = tensor
    for name, tensor in subject.loaded.items():
        given = _copy_of_tensor(tensor) if copied else tensor.detach()
        (buffers if name in subject.buffers else parameters)[name] = subject.dress(layer, shadow, name, given)
    return shadow, method


def _copy_of_tensor(tensor: torch.Tensor) -> torch.Tensor:
    found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return found.copy_(tensor)


def _copy_of(owner: Any) -> Any:
    """A copy of an object.

    Attributes that are objects or containers are copied too; their own attributes are shared.
    """
    return _with_attributes(owner, {key: _shallow(value) for key, value in vars(owner).items()})


def _shallow(value: Any) -> Any:
    if type(value) in (list, dict, set):
        return value.copy()
    if isinstance(value, torch.nn.Module) or hasattr(value, "__del__") or not has_attributes(value):
        return value
    return _with_attributes(value, vars(value))


def _with_attributes(like: Any, attributes: Mapping[str, Any]) -> Any:
    if hasattr(like, "__del__"):
        raise Unsuitable(f"{type(like).__name__} cannot be copied")
    found = object.__new__(type(like))
    found.__dict__.update(attributes)
    return found
