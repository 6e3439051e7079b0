"""Torch mode that creates tensors without filling them, for models whose shapes alone are needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import init
from torch.overrides import TorchFunctionMode

_FILLS = {
    torch.Tensor.normal_,
    torch.Tensor.uniform_,
    init.normal_,
    init.uniform_,
    init.trunc_normal_,
    init.kaiming_uniform_,
    init.xavier_uniform_,
}


class Unfilled(TorchFunctionMode):
    """Context manager that skips random initialisation in this thread.

    For tensors of the meta device, torch would still trace each initialisation, which takes longer than creating the
    model.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return the tensor unchanged for functions that fill it; call other functions as usual."""
        if func in _FILLS:
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))
