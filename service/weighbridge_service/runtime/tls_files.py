"""Files of TLS: paths of a service's certificate, key and client authorities."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Files of TLS (PEM).

    Attributes:
        certificate: certificate of the service, with the chain to its authority.
        key: private key of the certificate.
        client_ca: authorities that issue certificates of clients; None if the service does not ask clients for
            certificates.
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None
