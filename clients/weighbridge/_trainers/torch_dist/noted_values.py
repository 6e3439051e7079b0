"""Values that trainers have stored in checkpoints in addition to tensors. They are read as data and never executed.

The common state of Megatron-core's checkpoints describes the trained model: Megatron-LM and slime store all of their
arguments, an `argparse.Namespace` under ``args``, in ``common.pt``; since megatron-core 0.19 in the entry
``common_state/shard_0_1`` instead. Source: ``megatron/training/checkpointing.py`` of Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weighbridge._trainers.torch_dist.archives import Archive
from weighbridge._trainers.torch_dist.folder import TorchDistCheckpoint, open_file
from weighbridge._trainers.torch_dist.metadata import COMMON_FILE, Item
from weighbridge._trainers.torch_dist.pickles import Instance, read_pickle
from weighbridge.errors import DataLoss, NotFound

COMMON_ENTRY = "common_state/shard_0_1"
_MOST_BYTES = 64 << 20
_MOST_DIRECTORY = 16 << 20


def common_values(folder: Path, checkpoint: TorchDistCheckpoint) -> Mapping[str, Any]:
    """Return the common state of a checkpoint, with numbers and strings unchanged; empty if the checkpoint does not
    have one, or it cannot be read as data.

    Args:
        folder: folder of the checkpoint.
        checkpoint: content of the checkpoint.
    """
    try:
        root = read_value(folder, checkpoint.others.get(COMMON_ENTRY))
    except (DataLoss, NotFound):
        return {}  # weights do not need the common state
    if isinstance(root, list) and len(root) == 1:  # as objects of a checkpoint are
        root = root[0]
    return root if isinstance(root, dict) else {}


def trained_arguments(common: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of the trainer by name; empty if the trainer has not stored any."""
    found = common.get("args")
    state = found.state if isinstance(found, Instance) else found
    return state if isinstance(state, dict) else {}


def read_value(folder: Path, entry: Item | None) -> Any:
    """Return the value that ``torch.save`` has written. Containers, numbers and strings are unchanged; everything else
    has the form that `pickles` gives it.

    Args:
        folder: the checkpoint.
        entry: place of the value; None for ``common.pt``.

    Raises:
        NotFound: the file does not exist.
        DataLoss: the value cannot be read as data.
    """
    with open_file(folder, COMMON_FILE if entry is None else entry.file) as (fd, size):
        begin, length = (0, size) if entry is None else (entry.offset, entry.length)
        if begin + length > size:
            raise DataLoss("the file ends inside the value")
        data = Archive(fd, begin, length, _MOST_DIRECTORY).pickle(_MOST_BYTES)
    return read_pickle(data, None, COMMON_FILE)
