"""Actor of AReaL with Megatron-core that pushes its shards."""

from __future__ import annotations

from typing import Any

from areal.engine.megatron_engine import MegatronPPOActor

from weighbridge._clients.push_handle import PushHandle
from weighbridge._trainers.states.megatron_chunks import sharded_chunks
from weighbridge._trainers.trainer import TrainerClient
from weighbridge.integrations.areal.updates import UpdatesByWeighbridge


class WeighbridgeMegatronActor(UpdatesByWeighbridge, MegatronPPOActor):  # type: ignore[misc]  # AReaL is seen as untyped
    """AReaL's ``MegatronPPOActor``, with another `update_weights`."""

    def shards(self) -> Any:
        """This rank's shards as stored by Megatron-core."""
        return sharded_chunks(self.model)

    def hand_over(self, client: TrainerClient, model: str, shards: Any, **said: Any) -> PushHandle:
        """Push these shards, without gathering and without translating names here."""
        return client.push(model, shards, **said)
