"""Check of a version: whether it is signed by all that are required. Pure except for the library's computations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from weighbridge._core.json_values import JsonValue
from weighbridge._core.manifest_text import ManifestText
from weighbridge._core.resources import Signature
from weighbridge._signing.bundle import Bundle
from weighbridge._signing.trust import Trusted, check
from weighbridge.errors import FailedPrecondition, InvalidArgument

__all__ = ["Signed"]

_SHOWN = 12
"""Digits of a signature's digest in messages."""


@dataclass(frozen=True, slots=True)
class Signed(JsonValue):
    """A signature that satisfies a requirement.

    Attributes:
        trusted: name of the requirement.
        by: the signer.
        id: identifier of the signature.
    """

    trusted: str
    by: str
    id: str


def check_signed(
    manifest: ManifestText, signatures: Sequence[Signature], required: Iterable[Trusted]
) -> tuple[Signed, ...]:
    """For each requirement, a signature of the version that satisfies it.

    Args:
        manifest: manifest of the version.
        signatures: all of its signatures.
        required: the requirements, each of which must be satisfied.

    Raises:
        FailedPrecondition: one is not; `details` gives the reason for each signature.
    """
    found = []
    for trusted in required:
        reasons: list[str] = []
        for signature in signatures:
            try:
                by = _check(manifest, signature, trusted)
            except InvalidArgument as error:
                reasons.append(f"signature {signature.id[:_SHOWN]}: {error.message}")
                continue
            found.append(Signed(trusted.name, by, signature.id))
            break
        else:
            raise unsigned(manifest.title, trusted, reasons)
    return tuple(found)


def unsigned(title: str, trusted: Trusted, reasons: Sequence[str]) -> FailedPrecondition:
    """The error to raise for a version without a signature that satisfies a requirement.

    Args:
        title: name of the version, ``namespace/name@number``.
        trusted: the requirement.
        reasons: why each of its signatures does not satisfy it.
    """
    what = "none of its signatures is accepted" if reasons else "it has no signature"
    return FailedPrecondition(
        f"{title} is not signed as {trusted.name} requires: {what}",
        details=reasons,
        fix=f"have it signed: weighbridge sign {title} --key KEY.pem",
    )


def _check(manifest: ManifestText, signature: Signature, trusted: Trusted) -> str:
    bundle = Bundle.read(signature.content)
    by = check(trusted, bundle)
    contradictions = bundle.statement.contradictions(manifest)
    if contradictions:
        raise InvalidArgument("; ".join(contradictions))
    return by


def check_about(manifest: ManifestText, content: bytes) -> str:
    """The method and the signer of a signature, as text, if it is about a version; keys are not checked.

    Raises:
        InvalidArgument: ``content`` is no signature, or not about this version.
    """
    bundle = Bundle.read(content)
    contradictions = bundle.statement.contradictions(manifest)
    if contradictions:
        raise InvalidArgument(
            f"the signature is not for {manifest.title}",
            details=contradictions,
            fix="sign the version's own files: weighbridge sign, or model_signing in the folder of a download",
        )
    return f"{bundle.method} {bundle.signer[:16]}"
