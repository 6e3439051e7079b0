"""Tensors of full shape and dtype without storage, in place of tensors of a version.

An engine's own loader narrows, splits, transposes and casts them like any others; each is always known as a strided
view of one tensor of the version. The loader's last operation on them decides which elements are fetched.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from weighbridge._core.boxes import Box
from weighbridge._core.layouts import TensorSpec
from weighbridge._lazy.joined import COPIES, Memory, Storageless
from weighbridge._lazy.views import Strided, box_of_view
from weighbridge.errors import LayoutError

aten = torch.ops.aten

_NOT_PLACES = frozenset({aten.view.dtype, aten._neg_view.default, aten._conj.default, aten.view_as_real.default})
"""Views that show other values than their memory has."""
SHAPE_ONLY = frozenset(
    {
        aten.empty_like.default,
        aten.full_like.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
        aten.new_full.default,
        aten.new_ones.default,
        aten.new_zeros.default,
        aten.ones_like.default,
        aten.zeros_like.default,
    }
)
"""Operations that only use a tensor's shape, dtype and device."""


class LazyOperations(Protocol):
    """Handler of operations on lazy tensors."""

    def copy(self, target: torch.Tensor, source: LazyTensor) -> None:
        """Carry out ``target.copy_(source)``; their shapes have been checked."""

    def compute(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Carry out an operation that lazy tensors do not support, with some of them among its arguments."""


def shown(dense: torch.Tensor, view: Strided, casts: Sequence[torch.dtype]) -> torch.Tensor:
    """A view of a contiguous tensor, cast."""
    found = dense.as_strided(view.size, view.stride, dense.storage_offset() + view.offset)
    for dtype in casts:
        found = found.to(dtype)
    return found


class LazyTensor(Storageless):
    """A tensor of a version, or a view or a cast of one.

    It has no storage and cannot be written to by its address. Views, casts and copies of it are lazy as well. Copying
    from it, and every other operation, calls its reader.

    Attributes:
        spec: the version's tensor that it is a part of.
        casts: dtypes that the tensor's elements go through, one after the other.
    """

    _reader: LazyOperations
    spec: TensorSpec
    _elements: torch.Tensor  # on meta: a view of the version's tensor, of its dtype
    casts: tuple[torch.dtype, ...]

    @staticmethod
    def of(spec: TensorSpec, reader: LazyOperations) -> LazyTensor:
        """A whole tensor of a version."""
        whole = torch.empty(spec.shape, dtype=spec.dtype.torch, device="meta")
        return _made(reader, spec, whole, whole, (), Memory(whole, whole), torch.device("cpu"))

    @classmethod
    def operate(cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Keep views, casts and copies lazy; pass all other operations to the reader."""
        first = args[0] if args else None
        if isinstance(first, LazyTensor) and first._memory.real is None:
            others = [a for a in tree_flatten((args[1:], kwargs))[0] if isinstance(a, torch.Tensor)]
            if not others and (func.is_view or func is aten._unsafe_view.default):
                found = first._viewed(func, args, kwargs)
                if found is not None:
                    return found
            if func in SHAPE_ONLY:
                return func(first._logical, *args[1:], **{"device": first.device, **kwargs})
            if not others and func in COPIES:
                return first._copied(func, args, kwargs)
        if func is aten.copy_.default and not isinstance(first, LazyTensor):
            first, source = args[:2]
            if source._memory.real is None:
                _check_shapes(first, source)
                source._reader.copy(first, source)
                return first
        return _computed(func, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # as above
        return f"LazyTensor({self.spec.name}, shape={list(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: object) -> LazyTensor:
        return self

    def data_ptr(self) -> int:
        """Raise RuntimeError: there are no bytes to point to."""
        raise RuntimeError(f"{self!r} has no memory, and no address: copy from it")

    def share_memory_(self) -> LazyTensor:
        """Raise RuntimeError: there are no bytes to share."""
        raise RuntimeError(f"{self!r} has no memory to share")

    @property
    def kept(self) -> Callable[[], object]:
        """A function that returns a non-None object as long as there is a view or a copy of this."""
        return weakref.ref(self._memory)

    def filled(self, dense: torch.Tensor) -> torch.Tensor:
        """This as a real tensor. A copy keeps its strides, as it may be viewed in ways in which its source may not.

        Args:
            dense: the box with its elements, contiguous.
        """
        found = shown(dense, self.located()[1], self.casts)
        mine = self._logical
        if mine is self._elements or found.stride() == mine.stride() or 0 in mine.stride():
            return found
        return torch.empty_strided(mine.shape, mine.stride(), dtype=mine.dtype, device=found.device).copy_(found)

    def located(self) -> tuple[Box, Strided]:
        """The box of the version's tensor with these elements, and the view of that box."""
        meta = self._elements
        view = Strided(tuple(meta.shape), tuple(meta.stride()), int(meta.storage_offset()))
        return box_of_view(self.spec.shape, view)

    def _viewed(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Result of a view operation; None if it is not a view of the version's tensor."""
        if func in _NOT_PLACES:
            return None
        if func is aten.as_strided.default and self._logical is not self._elements:
            _make_real(self)  # as_strided depends on the memory layout
            return None
        logical = func(self._logical, *args[1:], **kwargs)
        if self._logical is self._elements:
            elements = logical
        else:
            try:
                elements = func(self._elements, *args[1:], **kwargs)
            except RuntimeError:  # the copy would be contiguous, but its source is not
                return None

        def made(pair: tuple[torch.Tensor, torch.Tensor]) -> LazyTensor:
            return _made(self._reader, self.spec, *pair, self.casts, self._memory, self.device)

        if isinstance(logical, torch.Tensor):
            return made((logical, elements))
        return [made(pair) for pair in zip(logical, elements, strict=True)]

    def _copied(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> LazyTensor:
        asked = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
        logical = func(self._logical, *args[1:], **asked)
        casts = self.casts if logical.dtype == self.dtype else (*self.casts, logical.dtype)
        device = torch.device(kwargs.get("device") or self.device)
        memory = Memory(logical, self._elements, self._memory)
        return _made(self._reader, self.spec, logical, self._elements, casts, memory, device)


def _made(
    reader: LazyOperations,
    spec: TensorSpec,
    logical: torch.Tensor,
    elements: torch.Tensor,
    casts: tuple[torch.dtype, ...],
    memory: Memory,
    device: torch.device,
) -> LazyTensor:
    lazy = LazyTensor.made(logical, memory, device)
    lazy._reader, lazy.spec, lazy._elements, lazy.casts = reader, spec, elements, casts
    return lazy


def _check_shapes(target: torch.Tensor, source: LazyTensor) -> None:
    try:
        shape: torch.Size = torch.functional.broadcast_shapes(target.shape, source.shape)  # type: ignore[no-untyped-call]
        fits = shape == target.shape
    except RuntimeError:
        fits = False
    if not fits:
        raise LayoutError(
            (
                f"{source.spec} does not fit: a part of shape {list(source.shape)} was copied to "
                f"one of {list(target.shape)}"
            ),
            fix="compare the engine's configuration with the model's config.json",
        )


def _computed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Carry out an operation on real tensors; the tensors that it writes to stay real."""
    for changed in changed_by(func, args, kwargs):
        if isinstance(changed, LazyTensor) and changed._memory.real is None:
            _make_real(changed)
    args, kwargs = tree_map_only(LazyTensor, _real_or_lazy, (args, kwargs))
    lazies = [a for a in tree_flatten((args, kwargs))[0] if isinstance(a, LazyTensor)]
    return lazies[0]._reader.compute(func, args, kwargs) if lazies else func(*args, **kwargs)


def _real_or_lazy(lazy: LazyTensor) -> torch.Tensor:
    """The real elements of a lazy tensor that was written to; otherwise the tensor itself."""
    found = lazy._memory.shown(lazy._logical)
    return lazy if found is None else found


def changed_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operation writes to."""
    return [
        args[number] if number < len(args) else kwargs.get(argument.name)
        for number, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _make_real(lazy: LazyTensor) -> None:
    """Fetch the whole tensor that a lazy tensor is a view of; it and its other views show the fetched one from now
    on.
    """
    memory = lazy._memory
    whole = _made(lazy._reader, lazy.spec, memory.logical, memory.parts, lazy.casts, memory, lazy.device)
    memory.real = lazy._reader.compute(aten.clone.default, (whole,), {})
