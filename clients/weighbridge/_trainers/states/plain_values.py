"""Values of a trainer as plain ones: what blobs refuse, and what means the same without refusing it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from weighbridge._trainers.states import blobs

_ALWAYS_PLAIN = (type(None), bool, int, float, str, bytes)


def plain(value: Any) -> Any:
    """A value in which numpy's arrays are tensors, its numbers are Python's, and namespaces are dicts of their attributes that are plain.

    Looks into dicts, lists and tuples. What has no plain form stays as it is.
    """
    import numpy as np
    import torch

    # torch has neither long doubles nor a byte order
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc" and value.dtype.char not in "gG":
        return torch.from_numpy(value.astype(value.dtype.newbyteorder("="), order="C"))
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, argparse.Namespace):
        return _plain_ones(plain(vars(value)))
    if type(value) is dict:
        return {key: plain(child) for key, child in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    return value


def _plain_ones(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Of attributes those that a blob takes: a trainer's arguments have enumerations and functions among them, which no loader asks for."""
    return {
        name: value
        for name, value in attributes.items()
        if type(value) in _ALWAYS_PLAIN or blobs.is_plain(value)
    }
