"""Worker extension of vLLM with the faults that golden prompts are to find. Weighbridge's methods stand beside it, as
beside the extension of any trainer. It is imported where vLLM is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class FaultyWorker:
    """Each fault is a call of its own by ``/collective_rpc``, of which the plug-in in the engine's core knows
    nothing.
    """

    model_runner: Any
    weighbridge_apply: Callable[[str], dict[str, Any]]

    def apply_behind_caches(self, version: str) -> dict[str, Any]:
        """An update after which no cache is emptied."""
        return self.weighbridge_apply(version)

    def scale_norm(self, factor: str) -> None:
        """A scale that is not the version's: of a layer's output, where all of it passes."""
        with torch.no_grad():
            self.model_runner.model.model.layers[1].post_attention_layernorm.weight.mul_(float(factor))

    def keep_packed(self) -> None:
        """Keep what a layer computes with, as vLLM has packed it."""
        self._packed = self._layer().cpu_linear

    def put_back_packed(self) -> None:
        """Leave that layer as if the last update had not packed its weights."""
        self._layer().cpu_linear = self._packed

    def _layer(self) -> Any:
        return self.model_runner.model.model.layers[1].mlp.down_proj
