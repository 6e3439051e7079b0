"""Tensor spaces: whose names the tensors of a layout have."""

from __future__ import annotations

from weighbridge import wire
from weighbridge.errors import InvalidArgument
from weighbridge.v1 import resources_pb2

MEGATRON, HUGGING_FACE = "megatron", "hugging_face"

_BY_NUMBER = {wire.MEGATRON: MEGATRON, wire.HUGGING_FACE: HUGGING_FACE}
_NUMBERS = {name: number for number, name in _BY_NUMBER.items()}


def space_of(number: int) -> str:
    """The tensor space that the contract has under a number. Raises InvalidArgument."""
    space = _BY_NUMBER.get(number)  # type: ignore[call-overload]
    if space is None:
        raise InvalidArgument("the layout does not say which tensor space its names belong to")
    return str(space)


def number_of_space(space: str) -> resources_pb2.TensorSpace.ValueType:
    """The contract's number of a tensor space."""
    return _NUMBERS[space]
