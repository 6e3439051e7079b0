"""Origin of a model of vLLM's: which version it is of, and what was learned when it was loaded."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from weighbridge.integrations.vllm.settings import Settings
from weighbridge.lazy import Recording


@dataclass(frozen=True)
class Origin:
    """Where the weights of a model have come from.

    Attributes:
        settings: the service, and the model's name there.
        version: its number.
        recording: what this rank takes of it; None if that could not be recorded while loading.
    """

    settings: Settings
    version: int
    recording: Recording | None


_ORIGINS: WeakKeyDictionary[torch.nn.Module, Origin] = WeakKeyDictionary()


def remember(model: torch.nn.Module, origin: Origin) -> None:
    """Keep where a model's weights have come from as long as there is the model."""
    _ORIGINS[model] = origin


def of(model: torch.nn.Module) -> Origin | None:
    """Where its weights have come from; None if the load format was another one."""
    return _ORIGINS.get(model)
