"""Updates of weights on the ranks of an AReaL actor: each hands over its own shards, and rank 0 has the rollouts load the version.

AReaL's own updates gather the model, on rank 0 or to be broadcast, while generation stands still. Here it stands still only while
engines load.
"""

from __future__ import annotations

import shutil
import time
import uuid
from abc import abstractmethod
from functools import cached_property
from typing import Any

import torch.distributed as dist
from areal.infra.platforms import current_platform
from areal.utils import name_resolve, names

from weighbridge._clients.push_handle import PushHandle
from weighbridge._clients.trainer import TrainerClient
from weighbridge._core.resources import VersionState
from weighbridge.errors import FailedPrecondition
from weighbridge.integrations.areal.settings import Settings
from weighbridge.integrations.engine_rank.agreement import ProcessGroup, agree, from_first
from weighbridge.integrations.pausing import paused

_MARK_SECONDS = 120
"""How long AReaL's engines are told that a folder is complete; they wait as long to be told."""


class UpdatesByWeighbridge:
    """What an actor does instead of AReaL's updates from a disk. Goes before AReaL's own class among the bases.

    Attributes:
        pushed: the newest push of this rank.
    """

    pushed: PushHandle | None = None

    def update_weights(self: Any, meta: Any) -> None:
        """Push a version and have all rollouts load it. All ranks call it.

        The version is downloaded to AReaL's own folder (``cluster.fileroot``, which its nodes share). Adapters of LoRA, which are small, go by
        AReaL's own update.

        Args:
            meta: AReaL's ``WeightUpdateMeta``, of type ``disk``.

        Raises:
            RanksFailed: on all ranks, if it failed on any. Rollouts were not touched if ranks could not push; generation goes on in any case.
        """
        if meta.use_lora:
            super().update_weights(meta)  # type: ignore[misc]  # AReaL's, by the class that this is mixed into
            return
        self._check_rollout_engine_connected()
        number, ranks = self.push_version(meta), ProcessGroup(self.cpu_group)
        agree(
            ranks,
            f"rollouts did not get {self._settings.source.model}@{number}",
            lambda: self._bring(number, meta) if ranks.rank == 0 else None,
        )
        current_platform.synchronize()

    def push_version(self: Any, meta: Any) -> int:
        """Push the weights, and wait until they can be pulled; the version's number. All ranks call it.

        Args:
            meta: as for `update_weights`; its version is the step.

        Raises:
            RanksFailed: on all ranks, if it failed on any.
        """
        ranks = ProcessGroup(self.cpu_group)
        ticket = from_first(ranks, self._begin)
        with self._offload_aware_context():
            number: int = agree(ranks, "the weights were not pushed", lambda: self._push(ticket, meta))
        return number

    @abstractmethod
    def hand_over(self, client: TrainerClient, model: str, **said: Any) -> PushHandle:
        """Push this rank's shards; ``said`` is what every way to push takes."""

    @cached_property
    def _settings(self: Any) -> Settings:
        return Settings.of(self.config)

    @cached_property
    def _client(self) -> TrainerClient:
        source = self._settings.source
        return TrainerClient(
            source.server, run=self._settings.run, lane=source.lane, retry_seconds=source.retry_seconds
        )

    def _begin(self) -> str:
        """Register the model, once; a ticket by which the ranks of this update find each other."""
        if self.pushed is None:
            self._client.register_model(self._settings.source.model, self._settings.hf_dir())
        return uuid.uuid4().hex

    def _push(self: Any, ticket: str, meta: Any) -> int:
        self.pushed = handle = self.hand_over(
            self._client,
            self._settings.source.model,
            step=self.get_version() if meta.version is None else meta.version,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            request_id=ticket,
        )
        version = handle.wait(VersionState.READY)
        return int(version.number)

    def _bring(self: Any, number: int, meta: Any) -> None:
        """Download a version while engines generate, and have them load it, as AReaL has them load what it has saved."""
        if meta.path is None:
            raise FailedPrecondition(
                "AReaL does not say where rollouts read weights", fix="set actor.weight_update_mode=disk"
            )
        shutil.rmtree(meta.path, ignore_errors=True)  # left by an update that failed
        source = self._settings.source
        with source.connect() as client:
            client.export(source.model, number, meta.path)
        engine, config = self.rollout_engine, self.config
        saved = names.update_weights_from_disk(config.experiment_name, config.trial_name, self.get_version())
        with paused(engine.pause_generation, engine.continue_generation):
            name_resolve.add(saved, str(time.time()), keepalive_ttl=_MARK_SECONDS, replace=True)
            engine.update_weights_from_disk(meta).result()
