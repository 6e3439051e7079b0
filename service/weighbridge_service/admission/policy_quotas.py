"""Quotas of the policy: what identities and namespaces may have when a version is opened, and how much of that they use."""

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
    """What the policy allows, and what of it is used. Thread-safe.

    Args:
        identities: what they use of their limits.
        stored: what namespaces hold.
        limited: identities that have limits, as they are now.
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
    def opening(
        self, by: Identity, name: ModelName, nbytes: int, is_open: Callable[[], bool]
    ) -> Iterator[Opening]:
        """A version is opened in the block, or found open, which takes nothing.

        Args:
            by: who opens it.
            name: of its model.
            nbytes: what it takes of what its namespace may hold; 0 if there is no limit, or that is not known yet.
            is_open: says whether it is open already.

        Raises:
            ResourceExhausted: who opens it has opened as many as they may, which says when they may open the next one; or the
                namespace has no room for it.
        """
        limited = by.limits.versions_per_hour is not None or nbytes
        with ExitStack() as stack:
            opening = Opening(new=not limited)
            if limited and not is_open():
                try:
                    self.stored.check_room(name, nbytes)
                    opening = stack.enter_context(self.identities.opening(by))
                except ResourceExhausted:
                    # another rank may have opened it meanwhile, at another replica, and have taken the room
                    if not is_open():
                        raise
            yield opening

    def usage(self, peer: Peer) -> Usage:
        """The limits that a peer has, and those of namespaces of which it may look at a model.

        Raises:
            WeighbridgeError: the store cannot be asked.
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
        """All limits, as far as this process knows how much of them is used. Asks nothing of the store."""
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
