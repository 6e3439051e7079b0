"""Values that trainers have noted in checkpoints beside tensors, read as data: nothing of them is run.

Of Megatron-core's checkpoints the common state says which model was trained: Megatron-LM and slime note all of their arguments, an `argparse.Namespace` under ``args``, in ``common.pt``; since megatron-core 0.19 the entry
``common_state/shard_0_1`` has it instead. Source: ``megatron/training/checkpointing.py`` of Megatron-LM.
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
    """The common state of a checkpoint, its numbers and texts as they are; empty if there is none, or one that cannot be read as data.

    Args:
        folder: where the checkpoint is.
        checkpoint: what is in it.
    """
    try:
        root = read_value(folder, checkpoint.others.get(COMMON_ENTRY))
    except (DataLoss, NotFound):
        return {}  # weights do not need it
    if isinstance(root, list) and len(root) == 1:  # as objects of a checkpoint are
        root = root[0]
    return root if isinstance(root, dict) else {}


def trained_arguments(common: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of the trainer by name; empty if it has noted none."""
    found = common.get("args")
    state = found.state if isinstance(found, Instance) else found
    return state if isinstance(state, dict) else {}


def read_value(folder: Path, entry: Item | None) -> Any:
    """The value that ``torch.save`` has written: containers, numbers and texts as they are, anything else as `pickles` names it.

    Args:
        folder: the checkpoint.
        entry: where it lies; None for ``common.pt``.

    Raises:
        NotFound: there is no such file.
        DataLoss: it cannot be read as data.
    """
    with open_file(folder, COMMON_FILE if entry is None else entry.file) as (fd, size):
        begin, length = (0, size) if entry is None else (entry.offset, entry.length)
        if begin + length > size:
            raise DataLoss("the file ends before")
        data = Archive(fd, begin, length, _MOST_DIRECTORY).pickle(_MOST_BYTES)
    return read_pickle(data, None, COMMON_FILE)
