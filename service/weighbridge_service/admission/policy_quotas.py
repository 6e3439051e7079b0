"""Quotas of the policy: limits of identities and namespaces, checked when a version is opened, and their usage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict

from weighbridge._core.reports.usage import QUOTA_STORED, Quota, Usage
from weighbridge.errors import ResourceExhausted
from weighbridge_service.access.identities import Identity
from weighbridge_service.access.peer import Peer
from weighbridge_service.admission.identity_quotas import IdentityQuotas, Opening
from weighbridge_service.admission.stored_bytes import StoredBytes
from weighbridge_storage.documents.names import ModelName


class Quotas:
    """Limits of the policy and their usage. Thread-safe.

    Args:
        identities: usage of identities.
        stored: stored bytes of namespaces.
        limited: returns the identities that have limits in the current policy.
    """

    def __init__(
        self,
        identities: IdentityQuotas,
        stored: StoredBytes,
        limited: Callable[[], tuple[Identity, ...]],
    ) -> None:
        self.identities = identities
        self.stored = stored
        self._limited = limited

    @contextmanager
    def opening(self, by: Identity, name: ModelName, nbytes: int, is_open: Callable[[], bool]) -> Iterator[Opening]:
        """Check the quotas for a version that the block opens. A version that is already open counts for nothing.

        Args:
            by: identity of the caller that opens it.
            name: name of the model.
            nbytes: bytes that the version adds to its namespace; 0 if the namespace has no limit, or the size is not
                known yet.
            is_open: returns whether the version is already open.

        Raises:
            ResourceExhausted: the identity has opened its number of versions within an hour (the error states when to
                retry), or the namespace has no capacity for the version.
        """
        limited = by.limits.versions_per_hour is not None or nbytes
        with ExitStack() as stack:
            opening = Opening(new=not limited)
            if limited and not is_open():
                try:
                    self.stored.check_room(name, nbytes)
                    opening = stack.enter_context(self.identities.opening(by))
                except ResourceExhausted:
                    # another rank may have opened it at another replica since the check, and have taken the capacity
                    if not is_open():
                        raise
            yield opening

    def usage(self, peer: Peer) -> Usage:
        """Usage of the peer's limits, and of the limits of namespaces in which it may see a model.

        Raises:
            WeighbridgeError: the store cannot be read.
        """
        limits = self.stored.limits()
        seen = [each for each in sorted(limits) if self._sees(peer, each)]
        return Usage(
            peer.identity.name,
            (
                *self._of(peer.identity),
                *(Quota(QUOTA_STORED, each, self.stored.held(each), limits[each]) for each in seen),
            ),
        )

    def all(self) -> Iterator[Quota]:
        """All limits with the usage that this process knows. Does not read the store."""
        for identity in self._limited():
            yield from self._of(identity)
        limits = self.stored.limits()
        for namespace, held in self.stored.seen().items():
            if namespace in limits:
                yield Quota(QUOTA_STORED, namespace, held, limits[namespace])

    def _of(self, identity: Identity) -> Iterator[Quota]:
        used = asdict(self.identities.use_of(identity))
        for kind, limit in asdict(identity.limits).items():
            if limit is not None and used[kind] is not None:  # pins are counted in each base's head
                yield Quota(kind, identity.name, used[kind], limit)

    def _sees(self, peer: Peer, namespace: str) -> bool:
        return peer.sees(f"{namespace}/*") or any(map(peer.sees, self.stored.models(namespace)))
