"""Several lazy tensors side by side, for a loader that stacks or concatenates tensors before it copies them.

transformers does so with experts. A joined tensor is no part of one tensor of the version, but the position of each
piece in it is known: copying from it copies the pieces, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch.utils._pytree import tree_map_only

from weighbridge._core.boxes import Box
from weighbridge.errors import LayoutError

aten = torch.ops.aten

JOINS = frozenset({aten.cat.default, aten.stack.default})
"""Operations that make a joined tensor of lazy ones."""
_TURNS = frozenset({aten.transpose.int, aten.permute.default, aten.t.default})
_SAME = frozenset({aten.detach.default, aten.alias.default})
COPIES = frozenset({aten._to_copy.default, aten.clone.default, aten.lift_fresh_copy.default})
"""Operations that return the same elements in a new tensor, perhaps of another dtype."""


class JoinedPart(NamedTuple):
    """A lazy tensor, and its box in a joined one."""

    box: Box
    tensor: torch.Tensor


class Memory:
    """Shared state of tensors without storage that are views of each other.

    Attributes:
        logical: the tensor that they are all views of, on meta.
        parts: content of that tensor: elements of a tensor of the version, or pieces.
        copied_from: memory that they are a copy of.
        real: the elements, after the first write to them.
    """

    def __init__(self, logical: torch.Tensor, parts: Any, copied_from: Memory | None = None) -> None:
        self.logical = logical
        self.parts = parts
        self.copied_from = copied_from
        self.real: torch.Tensor | None = None

    def shown(self, logical: torch.Tensor) -> torch.Tensor | None:
        """The elements as one of these tensors shows them; None before the first write."""
        if self.real is None:
            return None
        return self.real.as_strided(logical.shape, logical.stride(), logical.storage_offset())


class Storageless(torch.Tensor):
    """A tensor without storage: of a version, or joined from such tensors.

    Stacking or concatenating only such tensors makes a `JoinedTensor`; all other operations go to `operate`.
    """

    _logical: torch.Tensor  # on meta: shape, strides and dtype as they show
    _memory: Memory

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch's own subclasses do

    @classmethod
    def made(cls, logical: torch.Tensor, memory: Memory, device: torch.device) -> Self:
        """A tensor with the shape, strides and dtype of a tensor on meta."""
        found: Self = torch.Tensor._make_wrapper_subclass(
            cls,
            logical.shape,
            strides=logical.stride(),
            storage_offset=logical.storage_offset(),
            dtype=logical.dtype,
            device=device,
        )
        found._logical, found._memory = logical, memory
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without a type
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in JOINS:
            # with real ones among them they are fetched: a recording could not tell the content of the real ones
            if all(isinstance(each, Storageless) for each in args[0]):
                return joined(func, args, kwargs)
        elif func._can_decompose():  # `to`, `reshape` and the like arrive like this in inference mode
            return func.decompose(*args, **kwargs)
        return cls.operate(func, args, kwargs)

    @classmethod
    def operate(cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Carry out an operation that has tensors of this class among its arguments."""
        raise NotImplementedError


class JoinedTensor(Storageless):
    """Lazy tensors side by side, which together cover it. It has no storage.

    Copies and casts of it, and views that permute its axes, are joined tensors too. All other operations are done on
    real tensors, for which all of it is copied.
    """

    _pieces: Sequence[JoinedPart]

    @classmethod
    def operate(cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Keep the pieces separate, if the operation does; otherwise carry it out on real tensors."""
        first = args[0]
        if isinstance(first, JoinedTensor):
            if first._memory.real is None and func in _SAME | _TURNS | COPIES:
                return first._each(func, args, kwargs)
            if func._schema.is_mutable and first._memory.real is None:
                memory = first._memory
                memory.real = _copied(_made(memory.parts, memory.logical, memory))
        elif func is aten.copy_.default and args[1]._memory.real is None:
            _copy_pieces(first, args[1])
            return first
        args, kwargs = tree_map_only(JoinedTensor, _real, (args, kwargs))
        found = func(*args, **kwargs)
        return first if func._schema.is_mutable and isinstance(first, JoinedTensor) else found

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # as above
        return f"JoinedTensor({len(self._pieces)} pieces, shape={list(self.shape)}, dtype={self.dtype})"

    def _each(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> JoinedTensor:
        """Result of an operation that keeps the pieces separate."""
        asked = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
        logical = func(self._logical, *args[1:], **asked)
        if func in _SAME:
            return _made(self._pieces, logical, self._memory)

        def turned(offset: tuple[int, ...]) -> tuple[int, ...]:
            if func not in _TURNS:
                return offset
            end = func(torch.empty([o + 1 for o in offset], device="meta"), *args[1:])
            return tuple(n - 1 for n in end.shape)

        pieces = []
        for box, tensor in self._pieces:
            found = func(tensor, *args[1:], **kwargs)
            pieces.append(JoinedPart(Box(turned(box.offset), tuple(found.shape)), found))
        return _made(pieces, logical, self._memory if func in _TURNS else Memory(logical, pieces))


def joined(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> JoinedTensor:
    """Result of ``aten.cat`` or ``aten.stack`` of lazy and joined tensors."""
    tensors = [_real(t) if isinstance(t, JoinedTensor) and t._memory.real is not None else t for t in args[0]]
    axis = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    logical = func([torch.empty(t.shape, dtype=t.dtype, device="meta") for t in tensors], axis)
    axis %= logical.dim()
    pieces: list[JoinedPart] = []
    start = 0
    for tensor in tensors:
        stacked = func is aten.stack.default
        if not stacked and tensor.dim() != logical.dim():  # torch.cat leaves empty tensors of one axis out
            continue
        whole = [JoinedPart(Box.whole(tensor.shape), tensor)]
        for box, piece in tensor._pieces if isinstance(tensor, JoinedTensor) else whole:
            offset, extent = list(box.offset), list(box.extent)
            if stacked:
                offset.insert(axis, 0)
                extent.insert(axis, 1)
                piece = piece.unsqueeze(axis)
            offset[axis] += start
            # a copy: later writes to the tensor must not show in the joined one
            pieces.append(JoinedPart(Box(tuple(offset), tuple(extent)), piece.to(logical.dtype, copy=True)))
        start += 1 if stacked else tensor.shape[axis]
    return _made(pieces, logical, Memory(logical, pieces))


def _made(pieces: Sequence[JoinedPart], logical: torch.Tensor, memory: Memory) -> JoinedTensor:
    device = pieces[0].tensor.device if pieces else torch.device("cpu")
    found = JoinedTensor.made(logical, memory, device)
    found._pieces = pieces
    return found


def _copy_pieces(target: torch.Tensor, source: JoinedTensor) -> None:
    if target.shape != source.shape:
        raise LayoutError(
            f"parts that were joined to shape {list(source.shape)} were copied to one of {list(target.shape)}: "
            + ", ".join(str(piece.tensor) for piece in source._pieces[:3]),
            fix="compare the engine's configuration with the model's config.json",
        )
    for box, tensor in source._pieces:
        target[tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))].copy_(tensor)


def _copied(tensor: JoinedTensor) -> torch.Tensor:
    target = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    _copy_pieces(target, tensor)
    return target


def _real(tensor: JoinedTensor) -> torch.Tensor:
    found = tensor._memory.shown(tensor._logical)
    return _copied(tensor) if found is None else found
