"""Settings of the adapters that an engine serves: what a user writes into ``WEIGHBRIDGE_ADAPTERS``. Pure but for the environment that is handed in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from weighbridge._core.references import parse_reference
from weighbridge.errors import InvalidArgument
from weighbridge.integrations.settings import checked

VARIABLE = "WEIGHBRIDGE_ADAPTERS"
_LEAST = {"retry_seconds": 0, "unknown_seconds": 0, "keep_versions": 1, "keep_bytes": 1}
_LIKE = (
    f"""write {VARIABLE}='acme/*', or {VARIABLE}='{{"patterns": ["acme/*"], "server": "10.0.0.1:50051"}}'"""
)


@dataclass(frozen=True)
class AdapterSettings:
    """Adapters that an engine serves.

    Attributes:
        patterns: of names of adapters, such as ``acme/*``. Other names are left to vLLM.
        server: ``host:port`` of the service's gRPC face; None for that of load format weighbridge, ``WEIGHBRIDGE_SERVER``, or 127.0.0.1:50051.
        lane: how weights travel, as for `weighbridge.EngineClient`.
        base: the version that an engine serves which was started from a folder, such as ``acme/smol@17``; ignored where the engine has a version of
            the service.
        retry_seconds: how long a request waits for a service that cannot be reached.
        unknown_seconds: how long a name that the service does not know is refused without being asked for again.
        keep_versions: most versions of adapters that an API server knows, and most in the folder of the host.
        keep_bytes: most bytes of adapters in the folder of the host.
    """

    patterns: tuple[str, ...]
    server: str | None = None
    lane: str | None = None
    base: str = ""
    retry_seconds: float = 5.0
    unknown_seconds: float = 5.0
    keep_versions: int = 256
    keep_bytes: int = 8 << 30

    def __post_init__(self) -> None:
        """Raise InvalidArgument for what cannot be."""
        if not all(self.patterns) or not self.patterns:
            raise InvalidArgument(f"{VARIABLE} has no patterns", fix=_LIKE)
        if self.base:
            found = parse_reference(self.base, by_number=True)
            if found.number < 1:
                raise InvalidArgument(f"base of {VARIABLE} is {self.base!r}")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not value >= least:
                raise InvalidArgument(f"{name} of {VARIABLE} is {value!r}, not a number from {least} on")

    @staticmethod
    def read(text: str) -> AdapterSettings:
        """Settings as a user has written them: patterns with commas between them, or a JSON object.

        Raises:
            InvalidArgument: it is neither, there is no such setting, or a value cannot be.
        """
        if not text.lstrip().startswith("{"):
            return AdapterSettings(_patterns(text))
        try:
            said = json.loads(text)
        except ValueError as error:
            raise InvalidArgument(f"{VARIABLE} is no JSON: {error}", fix=_LIKE) from error
        patterns = said.pop("patterns", ())
        if isinstance(patterns, str):
            patterns = _patterns(patterns)
        if not isinstance(patterns, list | tuple) or not all(isinstance(each, str) for each in patterns):
            raise InvalidArgument(f"patterns of {VARIABLE} are {patterns!r}", fix=_LIKE)
        return AdapterSettings(tuple(patterns), **checked(AdapterSettings, said, VARIABLE))

    @staticmethod
    def of(environment: Mapping[str, str]) -> AdapterSettings | None:
        """The settings in an environment; None if adapters are not asked for."""
        text = environment.get(VARIABLE, "").strip()
        return AdapterSettings.read(text) if text else None

    def within(self, load_format: str, extra: Mapping[str, Any]) -> AdapterSettings:
        """The same with the service that load format weighbridge has, where no other one is named."""
        if load_format != "weighbridge" or self.server is not None:
            return self
        return replace(self, server=extra.get("server"), lane=self.lane or extra.get("lane"))

    def serves(self, model: str) -> bool:
        """Whether a model, named without a version, is one of these adapters."""
        return any(fnmatchcase(model, each) for each in self.patterns)


def _patterns(text: str) -> tuple[str, ...]:
    return tuple(each.strip() for each in text.split(",") if each.strip())
