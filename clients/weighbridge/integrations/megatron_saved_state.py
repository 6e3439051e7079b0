"""State that Megatron's save receives in addition to the model, in the form from which a training state is pushed.

A save receives the state dict of an optimizer, for which the distributed optimizer has gathered or renamed its state. A
training state is pushed from the optimizer itself, without either. So a hook wraps the methods in which optimizers
create state dicts, and records the optimizer of each state dict.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from weighbridge._formats.megatron_state import sharded_entries, sharded_tensors
from weighbridge._trainers.states.megatron_training import training_tensors
from weighbridge._trainers.states.plain_values import plain
from weighbridge._trainers.training import training_state
from weighbridge.errors import InvalidArgument

_METHOD = "sharded_state_dict"


class OptimizerNotes:
    """A hook that records which Megatron optimizer created the newest sharded state dict of an optimizer.

    `close` removes the hook.
    """

    def __init__(self) -> None:
        from megatron.core.optimizer.optimizer import MegatronOptimizer

        # the state dict is kept until it is saved: a dict does not support weak references, and its id may be reused
        # later
        self._newest: tuple[Any, weakref.ref[Any]] | None = None
        self._in_place = True
        self._wrapped: list[tuple[type, Any, Any]] = []
        for kind in (MegatronOptimizer, *_below(MegatronOptimizer)):
            if _METHOD in vars(kind):
                original = vars(kind)[_METHOD]
                noting = self._noting(original)
                setattr(kind, _METHOD, noting)
                self._wrapped.append((kind, original, noting))

    def taken(self, state_dict: Mapping[str, Any]) -> tuple[str | None, Any]:
        """Key of the optimizer's state dict within a state dict, and the optimizer; None if there is none.

        Clears the record.
        """
        newest, self._newest = self._newest, None
        if newest is not None:
            made, optimizer = newest
            for name, value in state_dict.items():
                if value is made:
                    return name, optimizer()
        return None, None

    def close(self) -> None:
        """Undo the hook."""
        self._newest, self._in_place = None, False
        for kind, original, noting in self._wrapped:
            if vars(kind)[_METHOD] is noting:
                setattr(kind, _METHOD, original)

    def _noting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def sharded_state_dict(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            made = original(optimizer, *args, **kwargs)
            is_loading = kwargs.get("is_loading", args[1] if len(args) > 1 else False)
            if self._in_place and not is_loading:  # among nested optimizers, the outermost returns last
                self._newest = made, weakref.ref(optimizer)
            return made

        return sharded_state_dict


def _children(weights: Any) -> Iterable[Any]:
    if isinstance(weights, dict):
        return weights.values()
    return weights if isinstance(weights, list | tuple) else ()


def _below(kind: type[Any]) -> Iterator[type[Any]]:
    child: type[Any]
    for child in kind.__subclasses__():
        yield child
        yield from _below(child)


@dataclass(frozen=True)
class SavedState:
    """State that a save receives in addition to the model.

    Attributes:
        optimizer: Megatron's optimizer; None on a rank that has none.
        sharded: the model's weights, and with them all ``ShardedObject``s, whose data is plain.
        state: everything else, by name, as plain values.
    """

    optimizer: Any
    sharded: Mapping[str, Any]
    state: Mapping[str, Any]

    @staticmethod
    def of(state_dict: Mapping[str, Any], weights: Any, optimizer: tuple[str | None, Any]) -> SavedState:
        """Sort a state dict.

        Args:
            state_dict: the saved state dict.
            weights: the part of it that is the model.
            optimizer: result of `OptimizerNotes.taken`.

        Raises:
            InvalidArgument: it contains shards of tensors that belong neither to the model nor to the optimizer.
        """
        from megatron.core.dist_checkpointing import ShardedObject
        from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
        from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase

        def is_sharded(value: Any) -> bool:
            return isinstance(value, ShardedBase | LocalNonpersistentObject)

        name, found = optimizer
        objects: list[Any] = []
        state: dict[str, Any] = {}
        of_model = {id(entry) for entry in sharded_entries(weights)}
        parts = [weights, *_children(weights)]
        for key, value in state_dict.items():
            if key == name or any(value is each for each in parts):
                continue
            if is_sharded(value):
                sharded, others = value, None
            elif isinstance(value, dict | list):
                sharded, others = extract_matching_values(value, is_sharded)
            else:
                sharded, others = {}, value
            entries = [entry for entry in sharded_entries(sharded) if id(entry) not in of_model]
            for entry in entries:
                if not isinstance(entry, ShardedObject):
                    raise InvalidArgument(
                        f"{key} has shards of {entry.key}, which belongs neither to the model nor to its optimizer",
                        fix="save it with a separate call, or push weights alone: push_on_save(..., training=False)",
                    )
                objects.append(replace(entry, data=plain(entry.data)))
            # in this order: a single value may be a tensor, which has no truth value
            if not sharded or others:
                state[key] = plain(others)
        return SavedState(found, {"model": weights, "objects": objects}, state)

    def check(self, rank: int) -> None:
        """Refuse values that `TrainerClient.push` would refuse, with the same errors."""
        held = training_tensors(sharded_tensors(self.sharded), self.optimizer)
        training_state(held, rank, self.state, None)
