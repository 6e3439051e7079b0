"""Files of TLS: where a service's certificate lies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Files of TLS (PEM).

    Attributes:
        certificate: the service's certificate, and what leads to its authority.
        key: its private key.
        client_ca: authorities that issue certificates of clients; None if clients are not asked for any.
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None
