"""Where weights come from: what a user of vLLM writes into ``--model-loader-extra-config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weighbridge.engine import EngineClient
from weighbridge.errors import InvalidArgument

_KEYS = ("server", "model", "version", "lane")


@dataclass(frozen=True)
class Settings:
    """A version of a model at a service.

    Attributes:
        model: ``namespace/name``.
        version: a number or a ref.
        server: ``host:port`` of the service's gRPC face; None for ``WEIGHBRIDGE_SERVER``, or 127.0.0.1:50051.
        lane: how weights travel, as for `EngineClient`; None for ``WEIGHBRIDGE_LANE``, or by gRPC.
    """

    model: str
    version: str = "latest"
    server: str | None = None
    lane: str | None = None

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
            if key not in _KEYS:
                raise InvalidArgument(
                    f"the extra config of load format weighbridge has no {key!r}",
                    fix=f"it has {', '.join(_KEYS)}",
                )
            if not (isinstance(value, str) or (key == "version" and type(value) is int)):
                raise InvalidArgument(f"{key} in the extra config of load format weighbridge is {value!r}")
        return Settings(
            str(given.get("model", model)),
            str(given.get("version", "latest")),
            given.get("server"),
            given.get("lane"),
        )

    def connect(self) -> EngineClient:
        """A client of the service."""
        return EngineClient(self.server, lane=self.lane)

    def write(self) -> dict[str, str]:
        """As an extra config that `read` reads."""
        found = {"model": self.model, "version": self.version, "server": self.server, "lane": self.lane}
        return {key: value for key, value in found.items() if value is not None}
