"""Boundary to torch.distributed.checkpoint, which prints the whole traceback of an error for every rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from weighbridge.errors import WeighbridgeError

P = ParamSpec("P")
T = TypeVar("T")


def flat_errors(method: Callable[P, T]) -> Callable[P, T]:
    """Wrap a method so that its errors state what is wrong, without this library's internal frames."""

    @functools.wraps(method)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except WeighbridgeError as error:
            raise error.anew() from None

    return called
