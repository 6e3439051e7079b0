"""Layout and tensors of a Megatron-core sharded state dict.

Source of the conventions: ``megatron.core.dist_checkpointing.mapping``. `ShardedTensor.global_shape` and
`global_offset` include prepended axes (the layer, the expert), `local_shape` does not.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from weighbridge._core import dtypes
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Layout, Shard, TensorSpec
from weighbridge._core.text.counts import counted, first_lines
from weighbridge._formats.memory_forms import Form
from weighbridge._formats.misfits import Misfit, told
from weighbridge._formats.torch_state import ALLOW, misfit
from weighbridge.errors import FailedPrecondition, InvalidArgument, LayoutError

if TYPE_CHECKING:
    import torch


class ShardedEntry(NamedTuple):
    """One parameter or buffer of a sharded state dict.

    Attributes:
        declared: its ``ShardedTensor`` or ``ShardedTensorFactory``, whose ``data`` is the model's.
        built: result of the factory, in the form that its ``merge_fn`` accepts; ``declared`` itself if there is no
            factory.
        shards: the ``ShardedTensor``s in ``built``.
    """

    declared: Any
    built: Any
    shards: tuple[Any, ...]

    @property
    def aliases(self) -> bool:
        """Whether all shards are views of the model's memory."""
        memory = self.declared.data.untyped_storage().data_ptr()
        return all(shard.data.untyped_storage().data_ptr() == memory for shard in self.shards)


@dataclass(frozen=True)
class ShardedTensors:
    """The weights of one rank.

    Attributes:
        layout: their shards, as one stream, in the order of `tensors`.
        tensors: the local tensor of each shard, of the box's extent without prepended axes; they alias the model.
        entries: the entries of the shards.
        objects: the ``ShardedObject``s of the state dict.
    """

    layout: Layout
    tensors: tuple[torch.Tensor, ...]
    entries: tuple[ShardedEntry, ...] = field(repr=False)
    objects: tuple[Any, ...] = field(repr=False)

    def finish_restore(self) -> None:
        """Copy values that were restored into tensors outside the model to the model's tensors."""
        import torch

        for entry in self.entries:
            if not entry.aliases:
                with torch.no_grad():
                    entry.declared.data.copy_(entry.declared.merge_fn(_plain(entry.built)))


def sharded_tensors(sharded_state_dict: Any) -> ShardedTensors:
    """Find the weights in a ``model.sharded_state_dict()``.

    ``ShardedObject``s (``_extra_state``) are not weights.

    Raises:
        InvalidArgument: it contains other values than Megatron's sharded types, or no weights.
        LayoutError: two shards of one tensor contradict each other.
        FailedPrecondition: Megatron-core is not installed.
    """
    _check_installed()
    specs: dict[str, TensorSpec] = {}
    shards: list[Shard] = []
    tensors: list[torch.Tensor] = []
    entries, objects = _read(sharded_state_dict)
    for item in chain.from_iterable(entry.shards for entry in entries):
        if item.data is None:
            raise InvalidArgument(f"the shard of {item.key} has no data")
        if getattr(item, "flattened_range", None) is not None:
            raise LayoutError(f"{item.key} is a flattened shard, which belongs to an optimizer and is not a weight")
        if item.data.dtype != item.dtype or tuple(item.data.shape) != tuple(item.local_shape):
            raise LayoutError(
                f"the data of {item.key} is {item.data.dtype}{list(item.data.shape)}, but its shard declares "
                f"{item.dtype}{list(item.local_shape)}"
            )
        spec = TensorSpec(item.key, dtypes.from_torch(item.dtype), tuple(map(int, item.global_shape)))
        if specs.setdefault(item.key, spec) != spec:
            raise LayoutError(f"two shards of one tensor contradict each other: {specs[item.key]} and {spec}")
        extent = (1,) * item.prepend_axis_num + tuple(item.local_shape)
        box = Box(tuple(map(int, item.global_offset)), extent)
        shards.append(Shard(item.key, box, main=is_main(item.replica_id)))
        tensors.append(item.data.detach())
    if not shards:
        raise InvalidArgument("the sharded state dict holds no weights", fix="pass model.sharded_state_dict()")
    layout = Layout.stream(specs.values(), shards)
    return ShardedTensors(layout, tuple(tensors), tuple(entries), tuple(objects))


_ADAPTERS = frozenset(("adapter", "lora_A", "lora_B"))
"""Parts of the names of adapters' tensors in Megatron-Bridge and peft."""


@dataclass(frozen=True)
class WeightShards:
    """The weights of one rank in the dtypes that the model is registered with.

    Attributes:
        layout: their shards; as `ShardedTensors.layout`, except for the dtypes.
        tensors: one for each shard, in its own dtype.
        held: the rank's tensors.
    """

    layout: Layout
    tensors: tuple[torch.Tensor, ...]
    held: ShardedTensors = field(repr=False)


def as_registered(
    held: ShardedTensors, registered: Mapping[str, TensorSpec], cast: str = ALLOW, *, filled: bool = False
) -> WeightShards:
    """The weights of a rank in the model's dtypes: floating-point tensors of other dtypes are cast, as for torch
    trainers.

    Args:
        held: the rank's tensors.
        registered: specs of those tensors that belong to the registered model. Other tensors are not changed; the
            service refuses them.
        cast: one of `torch_state.CASTS`.
        filled: whether the tensors are filled from the model, instead of pushed to it.

    Raises:
        LayoutError: a cast is not allowed or does not exist between the dtypes, or the rank has LoRA adapters; names
            the tensors.
    """
    adapters = [
        name
        for name in held.layout.tensors
        if registered and name not in registered and not _ADAPTERS.isdisjoint(name.split("."))
    ]
    if adapters:
        raise LayoutError(
            counted(len(adapters), "tensor belongs", "tensors belong") + " to LoRA adapters",
            details=first_lines(adapters),
            fix="fill the model before adapters are added; adapters are filled by restore_adapter"
            if filled
            else (
                "push them with push_adapter; or push a copy of the model into which they are "
                "merged, for example with Megatron-Bridge's LoRAMerge"
            ),
        )
    specs: list[TensorSpec] = []
    problems: list[Misfit] = []
    for name, spec in held.layout.tensors.items():
        wanted = registered.get(name, spec)
        problem = misfit(Form.plain(wanted), spec.shape, spec.dtype.torch, cast, filled=filled)
        if problem is not None:
            problems.append(problem)
        specs.append(wanted)
    if problems:
        raise LayoutError(
            f"the tensors differ from those of the model in {counted(len(problems), 'entry', 'entries')}",
            details=first_lines(told(problems)),
            fix="cast='allow' casts floating-point tensors; otherwise register the model in the trainer's dtype",
        )
    shards = [placement.shard for placement in held.layout.placements]
    return WeightShards(Layout.stream(specs, shards), held.tensors, held)


_ADVICE = (
    "pass what Megatron-core's model.sharded_state_dict() returns; for a torch module or "
    "state dict, also of FSDP2, use push_state_dict "
    "and restore_state_dict"
)


def _check_installed() -> None:
    """Raise FailedPrecondition if Megatron-core is not installed, because no sharded state dict can exist then."""
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        raise FailedPrecondition("megatron-core is not installed", fix=_ADVICE)


def sharded_entries(value: Any, path: str = "") -> Iterator[Any]:
    """The ``ShardedTensor``s, ``ShardedTensorFactory``s and ``ShardedObject``s of a sharded state dict.

    Args:
        value: the state dict, or a part of it.
        path: path of that part, for errors.

    Raises:
        InvalidArgument: it contains other values than Megatron's sharded types.
    """
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase

    if isinstance(value, ShardedBase):
        yield value
    elif isinstance(value, LocalNonpersistentObject):
        return
    elif isinstance(value, dict):
        for key, child in value.items():
            yield from sharded_entries(child, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for number, child in enumerate(value):
            yield from sharded_entries(child, f"{path}[{number}]")
    else:
        raise InvalidArgument(
            f"{path or 'the argument'} is a {type(value).__name__}, not one of Megatron-core's sharded types",
            fix=_ADVICE,
        )


def is_main(replica_id: Any) -> bool:
    """Whether a ``replica_id`` is that of the main replica."""
    return not any(replica_id) if isinstance(replica_id, tuple) else replica_id == 0


def _read(sharded_state_dict: Any) -> tuple[list[ShardedEntry], list[Any]]:
    """The parameters and buffers of a sharded state dict, and its ``ShardedObject``s."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    entries: list[ShardedEntry] = []
    objects: list[Any] = []
    for found in sharded_entries(sharded_state_dict):
        if isinstance(found, ShardedTensor):
            entries.append(ShardedEntry(found, found, (found,)))
        elif isinstance(found, ShardedTensorFactory):
            built = found.build()
            entries.append(ShardedEntry(found, built, built_shards(found, built)))
        else:
            objects.append(found)
    return entries, objects


def built_shards(factory: Any, built: Any) -> tuple[Any, ...]:
    """The ``ShardedTensor``s in the result of a factory.

    Raises:
        InvalidArgument: the result contains other values.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    found = tuple(sharded_entries(built, factory.key))
    if not all(isinstance(each, ShardedTensor) for each in found):
        raise InvalidArgument(f"the factory of {factory.key} builds objects that are not ShardedTensors")
    return found


def _plain(value: Any) -> Any:
    """A built factory with each ShardedTensor replaced by its data, as the factory's `merge_fn` expects it."""
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject

    if isinstance(value, dict):
        return {key: _plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(child) for child in value)
    return value.unwrap() if isinstance(value, LocalNonpersistentObject) else value.data
