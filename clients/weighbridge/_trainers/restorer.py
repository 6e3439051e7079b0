"""Restores of one trainer's client.

Any version, with or without a training state, is restored into the tensors that a rank holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import MutableMapping
from functools import partial
from typing import Any

from weighbridge._clients.connection import Connection
from weighbridge._clients.filling import fill_tensors
from weighbridge._core.references import Reference, is_training
from weighbridge._core.resources import Version
from weighbridge._core.text.counts import counted, first_lines
from weighbridge._formats.megatron_state import as_registered, sharded_tensors
from weighbridge._formats.torch_state import check_not_copied, torch_shards
from weighbridge._trainers import restoring
from weighbridge._trainers.known_tensors import KnownTensors
from weighbridge._trainers.training import Beside, restore_training
from weighbridge.errors import LayoutError


class Restorer:
    """Restores weights and training states.

    Args:
        connection: connection of the client.
        known: cache of the tensors of models.
    """

    def __init__(self, connection: Connection, known: KnownTensors) -> None:
        self._connection = connection
        self._known = known

    def megatron(self, meant: Reference, sharded_state_dict: Any, beside: Beside[MutableMapping[str, Any]]) -> Version:
        """Fill a sharded state dict of Megatron-core; see `TrainerClient.restore`."""
        import torch

        shards = sharded_tensors(sharded_state_dict)
        if is_training(meant.model) or beside.given:
            from weighbridge._trainers.states.megatron_training import MegatronRestore

            return restore_training(self._connection, meant, MegatronRestore(shards, beside.optimizer), beside)
        with torch.no_grad(), self._known.registered(meant.model, shards.layout) as registered:
            weights = as_registered(shards, registered, filled=True)
            filled = partial(restoring.megatron_shards, self._connection, meant, weights.layout)
            # a sharded state dict holds at least one shard
            cast = fill_tensors(weights.layout, weights.tensors, filled, device="cpu")
            [(restored, _)] = deque(cast, maxlen=1)
            shards.finish_restore()
        return restored

    def state_dict(
        self, meant: Reference, held_by: Any, strict: bool, beside: Beside[MutableMapping[str, Any]]
    ) -> Version:
        """Fill a torch model; see `TrainerClient.restore_state_dict`."""
        import torch

        if is_training(meant.model) or beside.given:
            from weighbridge._trainers.states.torch_training import TorchRestore

            restore = TorchRestore(held_by, beside.optimizer, strict=strict)
            return restore_training(self._connection, meant, restore, beside)
        with self._known.of(meant.model) as tensors, torch.no_grad():
            held = torch_shards(held_by, tensors, whole=strict, others=not strict, filled=True, of=meant.model)
            if held.unknown and not held.tensors:
                raise LayoutError(
                    f"{meant.model} has none of the {counted(len(held.unknown), 'tensor')} that are to be restored",
                    details=first_lines(held.unknown),
                    fix="give them the names that the model's safetensors files have",
                )
            if isinstance(held_by, torch.nn.Module):
                check_not_copied(held_by, held.layout, held.tensors)
            return restoring.hugging_face_shards(self._connection, meant, held.layout, held.tensors)
