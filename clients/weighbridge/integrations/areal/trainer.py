"""Trainer of AReaL whose actor pushes its weights to the service: `PPOTrainer` with one method overridden."""

from __future__ import annotations

import importlib
from typing import Any

from areal.trainer.rl_trainer import PPOTrainer
from areal.utils.environ import is_single_controller

from weighbridge.errors import InvalidArgument
from weighbridge.integrations.areal.settings import ActorSettings

_ACTORS = {"fsdp": ("fsdp", "WeighbridgeFSDPActor"), "megatron": ("megatron", "WeighbridgeMegatronActor")}
"""Module and class for each of AReaL's backend names."""


class WeighbridgePPOTrainer(PPOTrainer):  # type: ignore[misc]  # AReaL is seen as untyped
    """AReaL's `PPOTrainer`: the same arguments, configuration and methods."""

    def _create_train_engine(self, actor_config: Any, alloc: Any) -> Any:
        """Create the actor. The reference and the teacher, which push no updates, are AReaL's own.

        Raises:
            InvalidArgument: settings are missing, or no actor exists for this backend.
        """
        if actor_config is not self.config.actor:
            return super()._create_train_engine(actor_config, alloc)
        settings = ActorSettings.of(actor_config)
        actor_class = actor_of(alloc.backend)
        if is_single_controller():
            for spec in actor_config.scheduling_spec:
                settings.hand_on(spec.env_vars)
            actor = actor_class.as_controller(actor_config, self.scheduler)
        else:
            actor = actor_class(config=actor_config)
        actor.create_process_group(parallel_strategy=alloc.parallel)
        return actor


def actor_of(backend: str) -> Any:
    """The actor class of a backend; imported on demand.

    Raises:
        InvalidArgument: no class exists for this backend.
    """
    if backend not in _ACTORS:
        raise InvalidArgument(
            f"actors of AReaL's backend {backend!r} do not push to the service",
            fix=f"use one of {', '.join(_ACTORS)}",
        )
    module, name = _ACTORS[backend]
    return getattr(importlib.import_module(f"weighbridge.integrations.areal.{module}"), name)
