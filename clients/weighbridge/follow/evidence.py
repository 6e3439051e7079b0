"""Evidence of the values in one rank's parameters, and the result of its comparison with a version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from weighbridge._core.json_values import JsonValue


@dataclass(frozen=True, slots=True)
class Evidence(JsonValue):
    """Digests of the parameters that one rank computes with.

    Attributes:
        served: `label` of the version that the rank reports as served; empty if none.
        recording: `Recording.digest` of the rank's recording.
        recorded: the recording itself, as JSON; empty if the caller has it.
        digests: digest of each parameter that is stored as it was loaded.
        unseen: other parameters, by name, and why their values cannot be derived from a version.
        seconds: time that the rank spent on the digests.
        untested: whether the parameters were placed by a recording that was never compared, on the rank's machine, with
            a load by the engine's own loader.
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
        """Parse the result of `to_json`; keys that an engine adds are ignored."""
        return Evidence(**{each.name: found[each.name] for each in fields(Evidence) if each.name in found})


@dataclass(frozen=True, slots=True)
class RankProof(JsonValue):
    """Result for one rank.

    Attributes:
        served: the version that the rank reports as served.
        compared: number of compared parameters, equal or not.
        wrong: names of parameters that differ from the version.
        unseen: parameters that could not be compared, by name, with the reason.
        seconds: time that the rank spent on its digests.
    """

    served: str
    compared: int
    wrong: tuple[str, ...]
    unseen: Mapping[str, str]
    seconds: float

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> RankProof:
        """Parse the result of `to_json`."""
        said = {each.name: found[each.name] for each in fields(RankProof)}
        return RankProof(**{**said, "wrong": tuple(said["wrong"])})
