"""Conversion of a trainer's values that blobs refuse into equivalent plain values."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from weighbridge._trainers.states import blobs

_ALWAYS_PLAIN = (type(None), bool, int, float, str, bytes)


def plain(value: Any) -> Any:
    """Return a value in which numpy arrays are tensors, numpy numbers are Python numbers, and namespaces are dicts of
    their plain attributes.

    Also converts the items of dicts, lists and tuples. Values without a plain form are unchanged.
    """
    import numpy as np
    import torch

    # torch does not support long doubles and other byte orders
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
    """Return the attributes that a blob accepts.

    A trainer's arguments also contain enumerations and functions, which loaders do not need.
    """
    return {name: value for name, value in attributes.items() if type(value) in _ALWAYS_PLAIN or blobs.is_plain(value)}
