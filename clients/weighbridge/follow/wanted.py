"""Order for a version: the service, the model and the version that a request or a model path names.

Pure text: neither SGLang nor torch is needed to write it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from weighbridge.errors import InvalidArgument

SCHEME = "weighbridge"
LOAD_FORMAT = "weighbridge.integrations.sglang.load"
"""The ``load_format`` of a request to ``/update_weights_from_tensor`` that brings a version."""
ACTION = "weighbridge."
"""Beginning of the ``action`` of requests to ``/weights_checker`` that are about versions."""
PREPARE, DISCARD, STATUS = ACTION + "prepare", ACTION + "discard", ACTION + "status"
"""Actions; behind the first one and a blank comes a `Wanted` as JSON."""
EVIDENCE, COMPARE = ACTION + "evidence", ACTION + "compare_with_load"
"""Actions of proofs; behind the first one and blanks come digests of recordings that the caller has, with commas between them or none, and a `Wanted`."""
REPORTED = "reported"
"""Follows the last one and a blank: the caller reports to the service what the engine serves."""


@dataclass(frozen=True)
class Wanted:
    """A version.

    Attributes:
        server: ``host:port`` of the service's gRPC face.
        model: ``namespace/name``.
        version: a number or a ref.
        lane: how weights travel, as for `weighbridge.Client`; None leaves it to each rank's environment.
        retry_seconds: how long to keep trying when the service cannot be reached.
        stale_drafter: policy for a version that leaves the drafter of speculative decoding behind: ``refuse``, as None does, or ``allow`` it.
    """

    server: str
    model: str
    version: str = "latest"
    lane: str | None = None
    retry_seconds: float = 20.0
    stale_drafter: str | None = None

    def __post_init__(self) -> None:
        if (
            not self.server
            or self.model.count("/") != 1
            or not all(self.model.split("/"))
            or not self.version
        ):
            raise InvalidArgument(
                f"{self} names no version", fix=f"as in {SCHEME}://HOST:PORT/acme/smol@latest"
            )

    @staticmethod
    def from_url(url: str) -> Wanted:
        """Read ``weighbridge://HOST:PORT/NAMESPACE/NAME`` with ``@VERSION`` behind it, or without for ``latest``.

        Raises:
            InvalidArgument: it names no version.
        """
        server, _, rest = url.removeprefix(f"{SCHEME}://").partition("/")
        model, at, version = rest.strip("/").partition("@")
        return Wanted(server, model, version if at else "latest")

    @staticmethod
    def from_json(text: str) -> Wanted:
        """Read what `to_json` has written.

        Raises:
            InvalidArgument: the text is something else.
        """
        try:
            found: Any = json.loads(text)
            return Wanted(**{**found, "version": str(found.get("version", "latest"))})
        except (AttributeError, TypeError, ValueError) as error:
            raise InvalidArgument(
                f"{text[:200]!r} does not say which version is wanted: {error}",
                fix='as in {"server": "HOST:PORT", "model": "acme/smol", "version": "latest"}',
            ) from error

    def to_json(self) -> str:
        """As a text that `from_json` reads."""
        return json.dumps({key: value for key, value in asdict(self).items() if value is not None})

    def __str__(self) -> str:
        return f"{self.model}@{self.version}"
