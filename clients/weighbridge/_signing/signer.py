"""Signer: a private key, alone or with a certificate. It stays in this process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from weighbridge._core.text.extras import needs_extra
from weighbridge._signing.bundle import Bundle
from weighbridge._signing.statement import Statement
from weighbridge.errors import InvalidArgument

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

__all__ = ["Signer"]

EXTRA = "signing"
_CURVES = ("secp256r1", "secp384r1", "secp521r1")
_MAKE_KEY = "make one: openssl ecparam -name prime256v1 -genkey -noout -out KEY.pem"


class PasswordNeeded(InvalidArgument):
    """A private key is encrypted, and there is no password or a wrong one."""


class Signer:
    """Signs versions.

    Args:
        key: file of a private key (PEM) on the curve P-256, P-384 or P-521.
        password: password of the key, if it is encrypted.
        certificate: file of the key's certificate (PEM), which may also contain its chain; None to sign with the key
            alone.
        chain: files of further certificates of the chain.

    Raises:
        InvalidArgument: a file has other content, or the certificate is not the key's or has expired.
        PasswordNeeded: the key is encrypted, and the password is missing or wrong.
        FailedPrecondition: the packages for signing are not installed.
        OSError: a file cannot be read.

    Attributes:
        private_key: PEM text of the key, without encryption.
        public_key: PEM text of the public key.
        certificates: PEM text of its certificate and the chain; empty if it signs with the key alone.
        certificate_der: its certificate alone, as DER; empty if it has none.
    """

    def __init__(
        self,
        key: str | Path,
        *,
        password: str | None = None,
        certificate: str | Path | None = None,
        chain: Iterable[str | Path] = (),
    ) -> None:
        with needs_extra(EXTRA, "signing"):
            from cryptography.hazmat.primitives import serialization

            from weighbridge._signing import library  # noqa: F401 (said now, and not at the first signature)
        private = _private_key(Path(key), password)
        self.private_key = private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        self.public_key = private.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        self.certificates: tuple[bytes, ...] = ()
        self.certificate_der: tuple[bytes, ...] = ()
        if certificate is not None:
            found = [each for path in (certificate, *chain) for each in read_certificates(Path(path))]
            check_usable(found[0], str(certificate))
            if found[0].public_key() != private.public_key():
                raise InvalidArgument(f"{certificate} is not the certificate of the key in {key}")
            self.certificate_der = (found[0].public_bytes(serialization.Encoding.DER),)
            self.certificates = tuple(each.public_bytes(serialization.Encoding.PEM) for each in found)

    def __repr__(self) -> str:
        return f"<Signer by {self.method}>"

    @property
    def method(self) -> str:
        """Method of signing: ``key`` or ``certificate``."""
        return "certificate" if self.certificates else "key"


def sign(signer: Signer, statement: Statement) -> bytes:
    """The signature of a statement, as a bundle."""
    from weighbridge._signing import library

    return library.sign(statement, signer.private_key, signer.certificates)


def has_signed(signer: Signer, bundle: Bundle) -> bool:
    """Whether a signature is by a signer's key and, if the signer has one, its certificate."""
    from weighbridge._signing import library

    if bundle.certificates[:1] != signer.certificate_der:
        return False
    # the signed statement does not name the signer; model-signing checks certificates only against their authorities
    by_key = {"publicKey": {"hint": key_id(signer.public_key)}, "tlogEntries": []}
    relabelled = json.dumps({**json.loads(bundle.content), "verificationMaterial": by_key})
    try:
        library.verify_by_key(bundle.statement, relabelled.encode(), signer.public_key)
    except Exception:  # model-signing raises errors of several libraries
        return False
    return True


def _private_key(path: Path, password: str | None) -> ec.EllipticCurvePrivateKey:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    content = path.read_bytes()
    try:
        key = serialization.load_pem_private_key(content, None if password is None else password.encode())
    except TypeError as error:  # a password is missing, or is given to a key without one
        if password is not None:
            return _private_key(path, None)
        raise PasswordNeeded(
            f"the key in {path} is encrypted", fix="give its password: WEIGHBRIDGE_KEY_PASSWORD"
        ) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        if password is not None and b"ENCRYPTED" in content:
            raise PasswordNeeded(f"the password is not that of the key in {path}") from error
        raise InvalidArgument(f"{path} holds no private key that can be read", fix=_MAKE_KEY) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name not in _CURVES:
        raise InvalidArgument(f"{path} holds {kind_of(key)}, not one on P-256, P-384 or P-521", fix=_MAKE_KEY)
    return key


def key_id(public_key: bytes) -> str:
    """Identifier of a key in signatures: SHA-256 of its PEM text, as 64 hex digits."""
    return hashlib.sha256(public_key).hexdigest()


def is_supported(key: object) -> bool:
    """Whether signatures by a public key can be checked."""
    from cryptography.hazmat.primitives.asymmetric import ec

    return isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name in _CURVES


def kind_of(key: object) -> str:
    """A key's kind for messages, such as ``an RSA key``."""
    curve = getattr(getattr(key, "curve", None), "name", "")
    name = type(key).__name__.strip("_").removesuffix("PrivateKey").removesuffix("PublicKey")
    return f"a key on {curve}" if curve else f"a key of the kind {name}"


def read_certificates(path: Path) -> list[x509.Certificate]:
    """The certificates of a file (PEM). Raises InvalidArgument if there are none."""
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except ValueError as error:
        raise InvalidArgument(f"{path} holds no certificate (PEM)") from error


def check_usable(certificate: x509.Certificate, where: str) -> None:
    """Raise InvalidArgument if a certificate is not valid now, or its key cannot sign versions.

    A signature has no trusted time, so it counts only as long as its certificate is valid.
    """
    now = datetime.now(UTC)
    if now > certificate.not_valid_after_utc:
        raise InvalidArgument(
            f"the certificate in {where} expired on {certificate.not_valid_after_utc:%Y-%m-%d}",
            fix="sign with a new one",
        )
    if now < certificate.not_valid_before_utc:
        raise InvalidArgument(
            f"the certificate in {where} is valid from {certificate.not_valid_before_utc:%Y-%m-%d} on",
            fix="check this machine's clock",
        )
    if not is_supported(certificate.public_key()):
        raise InvalidArgument(
            f"the certificate in {where} has {kind_of(certificate.public_key())}, not one on P-256, P-384 or P-521"
        )
