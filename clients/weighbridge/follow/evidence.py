"""Evidence of what the parameters of one rank hold, and what its comparison with a version gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from weighbridge._core.json_values import JsonValue


@dataclass(frozen=True, slots=True)
class Evidence(JsonValue):
    """Digests of one rank's parameters, as it computes with them.

    Attributes:
        served: `label` of the version that the rank says it serves; empty if none.
        recording: `Recording.digest` of what the rank takes of a version.
        recorded: the recording itself, as JSON; empty if the caller has it.
        digests: of each parameter that lies as it was loaded.
        unseen: other parameters, by name, and why a version does not say what they must be.
        seconds: for which the rank made the digests.
        untested: whether the parameters came by a recording that was never compared, on the rank's machine, with a load by the engine's own loader.
    """

    served: str
    recording: str
    recorded: str
    digests: Mapping[str, Sequence[int]] = field(default_factory=dict)
    unseen: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    untested: bool = False

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> Evidence:
        """Read what `to_json` has written; keys that an engine adds are left out."""
        return Evidence(**{each.name: found[each.name] for each in fields(Evidence) if each.name in found})


@dataclass(frozen=True, slots=True)
class RankProof(JsonValue):
    """Result for one rank.

    Attributes:
        served: the version that the rank says it serves.
        compared: how many parameters have the bytes of the version, or have not.
        wrong: names of those that have not.
        unseen: parameters that could not be compared, by name, and why.
        seconds: for which the rank made its digests.
    """

    served: str
    compared: int
    wrong: tuple[str, ...]
    unseen: Mapping[str, str]
    seconds: float

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> RankProof:
        """Read what `to_json` has written."""
        said = {each.name: found[each.name] for each in fields(RankProof)}
        return RankProof(**{**said, "wrong": tuple(said["wrong"])})
