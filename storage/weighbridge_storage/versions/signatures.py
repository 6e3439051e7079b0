"""Signatures of a version in a store.

They are next to its folder, and each is written once, under the digest of its bytes.

So a version's folder stays as it was published, a signature is never replaced, and a damaged signature does not match
its name. An empty object next to a signature names the identity that added it.
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
"""Maximum number of signatures of one version."""
MOST_OF_ONE = 4
"""Maximum number of these that one identity may add, so that it cannot use up the limit with unwanted signatures."""
_MOST_READ = 2 * MOST_SIGNATURES
"""Maximum number of signatures that are read. Replicas that add signatures concurrently may exceed `MOST_SIGNATURES` by
as many, and these must not hide an older signature.
"""


def signature_ids(store: ObjectStore, model: ModelName, number: int) -> list[str]:
    """The digests that identify a version's signatures, in order."""
    keys = store.list(signatures_prefix(model, number))
    return sorted(digest for key in keys if (digest := digest_of_signature(key)) is not None)


def read_signatures(store: ObjectStore, model: ModelName, number: int) -> tuple[Signature, ...]:
    """A version's signatures, in the order of their digests. A signature that does not match its name is omitted,
    because it proves nothing.
    """
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
    """Add a signature to a version, and return its digest. If the version already has this signature, nothing changes.

    Args:
        store: store of the version.
        model: the model.
        number: number of the version.
        content: the signature.
        by: identity that adds it; empty if callers are not identified.

    Raises:
        ResourceExhausted: the version already has `MOST_SIGNATURES` other signatures, or `MOST_OF_ONE` others by this
            identity.
    """
    digest = hashlib.sha256(content).hexdigest()
    keys = set(store.list(signatures_prefix(model, number)))
    there = {found for key in keys if (found := digest_of_signature(key)) is not None}
    if digest not in there:
        if len(there) >= MOST_SIGNATURES:
            raise ResourceExhausted(
                f"{model}@{number} has {len(there)} signatures, the most that a version may have",
                fix="see who has signed it: weighbridge signatures",
            )
        own = sum(signature_giver_key(model, number, each, by) in keys for each in there)
        if by and own >= MOST_OF_ONE:
            raise ResourceExhausted(
                f"{by} has added {own} signatures to {model}@{number}, the most that one identity may add",
                fix="see who has signed it: weighbridge signatures; let another identity add further ones",
            )
        if by:
            store.put(signature_giver_key(model, number, digest, by), b"", mode="overwrite")
    store.put(signature_key(model, number, digest), content, mode="overwrite")
    return digest
