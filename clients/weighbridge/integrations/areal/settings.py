"""Settings of AReaL's actors, from the environment: AReaL's configuration accepts no foreign keys, but AReaL passes the
environment to workers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weighbridge.errors import InvalidArgument
from weighbridge.integrations.weight_updates import UpdateSettings

MODEL, SERVER, LANE = "WEIGHBRIDGE_MODEL", "WEIGHBRIDGE_SERVER", "WEIGHBRIDGE_LANE"
TIMEOUT = "WEIGHBRIDGE_TIMEOUT_SECONDS"
_VARIABLES = {"model": MODEL, "server": SERVER, "lane": LANE}
_TIMEOUT_SECONDS = 1500.0
_LONGEST_SECONDS = 7200.0
"""Timeout of AReaL's own process groups."""


@dataclass(frozen=True)
class ActorSettings(UpdateSettings):
    """Settings of an actor.

    The folder is AReaL's ``actor.path``, or the name of one on the Hub whose files this machine has.

    Attributes:
        timeout_seconds: time within which the shards of all ranks must arrive; the same time applies again to the load
            by rollouts.
    """

    timeout_seconds: float = _TIMEOUT_SECONDS

    @staticmethod
    def of(config: Any, environment: Mapping[str, str] = os.environ) -> ActorSettings:
        """Settings of an actor.

        Args:
            config: AReaL's ``PPOActorConfig``.
            environment: environment of the process.

        Raises:
            InvalidArgument: no model is named, AReaL is configured to update weights by NCCL, or the timeout is not a
                valid number.
        """
        said: dict[str, Any] = {name: environment[each] for name, each in _VARIABLES.items() if environment.get(each)}
        if "model" not in said:
            raise InvalidArgument(
                f"{MODEL} does not name the model that the actors push",
                fix=f"set it, as in {MODEL}=acme/policy",
            )
        if config.weight_update_mode != "disk":
            raise InvalidArgument(
                f"actor.weight_update_mode is {config.weight_update_mode!r}: rollouts would wait for NCCL",
                fix="set actor.weight_update_mode=disk",
            )
        run = f"{config.experiment_name}/{config.trial_name}"
        timeout = _timeout(environment.get(TIMEOUT))
        return ActorSettings(**said, run=run, hf_dir=config.path, timeout_seconds=timeout)

    def hand_on(self, environment: MutableMapping[str, str]) -> None:
        """Add these settings to the environment of a worker, except for variables that are already set."""
        for name, variable in _VARIABLES.items():
            if (value := getattr(self, name)) is not None:
                environment.setdefault(variable, value)
        environment.setdefault(TIMEOUT, f"{self.timeout_seconds:g}")

    def folder(self) -> Path:
        """The folder with ``config.json`` and tokenizer."""
        named = str(self.hf_dir)
        folder = Path(named)
        if folder.is_dir():
            return folder
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(named, local_files_only=True))


def _timeout(said: str | None) -> float:
    try:
        found = float(said or _TIMEOUT_SECONDS)
    except ValueError:
        found = 0.0
    if not 0.0 < found < _LONGEST_SECONDS:
        raise InvalidArgument(
            f"{TIMEOUT} is {said!r}",
            fix=(
                f"set a number of seconds, less than the {_LONGEST_SECONDS:g} after which AReaL's "
                "ranks give up waiting for each other"
            ),
        )
    return found
