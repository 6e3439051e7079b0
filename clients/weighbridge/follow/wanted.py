"""Reference to a version: the service, the model and the version that a request or a model path names.

It is a string, so that creating it requires neither SGLang nor torch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from weighbridge.errors import InvalidArgument

SCHEME = "weighbridge"
LOAD_FORMAT = "weighbridge.integrations.sglang.load"
"""The ``load_format`` of a request to ``/update_weights_from_tensor`` that loads a version."""
ACTION = "weighbridge."
"""Prefix of the ``action`` of requests to ``/weights_checker`` about versions."""
PREPARE, DISCARD, STATUS = ACTION + "prepare", ACTION + "discard", ACTION + "status"
"""Actions. The first one is followed by a space and a `Wanted` as JSON."""
EVIDENCE, COMPARE = ACTION + "evidence", ACTION + "compare_with_load"
"""Actions of proofs.

The first one is followed by the digests of the caller's recordings, separated by commas (may be empty), and a `Wanted`,
each after a space.
"""
REPORTED = "reported"
"""Follows the last action after a space: the caller reports the served version to the service."""


@dataclass(frozen=True)
class Wanted:
    """A version.

    Attributes:
        server: ``host:port`` of the service's gRPC endpoint.
        model: ``namespace/name``.
        version: a number or a ref.
        lane: how weights travel, as for `weighbridge.Client`; None uses each rank's environment.
        retry_seconds: how long to retry while the service is unreachable.
        stale_drafter: policy for a version that leaves the drafter of speculative decoding behind: ``refuse`` (also
            None) or ``allow``.
    """

    server: str
    model: str
    version: str = "latest"
    lane: str | None = None
    retry_seconds: float = 20.0
    stale_drafter: str | None = None

    def __post_init__(self) -> None:
        if not self.server or self.model.count("/") != 1 or not all(self.model.split("/")) or not self.version:
            raise InvalidArgument(f"{self} does not name a version", fix=f"as in {SCHEME}://HOST:PORT/acme/smol@latest")

    @staticmethod
    def from_url(url: str) -> Wanted:
        """Read ``weighbridge://HOST:PORT/NAMESPACE/NAME`` with the suffix ``@VERSION``, or without it for ``latest``.

        Raises:
            InvalidArgument: the URL names no version.
        """
        server, _, rest = url.removeprefix(f"{SCHEME}://").partition("/")
        model, at, version = rest.strip("/").partition("@")
        return Wanted(server, model, version if at else "latest")

    @staticmethod
    def from_json(text: str) -> Wanted:
        """Parse the result of `to_json`.

        Raises:
            InvalidArgument: the string has a different form.
        """
        try:
            found: Any = json.loads(text)
            return Wanted(**{**found, "version": str(found.get("version", "latest"))})
        except (AttributeError, TypeError, ValueError) as error:
            raise InvalidArgument(
                f"{text[:200]!r} does not specify the wanted version: {error}",
                fix='as in {"server": "HOST:PORT", "model": "acme/smol", "version": "latest"}',
            ) from error

    def to_json(self) -> str:
        """A string that `from_json` parses."""
        return json.dumps({key: value for key, value in asdict(self).items() if value is not None})

    def __str__(self) -> str:
        return f"{self.model}@{self.version}"
