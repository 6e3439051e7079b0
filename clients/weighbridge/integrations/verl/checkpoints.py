"""verl's checkpoint managers with the service as their store, instead of one file per rank.

verl has no setting for a checkpoint manager. Before each worker creates its engine, it imports the module in
``model.external_lib``. This module then installs its managers where verl's engines look for theirs.

    actor_rollout_ref.model.external_lib=weighbridge.integrations.verl.checkpoints

``WEIGHBRIDGE_CHECKPOINTS`` names the model, ``WEIGHBRIDGE_SERVER`` the service. verl still stores a critic's
checkpoints itself.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from verl.utils.checkpoint import fsdp_checkpoint_manager
from verl.utils.checkpoint.checkpoint_manager import get_checkpoint_tracker_filename

from weighbridge._trainers.checkpoint_manager import CheckpointManager
from weighbridge._trainers.states.plain_values import plain
from weighbridge._trainers.trainer import TrainerClient
from weighbridge.errors import InvalidArgument, NotFound
from weighbridge.integrations.checkpoint_names import step_named

MODEL = "WEIGHBRIDGE_CHECKPOINTS"
"""The variable that names the model."""
RUN = "verl-checkpoints"
"""Name of the run in the versions' lineage. It distinguishes a save from a weight update of the same step."""
_CRITIC = "critic"
_RANDOM = "random"
_SCHEDULER = "lr_scheduler"


class _StoredCheckpoints:
    """A checkpoint manager's ``save_checkpoint`` and ``load_checkpoint``, which override those of verl's class.

    The folder is created but stays empty: verl looks for it and its number when it resumes. ``save_contents`` and
    ``load_contents`` are respected, except that parameters are always saved, and no Hugging Face folder is written (use
    ``weighbridge export``).
    """

    def _module(self) -> Any:
        raise NotImplementedError

    def _random_states(self) -> Any:
        raise NotImplementedError

    def _set_random_states(self, states: Any) -> None:
        raise NotImplementedError

    def _loads_scheduler(self) -> bool:
        raise NotImplementedError

    def _is_stored(self, local_path: str | None) -> bool:
        """Whether a checkpoint goes to the service."""
        return local_path is not None and Path(local_path).name != _CRITIC

    def save_checkpoint(
        self: Any, local_path: str, hdfs_path: Any = None, global_step: int = 0, max_ckpt_to_keep: Any = None
    ) -> None:
        """Push everything that training needs to resume, and return when it is stored; verl then records that the
        checkpoint exists.

        Raises:
            WeighbridgeError: as `CheckpointManager.save` and `CheckpointManager.wait`.
        """
        if not self._is_stored(local_path):
            super().save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)  # type: ignore[misc]
            return
        self.previous_global_step = global_step
        saves_extra = self.should_save_extra
        checkpoints = self._checkpoints(
            self.optimizer if self.should_save_optimizer else None,
            {_SCHEDULER: self.lr_scheduler} if saves_extra and self.lr_scheduler is not None else {},
            {_RANDOM: plain(self._random_states())} if saves_extra else None,
        )
        checkpoints.save(global_step)
        checkpoints.wait()
        Path(local_path).mkdir(parents=True, exist_ok=True)
        dist.barrier()
        if dist.get_rank() == 0:
            if getattr(
                self.checkpoint_config, "async_save", False
            ):  # verl leaves the tracker file to the code that saves
                root = str(Path(local_path).parent.parent)
                Path(get_checkpoint_tracker_filename(root)).write_text(str(global_step))
            self.register_checkpoint(local_path, max_ckpt_to_keep)

    def load_checkpoint(self: Any, local_path: str, hdfs_path: Any = None, del_local_after_load: bool = False) -> None:
        """Restore the newest training state of the step in a folder's name ``global_step_<step>``. If the number of
        ranks differs, random states are not restored.

        Raises:
            NotFound: no such training state exists.
            WeighbridgeError: as `CheckpointManager.restore`.
        """
        if not self._is_stored(local_path):
            super().load_checkpoint(local_path, hdfs_path, del_local_after_load)  # type: ignore[misc]
            return
        step = _step_of(local_path)
        loads_extra = self.should_load_extra
        kept: dict[str, Any] = {_RANDOM: None}
        state = {_SCHEDULER: self.lr_scheduler} if self.lr_scheduler is not None and self._loads_scheduler() else {}
        checkpoints = self._checkpoints(
            self.optimizer if self.should_load_optimizer else None, state, kept if loads_extra else None
        )
        found = checkpoints.find(step)
        if found is None:
            raise NotFound(
                f"there is no training state of step {step} of {_model()}",
                fix=(
                    f"weighbridge versions {_model()}:training lists them; {local_path} was saved "
                    f"without {MODEL}, or was deleted"
                ),
            )
        fits = found.ranks == dist.get_world_size()
        checkpoints.restore(found.number, rank_state=fits)
        if loads_extra and fits:
            self._set_random_states(kept[_RANDOM])
        dist.barrier()

    def _checkpoints(
        self: Any,
        optimizer: Any,
        state: MutableMapping[str, Any],
        rank_state: MutableMapping[str, Any] | None,
    ) -> CheckpointManager:
        return CheckpointManager(_client(), _model(), self._module(), optimizer, state=state, rank_state=rank_state)


class WeighbridgeFSDPCheckpointManager(
    _StoredCheckpoints,
    fsdp_checkpoint_manager.FSDPCheckpointManager,  # type: ignore[misc]  # verl is seen as untyped
):
    """verl's manager of FSDP2 actors, with the service as its store."""

    def _module(self) -> Any:
        return self.model

    def _random_states(self) -> Any:
        return self.get_rng_state()

    def _set_random_states(self, states: Any) -> None:
        self.load_rng_state(states)

    def _loads_scheduler(self) -> bool:
        return bool(self.should_load_extra)


@functools.cache
def megatron_manager() -> type[Any]:
    """verl's manager of Megatron actors, with the service as its store.

    Raises:
        ImportError: Megatron-core is not installed.
    """
    from verl.utils.checkpoint.megatron_checkpoint_manager import MegatronCheckpointManager

    class WeighbridgeMegatronCheckpointManager(_StoredCheckpoints, MegatronCheckpointManager):  # type: ignore[misc]
        def _is_stored(self, local_path: str | None) -> bool:
            return not self.use_megatron_fsdp and super()._is_stored(local_path)

        def _module(self) -> Any:
            return list(self.model)

        def _random_states(self) -> Any:
            return self.get_rng_state(use_dist_ckpt=False)

        def _set_random_states(self, states: Any) -> None:
            self.load_rng_states(states, use_dist_ckpt=False)

        def _loads_scheduler(self) -> bool:
            return bool(self.should_load_optimizer and self.use_checkpoint_opt_param_scheduler)

    return WeighbridgeMegatronCheckpointManager


def put_in_place() -> None:
    """Make verl's engines create these managers.

    Already imported engines look their managers up in their own modules, others in the module where verl defines them.
    """
    managers = {"fsdp_checkpoint_manager.FSDPCheckpointManager": WeighbridgeFSDPCheckpointManager}
    with contextlib.suppress(ImportError):  # there are no Megatron actors then
        managers["megatron_checkpoint_manager.MegatronCheckpointManager"] = megatron_manager()
    for place, manager in managers.items():
        module, _, name = place.rpartition(".")
        holders = [importlib.import_module(f"verl.utils.checkpoint.{module}")]
        holders += [
            found
            for engine in ("fsdp", "megatron")
            if (found := sys.modules.get(f"verl.workers.engine.{engine}.transformer_impl"))
        ]
        for holder in holders:
            if hasattr(holder, name):
                setattr(holder, name, manager)


def _step_of(local_path: str) -> int:
    for part in reversed(Path(local_path).parts):
        step = step_named(part)
        if step is not None:
            return step
    raise InvalidArgument(
        f"{local_path} does not contain a step",
        fix="name the folder as verl does: global_step_<step>/actor",
    )


def _model() -> str:
    model = os.environ.get(MODEL, "")
    if not model:
        raise InvalidArgument(
            f"{MODEL} does not name the model of the checkpoints",
            fix=f"set it on all workers: +ray_kwargs.ray_init.runtime_env.env_vars.{MODEL}=acme/policy",
        )
    return model


@functools.cache
def _client() -> TrainerClient:
    return TrainerClient(run=RUN)


put_in_place()
