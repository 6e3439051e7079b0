"""Values of a training state other than its tensors, in the form of checkpoints on disk; and values of a checkpoint in
the form of a training state.

An imported checkpoint is stored unchanged: its entries that are not tensors are stored as bytes, under
``trainer.checkpoint`` of the only blob. Only a rank that is restored loads them, with ``weights_only``. An export
writes the same bytes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from weighbridge._trainers.states import blobs, megatron_common, torch_entries
from weighbridge._trainers.states.megatron_training import as_data
from weighbridge._trainers.states.training_state import RankValues
from weighbridge._trainers.torch_dist.metadata import KeyPath, is_path, saved
from weighbridge._trainers.torch_dist.noted_values import COMMON_ENTRY
from weighbridge.errors import DataLoss

if TYPE_CHECKING:
    import torch

CheckpointFormat = Literal["torch_dist", "dcp"]
_CHECKPOINT = "checkpoint"
_RANK_STATE = "rank_state"
_OWN = re.compile(rf"{_RANK_STATE}/shard_(\d{{1,9}})_(\d{{1,9}})")
"""Name of an entry of Megatron-core's checkpoints with the values of one rank.

It contains the rank and the number of ranks.
"""
STEP_ENTRY = "weighbridge.step"
"""Name of the entry of torch's checkpoints with the trainer's step. The format itself does not have a field for it."""


@dataclass(frozen=True)
class CheckpointValues:
    """Content of a checkpoint other than its tensors.

    Attributes:
        format: ``torch_dist`` of Megatron-core, ``dcp`` of torch.
        objects: content of the entries that are not tensors.
        paths: path of each entry in the nested state dict.
        common: content of ``common.pt``; None if the checkpoint does not have one.
        aliases: other names of tensors, each with the name under which the tensor is stored.
    """

    format: CheckpointFormat
    objects: Mapping[str, bytes] = field(repr=False)
    paths: Mapping[str, KeyPath] = field(repr=False)
    common: bytes | None = field(default=None, repr=False)
    aliases: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(ranks: Sequence[RankValues], tensors: Iterable[str], step: int) -> CheckpointValues:
        """Return the values of a training state, in the format of its trainer's own checkpoints.

        Args:
            ranks: values of all ranks that have pushed the training state, in order.
            tensors: names of its tensors.
            step: the trainer's step.

        Raises:
            InvalidArgument: names of values have another meaning in a checkpoint.
            DataLoss: the trainer of the values is unknown, or the stored values of a checkpoint are malformed.
        """
        first, names = ranks[0], list(tensors)
        if _CHECKPOINT in first.trainer:
            found = _read(first.trainer[_CHECKPOINT], "the training state")
            if found.common is None and COMMON_ENTRY in found.objects:  # some readers need the file
                found = replace(found, common=saved(_common_of(found, "the training state")))
            return found._of_step(step) if found.format == "dcp" else found
        if "objects" in first.trainer:
            return _of_megatron(ranks, names, step)
        if torch_entries.MODEL in first.trainer:
            return _of_torch(ranks, names)._of_step(step)
        raise DataLoss("the values of the training state come from a trainer that this client does not know")

    def _of_step(self, step: int) -> CheckpointValues:
        return replace(self, objects={**self.objects, STEP_ENTRY: saved(step)})

    def kept(self) -> RankValues:
        """Return the values in the form in which a training state stores them, as those of one rank."""
        objects = {name: _tensor(content) for name, content in self.objects.items()}
        common = None if self.common is None else _tensor(self.common)
        checkpoint = {"format": self.format, "objects": objects, "paths": dict(self.paths), "common": common}
        return RankValues(trainer={_CHECKPOINT: checkpoint})


def _of_megatron(ranks: Sequence[RankValues], tensors: Sequence[str], step: int) -> CheckpointValues:
    objects: dict[str, bytes] = {}
    for rank, values in enumerate(ranks):
        for key, data in values.trainer["objects"].items():
            # of replicas, the first one is Megatron's main replica
            if key not in objects:
                objects[key] = saved([as_data(data)])
        if values.rank_state:
            objects[f"{_RANK_STATE}/shard_{rank}_{len(ranks)}"] = saved([dict(values.rank_state)])
    first = ranks[0]
    common = megatron_common.common_state(first.trainer["optimizer"], first.state, tensors, step)
    return CheckpointValues("torch_dist", objects, {}, saved(common))


def _of_torch(ranks: Sequence[RankValues], tensors: Sequence[str]) -> CheckpointValues:
    first = ranks[0]
    entries, paths = torch_entries.entries_of(first.trainer, first.state, [each.rank_state for each in ranks])
    model = torch_entries.MODEL
    tied = {f"{model}.{name}": f"{model}.{kept}" for name, kept in first.trainer.get("tied", {}).items()}
    paths |= torch_entries.paths_of_tensors(dict.fromkeys(tensors), tied)
    return CheckpointValues("dcp", {name: saved(value) for name, value in entries.items()}, paths, None, tied)


def _read(checkpoint: Any, name: str) -> CheckpointValues:
    """Read values that `CheckpointValues.kept` has put into the training state of this name.

    Raises DataLoss if they are malformed.
    """
    where = f"{_CHECKPOINT} of {name}"
    found = blobs.by_name(checkpoint, where)
    objects = {
        key: _bytes(content, f"{key} of {where}")
        for key, content in blobs.by_name(found.get("objects"), f"objects of {where}").items()
    }
    paths = blobs.by_name(found.get("paths"), f"paths of {where}")
    for key, path in paths.items():
        if not is_path(path):
            raise DataLoss(f"the path of {key} of {where} is a {type(path).__name__}, not a tuple of keys")
    kind: Any = found.get("format")
    common = found.get("common")
    if kind not in get_args(CheckpointFormat):
        raise DataLoss(f"{where} has format {kind!r}, which is not one of {', '.join(get_args(CheckpointFormat))}")
    return CheckpointValues(kind, objects, paths, None if common is None else _bytes(common, f"common of {where}"))


def checkpoint_ranks(values: RankValues, name: str) -> int | None:
    """Return the number of ranks whose own values are in an imported checkpoint; None if the values do not come from
    one.

    Args:
        values: values of a rank.
        name: name of the version, for errors.

    Raises:
        DataLoss: the stored values of the checkpoint are malformed.
    """
    if _CHECKPOINT not in values.trainer:
        return None
    found = _read(values.trainer[_CHECKPOINT], name)
    if found.format == "torch_dist":
        return max((int(match[2]) for key in found.objects if (match := _OWN.fullmatch(key))), default=0)
    return len({path[1] for path in found.paths.values() if path[0] == _RANK_STATE and len(path) > 1})


def opened(values: RankValues, name: str, own: int | None = None) -> RankValues:
    """Return the values of a rank in the form that its trainer restores. Values of an imported checkpoint are loaded
    when they are accessed.

    Args:
        values: values of a rank.
        name: name of the version, for errors.
        own: the rank whose own values are needed from an imported checkpoint, which contains those of all ranks; None
            for none.

    Raises:
        DataLoss: the values do not have the form that Megatron or torch writes.
    """
    if _CHECKPOINT not in values.trainer:
        return values
    found = _read(values.trainer[_CHECKPOINT], name)
    if found.format == "torch_dist":
        common = _common_of(found, name)
        optimizer = megatron_common.optimizer_values(common, name)
        objects = _Opened(found.objects, lambda key: _loaded(found.objects[key], f"{key} of {name}")[0])
        keys = [key for key in objects if (match := _OWN.fullmatch(key)) and int(match[1]) == own]
        of_rank = blobs.by_name(objects[keys[0]], f"{keys[0]} of {name}") if keys else {}
        return RankValues({"optimizer": optimizer, "objects": objects}, megatron_common.named_values(common), of_rank)
    by_top: dict[str, dict[KeyPath, str]] = {}
    for key in found.objects:
        top, *below = found.paths.get(key, (key,))
        by_top.setdefault(str(top), {})[tuple(below)] = key

    def entries(top: str) -> dict[KeyPath, Any]:
        keys = by_top.get(top, {}).items()
        return {path: _loaded(found.objects[key], f"{key} of {name}") for path, key in keys}

    model, of_optimizer = torch_entries.MODEL, entries(torch_entries.OPTIMIZER)
    trainer: dict[str, Any] = {model: {".".join(map(str, path)): value for path, value in entries(model).items()}}
    if of_optimizer:
        trainer["optimizer"] = torch_entries.optimizer_values(of_optimizer)
    others = by_top.keys() - {model, torch_entries.OPTIMIZER, _RANK_STATE, STEP_ENTRY}
    state = _Opened(others, lambda top: torch_entries.nested(entries(top)))
    kept = by_top.get(_RANK_STATE, {})
    of_own: dict[KeyPath, Any] = {
        path[1:]: _loaded(found.objects[key], f"{key} of {name}")
        for path, key in kept.items()
        if path and path[0] == str(own)
    }
    where = f"{_RANK_STATE}.{own} of {name}"
    return RankValues(trainer, state, blobs.by_name(torch_entries.nested(of_own), where))


def _common_of(found: CheckpointValues, name: str) -> dict[str, Any]:
    """Return the common state; empty if the checkpoint does not have one."""
    content = found.objects.get(COMMON_ENTRY) if found.common is None else found.common
    common = {} if content is None else _loaded(content, f"the common state of {name}")
    if isinstance(common, list) and len(common) == 1:  # as objects are
        common = common[0]
    if not isinstance(common, dict):
        raise DataLoss(f"the common state of {name} contains a {type(common).__name__}, not values by name")
    return common


class _Opened(Mapping[str, Any]):
    """Values that are loaded when they are accessed."""

    def __init__(self, names: Iterable[str], opened: Callable[[str], Any]) -> None:
        self._names = dict.fromkeys(names)
        self._opened = opened

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        return self._opened(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _loaded(content: bytes, name: str) -> Any:
    """Load saved bytes of the types that torch allows, and those that Megatron-core allows if it is installed."""
    import argparse

    allowed: list[Any] = [argparse.Namespace]
    with contextlib.suppress(ImportError):
        from megatron.core.safe_globals import SAFE_GLOBALS

        allowed += SAFE_GLOBALS
    return blobs.load(content, name, allowed)


def _tensor(content: bytes) -> torch.Tensor:
    import torch

    # bytes themselves would be written as text of twice their size
    return (
        torch.frombuffer(bytearray(content), dtype=torch.uint8)
        if content
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )


def _bytes(content: Any, name: str) -> bytes:
    import torch

    if not isinstance(content, torch.Tensor) or content.dtype != torch.uint8:
        raise DataLoss(f"{name} is a {type(content).__name__}, not a tensor of bytes")
    return content.numpy().tobytes()
