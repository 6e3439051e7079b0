"""Stand-ins without storage for a model's parameters: its own loader runs over them, and the model does not change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def storageless(model: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Temporarily replace a model's parameters and buffers by tensors without storage.

    They have the layout of the real ones, share memory where those do, and have their class and attributes, which
    loaders read. Attributes that a loader sets meanwhile, such as projections derived from weights, are also reverted.

    Yields:
        The parameters and buffers, by name.
    """
    saved = [
        (module, dict(vars(module)), dict(module._parameters), dict(module._buffers)) for module in model.modules()
    ]
    twins = _Twins()
    try:
        for module, _, parameters, buffers in saved:
            module._parameters.update({n: None if t is None else twins.of(t) for n, t in parameters.items()})
            module._buffers.update({n: None if t is None else twins.of(t) for n, t in buffers.items()})
        yield targets_of(model)
    finally:
        for module, attributes, parameters, buffers in saved:
            _put_back(vars(module), attributes)
            _put_back(module._parameters, parameters)
            _put_back(module._buffers, buffers)


def targets_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers that a loader may write to, each once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def twin_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without storage, with the layout, class and attributes of another tensor."""
    twin: torch.Tensor = _Twins().of(tensor)
    return twin


def _put_back(now: dict[str, Any], before: dict[str, Any]) -> None:
    now.clear()
    now.update(before)


class _Twins:
    def __init__(self) -> None:
        self._tensors: dict[int, Any] = {}
        self._memory: dict[int, torch.UntypedStorage] = {}

    def of(self, tensor: torch.Tensor) -> Any:
        if id(tensor) not in self._tensors:
            self._tensors[id(tensor)] = self._made(tensor)
        return self._tensors[id(tensor)]

    def _made(self, tensor: torch.Tensor) -> torch.Tensor:
        real = tensor.untyped_storage()
        memory = self._memory.setdefault(real._cdata, torch.UntypedStorage(real.nbytes(), device="meta"))  # type: ignore[no-untyped-call]  # torch's own
        data = torch.empty(0, dtype=tensor.dtype, device="meta")
        with torch.no_grad():
            data.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
        twin = torch.Tensor._make_subclass(type(tensor), data, tensor.requires_grad)
        vars(twin).update(vars(tensor))
        return twin
