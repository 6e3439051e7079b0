"""Certificates, tokens and policies of tests: a real authority, and an issuer that signs with a key of its own."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jwt
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from weighbridge import Credentials
from weighbridge_service.access import tokens
from weighbridge_service.runtime.tls_files import TlsFiles

ISSUER = "https://issuer.test"
AUDIENCE = "weighbridge"


class Authority:
    """An authority that issues certificates.

    Args:
        folder: folder for the files of certificates.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ca = trustme.CA()
        folder.mkdir(parents=True, exist_ok=True)
        self.ca = folder / "ca.pem"
        self._ca.cert_pem.write_to_path(str(self.ca))

    def issue(self, *names: str, common_name: str | None = None, under: str = "") -> tuple[Path, Path]:
        """A certificate and its private key; one of the same file name is replaced."""
        issued = self._ca.issue_cert(*names, common_name=common_name)
        stem = under or "".join(each if each.isalnum() else "-" for each in (*names, common_name or ""))
        certificate, key = self._folder / f"{stem}.pem", self._folder / f"{stem}.key"
        certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        key.write_bytes(issued.private_key_pem.bytes())
        return certificate, key

    def client_called(self, *names: x509.GeneralName) -> Credentials:
        """Credentials with a certificate of exactly these alternative names, whatever they are."""
        authority = x509.load_pem_x509_certificate(self._ca.cert_pem.bytes())
        signing = serialization.load_pem_private_key(self._ca.private_key_pem.bytes(), None)
        assert isinstance(signing, ec.EllipticCurvePrivateKey)
        key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
        issued = (
            x509.CertificateBuilder(authority.subject, x509.Name([]), key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.SubjectAlternativeName(names), critical=True)
            .sign(signing, hashes.SHA256())
        )
        stem = self._folder / str(issued.serial_number)
        certificate, private = stem.with_suffix(".pem"), stem.with_suffix(".key")
        certificate.write_bytes(issued.public_bytes(serialization.Encoding.PEM))
        private.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return Credentials(ca=str(self.ca), certificate=str(certificate), key=str(private))

    def tls(self, *, asks_clients: bool = False) -> TlsFiles:
        """Files of a service at this machine's own addresses."""
        certificate, key = self.issue("127.0.0.1", "localhost", under="service")
        return TlsFiles(certificate, key, self.ca if asks_clients else None)

    def client(self, *names: str, token: str | None = None) -> Credentials:
        """Credentials that trust this authority, with a certificate if there are names for one."""
        if not names:
            return Credentials(ca=str(self.ca), token=token)
        certificate, key = self.issue(*names)
        return Credentials(ca=str(self.ca), certificate=str(certificate), key=str(key), token=token)


class TokenIssuer:
    """An issuer of JSON web tokens.

    Args:
        folder: folder for its public keys.
    """

    def __init__(self, folder: Path) -> None:
        self._key = rsa.generate_private_key(65537, 2048)
        self.keys = folder / "jwks.json"
        folder.mkdir(parents=True, exist_ok=True)
        public = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(self._key.public_key()))
        self.keys.write_text(json.dumps({"keys": [{**public, "kid": "one", "alg": "RS256"}]}))

    def token(self, subject: str, *, seconds: float = 600, kid: str = "one", **claims: Any) -> str:
        """A token that expires in so many seconds."""
        said = {"iss": ISSUER, "aud": AUDIENCE, "sub": subject, "exp": time.time() + seconds, **claims}
        return jwt.encode(said, self._key, algorithm="RS256", headers={"kid": kid})

    @property
    def table(self) -> str:
        """Its part of a policy."""
        return (
            f'[[issuer]]\nname = "test"\nissuer = "{ISSUER}"\naudience = "{AUDIENCE}"\n'
            f'algorithms = ["RS256"]\nkeys = "{self.keys}"\n'
        )


def identity(name: str, may: Iterable[str], **proofs: Any) -> str:
    """An identity's part of a policy; ``token`` stands for the digest of one."""
    if "token" in proofs:
        proofs["tokens"] = [tokens.digest(proofs.pop("token"))]
    lines = [f"{key} = {json.dumps(value)}" for key, value in {"name": name, "may": list(may), **proofs}.items()]
    return "[[identity]]\n" + "\n".join(lines) + "\n"


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """Metadata of a call that shows a token."""
    return (("authorization", f"Bearer {token}"),)


def policy_file(folder: Path, *parts: str) -> Path:
    """A policy of these parts."""
    path = folder / "policy.toml"
    path.write_text("\n".join(parts))
    return path
