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
TIMEOUT = "WEIGHBRIDGE_TIMEOUT_SECONDS"
_TIMEOUT_SECONDS = 1500.0
_LONGEST_SECONDS = 7200.0
"""After which the ranks of AReaL's own groups give up waiting for each other."""


@dataclass(frozen=True)
class Settings:
    """What an actor knows of the service.

    Attributes:
        source: service and model.
        run: name of the training run.
        path: AReaL's ``actor.path``: a folder, or a name on the Hub whose files this machine has.
        timeout_seconds: within which all ranks' shards must have arrived, and then, anew, within which rollouts must have loaded them.
    """

    source: ModelSource
    run: str
    path: str
    timeout_seconds: float = _TIMEOUT_SECONDS

    @staticmethod
    def of(config: Any, environment: Mapping[str, str] = os.environ) -> Settings:
        """Of an actor.

        Args:
            config: AReaL's ``PPOActorConfig``.
            environment: of the process.

        Raises:
            InvalidArgument: no model is named, AReaL is to update weights by NCCL, or the timeout is no such number.
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
        return Settings(source, run, config.path, _timeout(environment.get(TIMEOUT)))

    def hand_on(self, environment: MutableMapping[str, str]) -> None:
        """Complete the environment of a worker by what this one was told."""
        said = {
            MODEL: self.source.model,
            SERVER: self.source.server,
            LANE: self.source.lane,
            TIMEOUT: f"{self.timeout_seconds:g}",
        }
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


def _timeout(said: str | None) -> float:
    try:
        found = float(said or _TIMEOUT_SECONDS)
    except ValueError:
        found = 0.0
    if not 0.0 < found < _LONGEST_SECONDS:
        raise InvalidArgument(
            f"{TIMEOUT} is {said!r}",
            fix=f"seconds, less than the {_LONGEST_SECONDS:g} after which AReaL's ranks give up waiting for each other",
        )
    return found
