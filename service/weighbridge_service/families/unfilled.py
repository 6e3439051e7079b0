"""Mode of torch in which tensors are made and not filled: for models of which only shapes are asked for."""

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
    """Leaves out random values, in this thread: a context.

    For tensors of the meta device, torch works out step by step what they would be like, which takes longer than to make the model.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """The tensor as it is, of what would fill it."""
        if func in _FILLS:
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))
