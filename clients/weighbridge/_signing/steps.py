"""Signing and checking of a version as steps without I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from weighbridge._clients.calls.operation_calls import ask
from weighbridge._clients.calls.steps import Steps, Work, call_method
from weighbridge._clients.calls.version_calls import get_manifest, get_signatures
from weighbridge._core.json_values import JsonValue
from weighbridge._core.manifest_text import ManifestText
from weighbridge._core.operations import table
from weighbridge._core.references import Reference
from weighbridge._core.resources import REF_LATEST, Signature, Verification
from weighbridge._signing import checking
from weighbridge._signing.bundle import Bundle
from weighbridge._signing.checking import Signed
from weighbridge._signing.signer import Signer, has_signed
from weighbridge._signing.signer import sign as sign_statement
from weighbridge._signing.statement import Statement
from weighbridge._signing.trust import Trusted
from weighbridge.errors import DataLoss, InvalidArgument
from weighbridge.v1 import model_service_pb2 as pb

__all__ = ["Signing"]

_call = partial(call_method, pb.DESCRIPTOR.services_by_name["ModelService"])


@dataclass(frozen=True, slots=True)
class Signing(JsonValue):
    """Result of signing a version.

    Attributes:
        model: ``namespace/name``.
        number: number of the version.
        id: identifier of the signature.
        method: method of signing: ``key`` or ``certificate``.
        signer: the key, by SHA-256 of its public key's PEM text; or the certificate, by SHA-256.
        added: whether the signature was made now; otherwise the signer had signed before.
        bytes_read: bytes of files that the service has read again for their SHA-256.
        step, run, parent, metadata, provenance: origin of the version in its manifest, which is signed too.
    """

    model: str
    number: int
    id: str
    method: str
    signer: str
    added: bool
    bytes_read: int
    step: int
    run: str
    parent: int
    metadata: Mapping[str, Any]
    provenance: Mapping[str, Any]


def add_signature(model: str, version: str | int | None, content: bytes) -> Steps[Signing]:
    """Add a signature that was made elsewhere to a version."""
    bundle = Bundle.read(content)
    meant = Reference.of(model, version, REF_LATEST)
    number, _ = yield from get_signatures(meant.model, meant.version)
    manifest = yield from get_manifest(meant.model, number)
    yield from _add(manifest, content)
    return _signing(manifest, bundle, added=True)


def check_signed(model: str, version: str | int | None, required: Sequence[Trusted]) -> Steps[tuple[Signed, ...]]:
    """Check a version's signatures against the requirements. Returns the signatures that satisfy them."""
    _, _, signed = yield from _compared(model, version, required)
    return signed


def _compared(
    model: str, version: str | int | None, required: Sequence[Trusted]
) -> Steps[tuple[ManifestText, tuple[Signature, ...], tuple[Signed, ...]]]:
    """A version's manifest, its signatures, and those that satisfy the requirements."""
    meant = Reference.of(model, version, REF_LATEST)
    number, signatures = yield from get_signatures(meant.model, meant.version)
    if required and not signatures:  # callers poll this; manifests may be large
        raise checking.unsigned(f"{meant.model}@{number}", required[0], ())
    manifest = yield from get_manifest(meant.model, number)
    signed: tuple[Signed, ...] = yield Work(partial(checking.check_signed, manifest, signatures, required))
    return manifest, signatures, signed


def verify_signed(
    model: str, version: str | int | None, required: Sequence[Trusted]
) -> Steps[tuple[Verification, tuple[Signed, ...]]]:
    """As `check_signed`, and let the service compare all files with the manifest, and their SHA-256 with the signed
    ones.
    """
    manifest, signatures, signed = yield from _compared(model, version, required)
    verified = yield from ask(table.VERIFY_VERSION, model=manifest.model, version=str(manifest.number), sha256=True)
    contents = {each.id: each.content for each in signatures}
    statements = [(each.by, Bundle.read(contents[each.id]).statement) for each in signed]
    problems = [
        f"{name} has a different SHA-256 than in the signature by {by}"
        if name in verified.sha256
        else f"the service does not report the SHA-256 of {name}"
        for by, statement in statements
        for name in manifest.files
        if statement.sha256[name] != verified.sha256.get(name)
        and (name in verified.sha256 or not verified.problems)  # the service may omit it for damaged files
    ]
    return replace(verified, problems=(*verified.problems, *problems)), signed


def sign(model: str, version: str | int | None, signer: Signer) -> Steps[Signing]:
    """Sign a version, unless the signer has: by the digests in its manifest, and for files without SHA-256, by digests
    from the service.
    """
    meant = Reference.of(model, version, REF_LATEST)
    number, signatures = yield from get_signatures(meant.model, meant.version)
    manifest = yield from get_manifest(meant.model, number)
    for signature in signatures:
        bundle: Bundle | None = yield Work(partial(_by, signer, signature, manifest))
        if bundle is not None:
            return _signing(manifest, bundle, added=False)
    made: Mapping[str, str] = {}
    nbytes = 0
    if not all(file.sha256 for file in manifest.files.values()):
        verified = yield from ask(table.VERIFY_VERSION, model=manifest.model, version=str(number), sha256=True)
        if verified.problems:
            raise DataLoss(
                f"{manifest.title} is damaged, and was not signed",
                details=verified.problems,
                fix=f"see which files are damaged: weighbridge verify {manifest.title}",
            )
        made, nbytes = verified.sha256, verified.bytes_checked
    statement = Statement.of_version(manifest, made)
    content: bytes = yield Work(partial(sign_statement, signer, statement))
    yield from _add(manifest, content)
    return _signing(manifest, Bundle.read(content), added=True, bytes_read=nbytes)


def _add(manifest: ManifestText, content: bytes) -> Steps[None]:
    yield from _call(
        "AddSignature", pb.AddSignatureRequest(model=manifest.model, number=manifest.number, content=content)
    )


def _by(signer: Signer, signature: Signature, manifest: ManifestText) -> Bundle | None:
    """A parsed signature, if it is one of the version by the signer."""
    try:
        bundle = Bundle.read(signature.content)
    except InvalidArgument:
        return None
    return bundle if has_signed(signer, bundle) and not bundle.statement.contradictions(manifest) else None


def _signing(manifest: ManifestText, bundle: Bundle, *, added: bool, bytes_read: int = 0) -> Signing:
    return Signing(
        model=manifest.model,
        number=manifest.number,
        id=bundle.id,
        method=bundle.method,
        signer=bundle.signer,
        added=added,
        bytes_read=bytes_read,
        step=manifest.step,
        run=manifest.run,
        parent=manifest.parent,
        metadata=manifest.metadata,
        provenance=manifest.provenance,
    )
