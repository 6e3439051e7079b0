"""Settings of the adapters that an engine serves, from ``WEIGHBRIDGE_ADAPTERS``.

Pure, except for the environment that is passed in.
"""

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
_LIKE = f"""write {VARIABLE}='acme/*', or {VARIABLE}='{{"patterns": ["acme/*"], "server": "10.0.0.1:50051"}}'"""


@dataclass(frozen=True)
class AdapterSettings:
    """Adapters that an engine serves.

    Attributes:
        patterns: patterns of adapter names, such as ``acme/*``. vLLM handles other names.
        server: ``host:port`` of the service's gRPC endpoint; None for the server of load format weighbridge,
            ``WEIGHBRIDGE_SERVER``, or 127.0.0.1:50051.
        lane: how weights travel, as for `weighbridge.EngineClient`.
        base: the base version, such as ``acme/smol@17``, of an engine that was started from a folder; ignored if the
            engine has a version from the service.
        retry_seconds: how long a request waits while the service is unreachable.
        unknown_seconds: how long a name that the service does not know is refused without another query.
        keep_versions: maximum number of adapter versions that an API server knows, and that the host's folder contains.
        keep_bytes: maximum bytes of adapters in the host's folder.
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
        """Raise InvalidArgument for impossible values."""
        if not all(self.patterns) or not self.patterns:
            raise InvalidArgument(f"{VARIABLE} has no patterns", fix=_LIKE)
        if self.base:
            found = parse_reference(self.base, by_number=True)
            if found.number < 1:
                raise InvalidArgument(f"base of {VARIABLE} is {self.base!r}")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not value >= least:
                raise InvalidArgument(f"{name} of {VARIABLE} is {value!r}, not a number of at least {least}")

    @staticmethod
    def read(text: str) -> AdapterSettings:
        """Parse the settings: patterns separated by commas, or a JSON object.

        Raises:
            InvalidArgument: the text is neither, a setting does not exist, or a value is invalid.
        """
        if not text.lstrip().startswith("{"):
            return AdapterSettings(_patterns(text))
        try:
            said = json.loads(text)
        except ValueError as error:
            raise InvalidArgument(f"{VARIABLE} is not JSON: {error}", fix=_LIKE) from error
        patterns = said.pop("patterns", ())
        if isinstance(patterns, str):
            patterns = _patterns(patterns)
        if not isinstance(patterns, list | tuple) or not all(isinstance(each, str) for each in patterns):
            raise InvalidArgument(f"patterns of {VARIABLE} are {patterns!r}", fix=_LIKE)
        return AdapterSettings(tuple(patterns), **checked(AdapterSettings, said, VARIABLE))

    @staticmethod
    def of(environment: Mapping[str, str]) -> AdapterSettings | None:
        """The settings in an environment; None if adapters are not enabled."""
        text = environment.get(VARIABLE, "").strip()
        return AdapterSettings.read(text) if text else None

    def within(self, load_format: str, extra: Mapping[str, Any]) -> AdapterSettings:
        """These settings with the service of load format weighbridge, if they do not name one."""
        if load_format != "weighbridge" or self.server is not None:
            return self
        return replace(self, server=extra.get("server"), lane=self.lane or extra.get("lane"))

    def serves(self, model: str) -> bool:
        """Whether a model, named without a version, is one of these adapters."""
        return any(fnmatchcase(model, each) for each in self.patterns)


def _patterns(text: str) -> tuple[str, ...]:
    return tuple(each.strip() for each in text.split(",") if each.strip())
