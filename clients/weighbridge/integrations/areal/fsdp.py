"""Actor of AReaL with FSDP2 that pushes its shards."""

from __future__ import annotations

from typing import Any

from areal.engine.fsdp_engine import FSDPPPOActor

from weighbridge._clients.push_handle import PushHandle
from weighbridge._trainers.trainer import TrainerClient
from weighbridge.integrations.areal.updates import UpdatesByWeighbridge


class WeighbridgeFSDPActor(UpdatesByWeighbridge, FSDPPPOActor):  # type: ignore[misc]  # AReaL is seen as untyped
    """AReaL's ``FSDPPPOActor``, with another `update_weights`."""

    def shards(self) -> Any:
        """The model; its DTensors contain their boxes."""
        return self.model

    def hand_over(self, client: TrainerClient, model: str, shards: Any, **said: Any) -> PushHandle:
        """Push the boxes of this rank's DTensors without gathering."""
        return client.push_state_dict(model, shards, **said)
