"""Weighbridge inside verl 0.9: the checkpoint engine ``weighbridge``, a manager of updates, and managers of
checkpoints.

verl imports this module by ``checkpoint_engine.custom_backend_module`` in each of its processes, which registers the
engine.
"""

# May import: `weight_updates`, `engine_rank`, `aio`, `_clients` and folders below, and verl with Ray.
# - `engine`: checkpoint engine of actors and rollout workers.
# - `checkpoints`: verl's checkpoint managers with the service as their store; imported alone, by
# ``model.external_lib``.
# - `manager`: updates during which rollouts continue until the new version is complete, and engines that pull their own
# slices.

from weighbridge.integrations.verl.engine import NAME, WeighbridgeCheckpointEngine
from weighbridge.integrations.verl.manager import WeighbridgeManager

__all__ = ["NAME", "WeighbridgeCheckpointEngine", "WeighbridgeManager"]
