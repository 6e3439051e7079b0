"""Weight updates on the ranks of an AReaL actor: each rank pushes its own shards, and rank 0 makes the rollouts load
the version.

AReaL's own updates gather the model on rank 0 or for a broadcast, while generation is paused. Here it is paused only
while engines load.
"""

from __future__ import annotations

import copy
import shutil
import time
import uuid
from abc import abstractmethod
from concurrent.futures import wait
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from areal.infra.platforms import current_platform
from areal.utils import name_resolve, names

from weighbridge._clients.push_handle import PushHandle
from weighbridge._core.resources import VersionState
from weighbridge._trainers.trainer import TrainerClient
from weighbridge.errors import DeadlineExceeded, FailedPrecondition, NotFound
from weighbridge.integrations.areal.settings import TIMEOUT, ActorSettings
from weighbridge.integrations.engine_rank.agreement import ProcessGroup, RanksFailed, agree, exchange
from weighbridge.integrations.pausing import paused
from weighbridge.integrations.weight_updates import WeightUpdate

_MARK_SECONDS = 120
"""Lifetime of the mark that a folder is complete. AReaL's engines wait for the mark equally long."""


class UpdatesByWeighbridge:
    """Updates of an actor that replace AReaL's updates from a disk. Must precede AReaL's own class among the bases.

    Attributes:
        pushed: the newest push of this rank.
    """

    pushed: PushHandle | None = None
    _ticket = ""
    """Ticket that, with the number of the update, joins the ranks' pushes into one version; empty until all ranks know
    that they can push.
    """
    _updates = 0
    """Number of updates that this rank has begun."""
    _left: tuple[Path, ...] = ()
    """Folders of updates that rollouts failed to load; some rollouts may still be reading them."""

    def update_weights(self: Any, meta: Any) -> None:
        """Push a version and make all rollouts load it. All ranks call it.

        The version is downloaded to AReaL's own folder (``cluster.fileroot``, which its nodes share). LoRA adapters,
        which are small, use AReaL's own update.

        Args:
            meta: AReaL's ``WeightUpdateMeta``, of type ``disk``.

        Raises:
            RanksFailed: on all ranks, if it failed on any. If ranks could not push, rollouts were not changed.
                Generation always resumes.
        """
        if meta.use_lora:
            super().update_weights(meta)  # type: ignore[misc]  # AReaL's, by the class that this is mixed into
            return
        self._check_rollout_engine_connected()
        number, ranks = self.push_version(meta), ProcessGroup(self.cpu_group)
        agree(
            ranks,
            f"rollouts did not get {self._settings.model}@{number}",
            lambda: self._bring(number, meta) if ranks.rank == 0 else None,
        )
        current_platform.synchronize()

    def push_version(self: Any, meta: Any) -> int:
        """Push the weights, and wait until they can be pulled. Returns the version's number. All ranks call it.

        Args:
            meta: as for `update_weights`; its version is the step.

        Raises:
            RanksFailed: on all ranks, if it failed on any.
        """
        ranks = ProcessGroup(self.cpu_group)
        if not self._ticket:
            refusal = "not all ranks can push their weights"
            self._ticket = exchange(ranks, refusal, lambda: self._begin(ranks))[0]
        self._updates += 1
        request_id = f"{self._ticket}/{self._updates}"
        try:
            number: int = agree(ranks, "the weights were not pushed", lambda: self._push(ranks, request_id, meta))
        except RanksFailed:
            self._ticket = ""
            raise
        return number

    @abstractmethod
    def shards(self) -> Any:
        """Shards that this rank pushes, in the form that `hand_over` accepts."""

    @abstractmethod
    def hand_over(self, client: TrainerClient, model: str, shards: Any, **said: Any) -> PushHandle:
        """Push this rank's shards; ``said`` contains the arguments common to all push methods."""

    @cached_property
    def _settings(self: Any) -> ActorSettings:
        return ActorSettings.of(self.config)

    @cached_property
    def _client(self) -> TrainerClient:
        return self._settings.trainer()

    def _begin(self: Any, ranks: ProcessGroup) -> str:
        """Check that this rank can push, before the first update and after a failed one: otherwise the other ranks
        would wait for it. Rank 0 registers the model.

        Returns:
            A ticket for the following updates.
        """
        with self._offload_aware_context():  # before any step that may fail: onload and offload wait for all ranks
            settings, client = self._settings, self._client
            self.shards()
            if ranks.rank == 0:
                client.register_model(settings.model, settings.folder())
            else:
                with suppress(NotFound):  # rank 0 is registering it
                    client.model(settings.model)
        return WeightUpdate.new().ticket

    def _push(self: Any, ranks: ProcessGroup, request_id: str, meta: Any) -> int:
        with self._offload_aware_context():
            self.pushed = handle = self.hand_over(
                self._client,
                self._settings.model,
                self.shards(),
                step=self.get_version() if meta.version is None else meta.version,
                rank=ranks.rank,
                world_size=ranks.size,
                request_id=request_id,
            )
            timeout = self._settings.timeout_seconds
            if ranks.rank:
                handle.report(timeout)
            else:  # one rank waits for all ranks, which receive the outcome from it
                handle.wait(VersionState.READY, timeout=timeout)
        return int(handle.number)

    def _bring(self: Any, number: int, meta: Any) -> None:
        """Download a version while engines generate, and make them load it the way AReaL makes them load its own
        saves.
        """
        if meta.path is None:
            raise FailedPrecondition(
                "AReaL does not name the folder from which rollouts read weights",
                fix="set actor.weight_update_mode=disk",
            )
        deadline = time.monotonic() + self._settings.timeout_seconds
        # engines may still read the folder of a failed attempt
        folder = Path(f"{meta.path}-{uuid.uuid4().hex[:8]}")
        self._download(number, folder, deadline)
        self._left += (folder,)
        ours = copy.copy(meta)
        ours.path = str(folder)
        self._load(ours, deadline)
        *left, _ = self._left  # AReaL removes folders after loading them
        self._left = ()
        for each in left:
            shutil.rmtree(each, ignore_errors=True)

    def _download(self: Any, number: int, folder: Path, deadline: float) -> None:
        def check(*_: int) -> None:
            if time.monotonic() > deadline:
                raise self._too_late("download the version")

        source = self._settings.of_engines
        try:
            with source.connect() as client:
                client.export(source.model, number, folder, on_progress=check)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _load(self: Any, meta: Any, deadline: float) -> None:
        engine, config = self.rollout_engine, self.config
        saved = names.update_weights_from_disk(config.experiment_name, config.trial_name, self.get_version())
        with paused(engine.pause_generation, engine.continue_generation):
            name_resolve.add(saved, str(time.time()), keepalive_ttl=_MARK_SECONDS, replace=True)
            loading = engine.update_weights_from_disk(meta)
            if not wait([loading], max(deadline - time.monotonic(), 0.0)).done:
                raise self._too_late("load the version")
            loading.result()

    def _too_late(self: Any, what: str) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"it took longer than {self._settings.timeout_seconds:g} s to {what}", fix=f"raise {TIMEOUT}"
        )
