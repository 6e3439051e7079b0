"""Settings of where weights come from: what a user of vLLM writes into ``--model-loader-extra-config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from weighbridge.errors import InvalidArgument
from weighbridge.integrations.engine_rank.source import ModelSource

_TYPES: Mapping[str, tuple[type, ...]] = {
    "server": (str,),
    "model": (str,),
    "version": (str, int),
    "lane": (str,),
    "retry_seconds": (int, float),
}


@dataclass(frozen=True)
class Settings:
    """A version of a model at a service.

    Attributes:
        model: ``namespace/name``.
        version: a number or a ref.
        server: ``host:port`` of the service's gRPC face; None for ``WEIGHBRIDGE_SERVER``, or 127.0.0.1:50051.
        lane: how weights travel, as for `EngineClient`; None for ``WEIGHBRIDGE_LANE``, or ``auto``.
        retry_seconds: how long to keep trying when the service cannot be reached.
    """

    model: str
    version: str = "latest"
    server: str | None = None
    lane: str | None = None
    retry_seconds: float = 60.0

    @staticmethod
    def read(given: Mapping[str, Any], model: str) -> Settings:
        """The settings in an extra config.

        Args:
            given: what the user has written.
            model: which model it is if they do not name one.

        Raises:
            InvalidArgument: a key is unknown, or a value is no text.
        """
        for key, value in given.items():
            if key not in _TYPES:
                raise InvalidArgument(
                    f"the extra config of load format weighbridge has no {key!r}",
                    fix=f"it has {', '.join(_TYPES)}",
                )
            if type(value) not in _TYPES[key]:
                raise InvalidArgument(f"{key} in the extra config of load format weighbridge is {value!r}")
        return Settings(
            str(given.get("model", model)),
            str(given.get("version", "latest")),
            given.get("server"),
            given.get("lane"),
            float(given.get("retry_seconds", 60.0)),
        )

    @property
    def source(self) -> ModelSource:
        """The same without the version."""
        return ModelSource(self.model, self.server, self.lane, self.retry_seconds)

    def write(self) -> dict[str, Any]:
        """As an extra config that `read` reads."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def source_for(
    known: ModelSource | None, model: str | None, server: str | None, lane: str | None
) -> ModelSource | None:
    """What is known of where versions come from, with what is said of it now; None if no model is known."""
    if model is not None and (known is None or known.model != model):
        known = ModelSource(model)
    return known and replace(known, server=server or known.server, lane=lane or known.lane)
