"""Storage of `torch.distributed.checkpoint` that keeps the model's part of a state dict as versions.

::

    dcp.save({"model": model.state_dict()}, storage_writer=WeighbridgeWriter("acme/smol", step=10))
    dcp.load({"model": model.state_dict()}, storage_reader=WeighbridgeReader("acme/smol"))

Each rank hands over the shards that DCP's plan gives it; nothing is gathered. Of planner and state dict the planner is the truth: names, boxes
and data are what it says, so that its transformations are kept.
"""

# May import: `checkpoint_names`, `_clients` and folders below, and torch.
#
# - `entries`: which entries of a state dict are which of the model's tensors.
# - `boundary`: errors as DCP is to print them.
# - `writer`: the storage writer.
# - `reader`: the storage reader.

from weighbridge.integrations.torch.reader import WeighbridgeReader
from weighbridge.integrations.torch.writer import WeighbridgeWriter

__all__ = ["WeighbridgeReader", "WeighbridgeWriter"]
