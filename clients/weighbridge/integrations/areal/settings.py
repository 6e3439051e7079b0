"""Settings of AReaL's actors, from the environment: AReaL's configuration has no place for others' keys, and hands the environment on to workers."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weighbridge.errors import InvalidArgument
from weighbridge.integrations.engine_rank.source import ModelSource

MODEL, SERVER, LANE = "WEIGHBRIDGE_MODEL", "WEIGHBRIDGE_SERVER", "WEIGHBRIDGE_LANE"


@dataclass(frozen=True)
class Settings:
    """What an actor knows of the service.

    Attributes:
        source: service and model.
        run: name of the training run.
        path: AReaL's ``actor.path``: a folder, or a name on the Hub whose files this machine has.
    """

    source: ModelSource
    run: str
    path: str

    @staticmethod
    def of(config: Any, environment: Mapping[str, str] = os.environ) -> Settings:
        """Of an actor.

        Args:
            config: AReaL's ``PPOActorConfig``.
            environment: of the process.

        Raises:
            InvalidArgument: no model is named, or AReaL is to update weights by NCCL.
        """
        model = environment.get(MODEL, "")
        if not model:
            raise InvalidArgument(
                f"{MODEL} does not say which model the actors push", fix=f"set it, as in {MODEL}=acme/policy"
            )
        if config.weight_update_mode != "disk":
            raise InvalidArgument(
                f"actor.weight_update_mode is {config.weight_update_mode!r}: rollouts would wait for NCCL",
                fix="set actor.weight_update_mode=disk",
            )
        run = f"{config.experiment_name}/{config.trial_name}"
        source = ModelSource(model, environment.get(SERVER), environment.get(LANE))
        return Settings(source, run, config.path)

    def hand_on(self, environment: MutableMapping[str, str]) -> None:
        """Complete the environment of a worker by what this one was told."""
        said = {MODEL: self.source.model, SERVER: self.source.server, LANE: self.source.lane}
        for name, value in said.items():
            if value is not None:
                environment.setdefault(name, value)

    def hf_dir(self) -> Path:
        """The folder with ``config.json`` and tokenizer."""
        folder = Path(self.path)
        if folder.is_dir():
            return folder
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(self.path, local_files_only=True))
