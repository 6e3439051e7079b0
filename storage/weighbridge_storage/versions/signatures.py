"""Signatures of a version in a store: beside its folder, each written once under the digest of its bytes.

So a version's folder stays as it was published, a signature that is there is never replaced, and one that was damaged is known by its name.
Who has put it there is said by an empty object beside it.
"""

from __future__ import annotations

import hashlib

from weighbridge._core.resources import Signature
from weighbridge.errors import NotFound, ResourceExhausted
from weighbridge_storage.documents.names import (
    ModelName,
    digest_of_signature,
    signature_giver_key,
    signature_key,
    signatures_prefix,
)
from weighbridge_storage.stores.objects import ObjectStore

MOST_SIGNATURES = 16
"""Of one version."""
MOST_OF_ONE = 4
"""Of these, how many one identity may put there: with signatures that nobody asked for it cannot take all places."""
_MOST_READ = 2 * MOST_SIGNATURES
"""Replicas that add some in one instant exceed the limit by as many: none of these may hide one that was there before."""


def signature_ids(store: ObjectStore, model: ModelName, number: int) -> list[str]:
    """The digests that a version's signatures are called by, in order."""
    keys = store.list(signatures_prefix(model, number))
    return sorted(digest for key in keys if (digest := digest_of_signature(key)) is not None)


def read_signatures(store: ObjectStore, model: ModelName, number: int) -> tuple[Signature, ...]:
    """A version's signatures, in the order of their digests. One that is not what its name says counts as none: it proves nothing."""
    found = []
    for digest in signature_ids(store, model, number)[:_MOST_READ]:
        try:
            content, _ = store.get(signature_key(model, number, digest))
        except NotFound:  # the version is being deleted
            continue
        if hashlib.sha256(content).hexdigest() == digest:
            found.append(Signature(digest, content))
    return tuple(found)


def write_signature(store: ObjectStore, model: ModelName, number: int, content: bytes, by: str = "") -> str:
    """Put a signature to a version; its digest. Putting it again changes nothing.

    Args:
        store: where the version lies.
        model: whose version.
        number: which version.
        content: the signature.
        by: the identity that puts it there; empty if there is none to be told from others.

    Raises:
        ResourceExhausted: the version has `MOST_SIGNATURES` others, or `MOST_OF_ONE` others by this identity.
    """
    digest = hashlib.sha256(content).hexdigest()
    keys = set(store.list(signatures_prefix(model, number)))
    there = {found for key in keys if (found := digest_of_signature(key)) is not None}
    if digest not in there:
        if len(there) >= MOST_SIGNATURES:
            raise ResourceExhausted(
                f"{model}@{number} has {len(there)} signatures, as many as a version may have",
                fix="see who has signed it: weighbridge signatures",
            )
        own = sum(signature_giver_key(model, number, each, by) in keys for each in there)
        if by and own >= MOST_OF_ONE:
            raise ResourceExhausted(
                f"{by} has put {own} signatures to {model}@{number}, as many as one identity may",
                fix="see who has signed it: weighbridge signatures; let another identity put further ones there",
            )
        if by:
            store.put(signature_giver_key(model, number, digest, by), b"", mode="overwrite")
    store.put(signature_key(model, number, digest), content, mode="overwrite")
    return digest
