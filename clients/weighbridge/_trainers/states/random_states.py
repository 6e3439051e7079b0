"""State of this process's random number generators, as plain values."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["RandomStates"]


class RandomStates:
    """The random number generators of this process, for ``rank_state``: Python's, numpy's global one, and torch's for
    the CPU and the current CUDA device.

    A program must store the state of generators that it creates itself: ``generator.get_state()`` is a plain tensor.
    """

    def __repr__(self) -> str:
        return "<RandomStates of this process>"

    def state_dict(self) -> dict[str, Any]:
        """Return the current states: plain values and tensors in host memory."""
        import torch

        states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            kind, keys, *rest = numpy.random.get_state()
            states["numpy"] = (kind, keys.tolist(), *rest)
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            states["cuda"] = torch.cuda.get_rng_state()
        return states

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Continue from these states. The state of a CUDA device is set if the process has one."""
        import torch

        random.setstate(states["python"])
        torch.set_rng_state(states["torch"])
        if "numpy" in states:
            import numpy as np

            np.random.set_state(states["numpy"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])
