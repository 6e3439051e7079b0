"""Actor of AReaL with Megatron-core that pushes its shards."""

from __future__ import annotations

from typing import Any

from areal.engine.megatron_engine import MegatronPPOActor
from megatron.core import parallel_state

from weighbridge._clients.push_handle import PushHandle
from weighbridge._clients.trainer import TrainerClient
from weighbridge.integrations.areal.updates import UpdatesByWeighbridge


class WeighbridgeMegatronActor(UpdatesByWeighbridge, MegatronPPOActor):  # type: ignore[misc]  # AReaL is seen as untyped
    """AReaL's ``MegatronPPOActor``, with another `update_weights`."""

    def hand_over(self, client: TrainerClient, model: str, **said: Any) -> PushHandle:
        """Push this rank's shards as Megatron-core has them; nothing is gathered, and no name is translated here."""
        return client.push(model, self._sharded(), **said)

    def _sharded(self) -> dict[str, Any]:
        """The sharded state dict of each chunk of the model; keys of a virtual stage depend on which one Megatron-core is told it is."""
        if len(self.model) == 1:
            return {"model": _unwrapped(self.model[0]).sharded_state_dict()}
        found = {}
        for stage, chunk in enumerate(self.model):
            parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
            found[f"model{stage}"] = _unwrapped(chunk).sharded_state_dict()
        return found


def _unwrapped(module: Any) -> Any:
    """The model inside what data parallelism and mixed precision put around it."""
    while hasattr(module, "module"):
        module = module.module
    return module
