"""Reader of a signature: a Sigstore bundle around an in-toto statement, as model-signing writes it for keys and
certificates.

Nothing is verified here: the bundle is parsed, and its signature is not checked.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any

from weighbridge._core.resources import Signature
from weighbridge._signing.statement import Statement
from weighbridge.errors import InvalidArgument

MAX_BYTES = 1_000_000
"""Largest signature that is accepted: one about some 5,000 files."""
MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
UNKNOWN = "unknown"
"""Method of a signature that is not recognised, in place of `Bundle.method`."""
_KEY_ID = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Bundle:
    """A signature.

    Attributes:
        content: its text.
        signer: identifier of its key: SHA-256 of the public key's PEM text, as 64 hex digits; for a certificate, the
            certificate's SHA-256.
        certificates: the signer's certificate and its chain, as DER; empty if a key has signed.
        statement: the signed statement.
    """

    content: bytes = field(repr=False)
    signer: str
    certificates: tuple[bytes, ...] = field(repr=False)
    statement: Statement = field(repr=False)

    @staticmethod
    def read(content: bytes) -> Bundle:
        """Parse a signature.

        Raises:
            InvalidArgument: it is too large, or no signature of a key or certificate; the message says why.
        """
        if len(content) > MAX_BYTES:
            raise InvalidArgument(f"the signature has {len(content)} bytes, more than {MAX_BYTES}")
        try:
            found = json.loads(content)
            if found["mediaType"] != MEDIA_TYPE:
                raise InvalidArgument(f"its media type is {str(found['mediaType'])[:100]!r}")
            material, envelope = found["verificationMaterial"], found["dsseEnvelope"]
            if envelope["payloadType"] != PAYLOAD_TYPE:
                raise InvalidArgument(f"its payload is {str(envelope['payloadType'])[:100]!r}")
            (signature,) = envelope["signatures"]
            _decoded(signature["sig"])
            payload = json.loads(_decoded(envelope["payload"]))
            signer, certificates = _signer(material)
            return Bundle(content, signer, certificates, Statement.read(payload))
        except InvalidArgument as error:
            raise InvalidArgument(f"this is not a signature of a version: {error.message}", fix=error.fix) from error
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise InvalidArgument(
                f"this is not a signature of a version: {error!r}"[:300],
                fix="make one with weighbridge sign, or model_signing sign key or certificate",
            ) from error

    @property
    def id(self) -> str:
        """SHA-256 of its text, as 64 hex digits."""
        return hashlib.sha256(self.content).hexdigest()

    @property
    def method(self) -> str:
        """Method of signing: ``key`` or ``certificate``."""
        return "certificate" if self.certificates else "key"

    @property
    def as_signature(self) -> Signature:
        """The signature in its stored form."""
        return Signature(self.id, self.content)


def signed_by(content: bytes) -> tuple[str, str]:
    """`Bundle.method` and `Bundle.signer` of a stored signature; `UNKNOWN` and an empty text for one that is not
    recognised: a later release, or any writer of the store, may have put it there.
    """
    try:
        bundle = Bundle.read(content)
    except InvalidArgument:
        return UNKNOWN, ""
    return bundle.method, bundle.signer


def _signer(material: Any) -> tuple[str, tuple[bytes, ...]]:
    if "x509CertificateChain" in material:
        chain = tuple(_decoded(each["rawBytes"]) for each in material["x509CertificateChain"]["certificates"])
        return hashlib.sha256(chain[0]).hexdigest(), chain
    if "publicKey" in material:
        hint = material["publicKey"].get("hint")
        if not isinstance(hint, str) or not _KEY_ID.fullmatch(hint):
            raise InvalidArgument(
                "it does not identify its key by a SHA-256", fix="sign with model-signing 1.0 or newer"
            )
        return hint, ()
    raise InvalidArgument(
        "it is signed neither with a key nor with a certificate",
        fix="keyless signatures (Sigstore) need other servers, and are not accepted",
    )


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise InvalidArgument("a field that should be base64 is not") from error
