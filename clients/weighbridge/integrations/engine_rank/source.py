"""Source of an engine's weights: the service and the model, and the version that was taken from there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, get_type_hints

from weighbridge._clients.engine import EngineClient
from weighbridge._core.resources import Version
from weighbridge._core.text.suggestions import did_you_mean
from weighbridge.errors import InvalidArgument
from weighbridge.follow.status import label


@dataclass(frozen=True)
class ModelSource:
    """A model at a service.

    Attributes:
        model: ``namespace/name``.
        server: ``host:port`` of the service's gRPC face; None for ``WEIGHBRIDGE_SERVER``, or 127.0.0.1:50051.
        lane: how weights travel, as for `EngineClient`; None for ``WEIGHBRIDGE_LANE``, or ``auto``.
        retry_seconds: how long to keep trying when the service cannot be reached.
    """

    model: str
    server: str | None = None
    lane: str | None = None
    retry_seconds: float = 60.0

    @classmethod
    def read(cls, given: Mapping[str, Any], of: str) -> Self:
        """Settings as a user has written them.

        Args:
            given: by name.
            of: what has them, for errors.

        Raises:
            InvalidArgument: there is no such setting, a value is of another type, or no model is named.
        """
        kinds = get_type_hints(cls)
        given = {name: value for name, value in given.items() if value is not None or name not in kinds}
        for name, value in given.items():
            if name not in kinds:
                raise InvalidArgument(
                    f"{of} has no {name!r}{did_you_mean(str(name), kinds)}", fix=f"it has {', '.join(kinds)}"
                )
            kind = kinds[name] | int if isinstance(0.5, kinds[name]) else kinds[name]
            if isinstance(value, bool) or not isinstance(value, kind):
                raise InvalidArgument(f"{name} of {of} is {value!r}")
        if "model" not in given:
            raise InvalidArgument(f"{of} names no model", fix="set model, as in acme/policy")
        return cls(**given)

    @property
    def init_info(self) -> dict[str, str]:
        """The same for the ranks of an engine, without what they know themselves."""
        said = {"server": self.server, "model": self.model, "lane": self.lane}
        return {name: value for name, value in said.items() if value is not None}

    def connect(self) -> EngineClient:
        """A client of the service; it connects when it is first used."""
        return EngineClient(self.server, lane=self.lane, retry_seconds=self.retry_seconds)


@dataclass(frozen=True)
class Held:
    """The version in a rank's parameters.

    Attributes:
        source: where it came from.
        version: which one.
        nbytes: bytes that it cost this rank.
    """

    source: ModelSource
    version: Version
    nbytes: int

    @property
    def label(self) -> str:
        """Its name, as in ``acme/smol@17``."""
        return label(self.version.model, self.version.number)
