"""Status of one rank: the JSON that every engine returns and that agents read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from weighbridge._core.json_values import JsonValue

_AND = " + "


def label(model: str, number: int, draft: str = "") -> str:
    """The name of a version, such as ``acme/smol@17``.

    Args:
        model: ``namespace/name``.
        number: number of the version.
        draft: the name of the drafter's version, if the drafter is a separate model:
            ``acme/smol@17 + acme/smol-eagle@5`` names both.
    """
    return f"{model}@{number}{_AND}{draft}" if draft else f"{model}@{number}"


def drafter_in(named: str) -> str:
    """The drafter's version in a `label`; empty if it contains none."""
    return named.partition(_AND)[2]


def policy_in(named: str) -> str:
    """A `label` without the drafter's version."""
    return named.partition(_AND)[0]


def is_version(named: str, wanted: str) -> bool:
    """Whether a `label` matches the wanted one. If that names no drafter's version, any drafter's version matches."""
    return named == wanted or policy_in(named) == wanted


@dataclass(frozen=True, slots=True)
class Status(JsonValue):
    """Versions of one rank, each by its `label`.

    Attributes:
        served: the version in the parameters; empty if they belong to none, or did not come from the service.
        preparing: the version that is being fetched to host memory; empty if there is none.
        prepared: the version in host memory; empty if there is none.
        nbytes: bytes of the version that is or was being prepared.
        seconds: duration of its preparation; 0 before it has ended.
        early_seconds: how much of that had passed when the version was requested, because the rank began while the
            version was still being received.
        error: why the last preparation failed; empty if it did not.
        broken: why the parameters belong to no version; empty if they belong to one, or never did.
        instance: id of this start of the rank. Two servers behind one address, and a server before and after a restart,
            have different ids.
        waiting: the version that the engine's wake-up will apply; empty if there is none.
        stale: weights of the engine that do not belong to the served version, such as a drafter's, and why; empty if
            there are none.
        brought: number of versions written to the parameters since this rank was started; a wake-up may write the same
            version again.
    """

    served: str = ""
    preparing: str = ""
    prepared: str = ""
    nbytes: int = 0
    seconds: float = 0.0
    error: str = ""
    broken: str = ""
    instance: str = field(default="", compare=False)
    waiting: str = ""
    early_seconds: float = 0.0
    stale: str = ""
    brought: int = field(default=0, compare=False)

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> Status:
        """Parse the result of `to_json`; keys that an engine adds are ignored."""
        return Status(**{each.name: found[each.name] for each in fields(Status) if each.name in found})
