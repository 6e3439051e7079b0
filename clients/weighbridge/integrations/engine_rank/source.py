"""Source of an engine's weights: the service and the model, and the version that was loaded from there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from weighbridge import _lazy as lazy
from weighbridge._clients.engine import EngineClient
from weighbridge._core.resources import Version
from weighbridge.errors import InvalidArgument
from weighbridge.follow.status import label
from weighbridge.integrations.settings import checked


@dataclass(frozen=True)
class ModelSource:
    """A model at a service.

    Attributes:
        model: ``namespace/name``.
        server: ``host:port`` of the service's gRPC endpoint; None for ``WEIGHBRIDGE_SERVER``, or 127.0.0.1:50051.
        lane: how weights travel, as for `EngineClient`; None for ``WEIGHBRIDGE_LANE``, or ``auto``.
        retry_seconds: how long to retry while the service is unreachable.
    """

    model: str
    server: str | None = None
    lane: str | None = None
    retry_seconds: float = 60.0

    draft = ""  # not a user setting: only a `PairSource` has one

    @classmethod
    def read(cls, given: Mapping[str, Any], of: str) -> Self:
        """Parse settings that a user wrote.

        Arguments and errors as for `checked`; also InvalidArgument if no model is named.
        """
        given = checked(cls, given, of)
        if "model" not in given:
            raise InvalidArgument(f"{of} does not name a model", fix="set model, as in acme/policy")
        return cls(**given)

    @property
    def init_info(self) -> dict[str, str]:
        """The same settings for the ranks of an engine, without those that they know already."""
        said = {"server": self.server, "model": self.model, "lane": self.lane}
        return {name: value for name, value in said.items() if value is not None}

    def connect(self) -> EngineClient:
        """A client of the service; it connects when it is first used."""
        return EngineClient(self.server, lane=self.lane, retry_seconds=self.retry_seconds)

    def with_draft(self, draft: str) -> ModelSource:
        """The same model with a version of a drafter, such as ``acme/smol-eagle@5``; an empty string removes it."""
        same = self.model, self.server, self.lane, self.retry_seconds
        return PairSource(*same, draft) if draft else ModelSource(*same)

    def label(self, number: int) -> str:
        """The name of a version, with the name of the drafter's version."""
        return label(self.model, number, self.draft)

    def open(self, client: EngineClient, version: str | int) -> lazy.Source:
        """Open a version, and the drafter's version if there is one.

        Raises:
            NotFound: the model, version or ref does not exist.
        """
        if self.draft:
            return lazy.Pair(client, self.model, version, self.draft)
        return lazy.Source(client, self.model, version)


@dataclass(frozen=True)
class PairSource(ModelSource):
    """A model at a service, with a version of the engine's drafter, which is a separate model there.

    Each update fetches both.

    Attributes:
        draft: that version, such as ``acme/smol-eagle@5``.
    """

    draft: str = ""


def check_draft(draft: str) -> None:
    """Raise InvalidArgument unless a string is empty or names a version by its number, such as
    ``acme/smol-eagle@5``.
    """
    model, _, number = draft.rpartition("@")
    if draft and not (model.count("/") == 1 and number.isdecimal()):
        raise InvalidArgument(
            f"{draft!r} does not name a version of a drafter",
            fix="name it by its number, as in acme/smol-eagle@5",
        )


@dataclass(frozen=True)
class Held:
    """The version in a rank's parameters.

    Attributes:
        source: where it came from, with the drafter's version that came with it.
        version: the version.
        nbytes: bytes that this rank fetched for it.
    """

    source: ModelSource
    version: Version
    nbytes: int

    @property
    def label(self) -> str:
        """Its name, such as ``acme/smol@17``, with the name of the drafter's version if there is one."""
        return self.source.label(self.version.number)
