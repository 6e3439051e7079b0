"""Storage for `torch.distributed.checkpoint` that stores the model's part of a state dict as versions.

::

    dcp.save({"model": model.state_dict()}, storage_writer=WeighbridgeWriter("acme/smol", step=10))
    dcp.load({"model": model.state_dict()}, storage_reader=WeighbridgeReader("acme/smol"))

Each rank pushes the shards that DCP's plan assigns to it, without gathering. If planner and state dict differ, the
planner decides names, boxes and data, so that its transformations are preserved.
"""

# May import: `checkpoint_names`, `_clients` and folders below, and torch.
# - `entries`: mapping of entries of a state dict to the model's tensors.
# - `boundary`: errors in the form that DCP should print.
# - `writer`: the storage writer.
# - `reader`: the storage reader.

from weighbridge.integrations.torch.reader import WeighbridgeReader
from weighbridge.integrations.torch.writer import WeighbridgeWriter

__all__ = ["WeighbridgeReader", "WeighbridgeWriter"]
