"""Status of one rank: the JSON that every engine answers with, and that agents read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from weighbridge._core.json_values import JsonValue

_AND = " + "


def label(model: str, number: int, draft: str = "") -> str:
    """The name of a version, as in ``acme/smol@17``.

    Args:
        model: ``namespace/name``.
        number: of the version.
        draft: the name of the version that the drafter has, if that is a model of its own: ``acme/smol@17 + acme/smol-eagle@5`` names both.
    """
    return f"{model}@{number}{_AND}{draft}" if draft else f"{model}@{number}"


def drafter_in(named: str) -> str:
    """The drafter's version in a `label`; empty if it has none."""
    return named.partition(_AND)[2]


def policy_in(named: str) -> str:
    """A `label` without the drafter's version."""
    return named.partition(_AND)[0]


def is_version(named: str, wanted: str) -> bool:
    """Whether a `label` is the one that is wanted; with any version of a drafter, if none of it is wanted."""
    return named == wanted or policy_in(named) == wanted


@dataclass(frozen=True, slots=True)
class Status(JsonValue):
    """Versions of one rank, each by its `label`.

    Attributes:
        served: the version in the parameters; empty if they are of none, or did not come from the service.
        preparing: the version on its way to host memory; empty if there is none.
        prepared: the version in host memory; empty if there is none.
        nbytes: bytes of the version that is being prepared or has been.
        seconds: how long its preparation took; 0 before it has ended.
        early_seconds: how much of that had passed when the rank was asked for the version: it had begun while the version was still being received.
        error: why the last preparation failed; empty if it did not.
        broken: why the parameters are of no version; empty if they are of one, or never were.
        instance: which start of this rank answers: two servers behind one address, and a server before and after a restart, have different ones.
        waiting: the version that the wake-up of the engine will bring; empty if there is none.
        stale: weights of the engine that are not of the version served, as a drafter's, and why; empty if there are none.
        brought: how many versions were brought to the parameters since this rank was started; a wake-up may bring the one that it had.
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
        """Read what `to_json` has written; keys that an engine adds are left out."""
        return Status(**{each.name: found[each.name] for each in fields(Status) if each.name in found})
