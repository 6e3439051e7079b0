"""Trust: public keys and authorities that the caller trusts, and whether a signature is by one of them."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from weighbridge._core.text.extras import needs_extra
from weighbridge._signing.bundle import Bundle
from weighbridge._signing.signer import EXTRA, check_usable, is_supported, key_id, kind_of
from weighbridge.errors import InvalidArgument

__all__ = ["Trusted"]

log = logging.getLogger(__name__)

_BLOCK = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----.*?-----END \1-----", re.DOTALL)
_SHOWN = 16
"""Digits of a key's digest in messages."""


@dataclass(frozen=True, slots=True)
class Trusted:
    """Public keys and authorities; a signature by any of them counts.

    Attributes:
        name: their name in messages.
        keys: PEM text of each public key, by its SHA-256.
        authorities: PEM text of the authorities' certificates; empty if there are none.
    """

    name: str
    keys: Mapping[str, bytes] = field(repr=False)
    authorities: bytes = field(default=b"", repr=False)

    @staticmethod
    def of_file(path: str | Path) -> Trusted:
        """Read a file (PEM) of any number of public keys and of authorities' certificates.

        Raises:
            InvalidArgument: it has none, or something else, or keys that cannot sign versions.
            FailedPrecondition: the packages for checking signatures are not installed.
            OSError: it cannot be read.
        """
        return Trusted.of_text(Path(path).read_bytes(), str(path))

    @staticmethod
    def of_text(content: bytes, name: str) -> Trusted:
        """As `of_file`, from the file's content."""
        with needs_extra(EXTRA, "checking signatures"):
            from cryptography import x509
            from cryptography.exceptions import UnsupportedAlgorithm
            from cryptography.hazmat.primitives import serialization

            from weighbridge._signing import library  # noqa: F401 (said now, and not at the first signature)
        keys: dict[str, bytes] = {}
        authorities = b""
        for block in _BLOCK.finditer(content):
            text, kind = block[0] + b"\n", block[1].decode()
            if "PRIVATE KEY" in kind:
                raise InvalidArgument(
                    f"{name} holds a private key, which should not be here",
                    fix=f"name the public key: openssl pkey -in {name} -pubout -out PUB.pem",
                )
            try:
                if kind == "CERTIFICATE":
                    x509.load_pem_x509_certificate(text)
                    authorities += text
                    continue
                key = serialization.load_pem_public_key(text)
            except (ValueError, UnsupportedAlgorithm) as error:
                raise InvalidArgument(f"{name} holds a {kind.lower()} that cannot be read: {error}") from error
            if not is_supported(key):
                raise InvalidArgument(
                    f"{name} holds {kind_of(key)}, not one on P-256, P-384 or P-521, with which versions are signed"
                )
            text = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
            keys[key_id(text)] = text
        if not keys and not authorities:
            raise InvalidArgument(
                f"{name} holds neither a public key nor a certificate (PEM)",
                fix="name the file that openssl pkey -in KEY.pem -pubout has written",
            )
        return Trusted(name, keys, authorities)


def check(trusted: Trusted, bundle: Bundle) -> str:
    """The signer, if it is trusted: ``key 0123...`` or the name in a certificate.

    Raises:
        InvalidArgument: the signer is not trusted, or the signature is wrong; the message says why.
    """
    if bundle.certificates:
        return _check_certificate(trusted, bundle)
    key = trusted.keys.get(bundle.signer)
    if key is None:
        raise InvalidArgument(f"it was made with the key {bundle.signer[:_SHOWN]}, which is not in {trusted.name}")
    _check(trusted, bundle, key)
    return f"key {bundle.signer[:_SHOWN]}"


def _check_certificate(trusted: Trusted, bundle: Bundle) -> str:
    from cryptography import x509

    try:
        found = [x509.load_der_x509_certificate(each) for each in bundle.certificates]
    except ValueError as error:
        raise InvalidArgument("it holds a certificate that cannot be read") from error
    subjects = [each.subject.rfc4514_string() or "without a name" for each in found]
    if not all(map(str.isprintable, subjects)):
        raise InvalidArgument("it holds a certificate whose name cannot be printed")
    subject = subjects[0]
    if not trusted.authorities:
        raise InvalidArgument(
            f"it was made with the certificate {subject[:200]!r}, and {trusted.name} holds no authority"
        )
    for each, name in zip(found, subjects, strict=True):
        check_usable(each, f"the signature ({name[:200]})")
    _check(trusted, bundle, None)
    return f"certificate {subject}"


def _check(trusted: Trusted, bundle: Bundle, key: bytes | None) -> None:
    from weighbridge._signing import library

    try:
        if key is not None:
            library.verify_by_key(bundle.statement, bundle.content, key)
        else:
            library.verify_by_authorities(bundle.statement, bundle.content, trusted.authorities)
    except Exception as error:  # the library raises whatever its own libraries do
        log.debug("a signature was refused", exc_info=error)
        why = str(error) or "it was not made with this key, or the signed content was changed"
        raise InvalidArgument(f"it is invalid: {why}"[:500]) from error
