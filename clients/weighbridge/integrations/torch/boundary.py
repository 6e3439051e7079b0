"""Boundary to torch.distributed.checkpoint, which prints all of an error's traceback, of every rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from weighbridge.errors import WeighbridgeError

P = ParamSpec("P")
T = TypeVar("T")


def flat_errors(method: Callable[P, T]) -> Callable[P, T]:
    """A method whose errors say what is wrong, and nothing of how this library is built."""

    @functools.wraps(method)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except WeighbridgeError as error:
            raise error.anew() from None

    return called
