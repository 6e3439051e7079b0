"""Viewer of pages: an identity's permissions as a hashable value. Viewers with equal permissions share live views.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from weighbridge._core.operations.verbs import Verb
from weighbridge._core.resources import Protection, RefRequest
from weighbridge_service.access.identities import EVERYBODY, Identity
from weighbridge_service.access.peer import Peer
from weighbridge_service.access.scopes import Scope


@dataclass(frozen=True, slots=True)
class Viewer:
    """The identity that views a page.

    Attributes:
        name: the identity's name in the policy; empty if the service has no policy, or the identity is unknown.
        scopes: its permissions.
        proven: whether the viewer has proved the identity by a credential.
        signed_in: whether the credential comes from a session, which the viewer can end.
        can_sign_in: whether the service accepts tokens.
    """

    name: str
    scopes: tuple[Scope, ...]
    proven: bool
    signed_in: bool = False
    can_sign_in: bool = False

    @staticmethod
    def of(peer: Peer, *, signed_in: bool, can_sign_in: bool) -> Viewer:
        """The viewer who sent a request."""
        found = peer.identity
        return Viewer(
            "" if found is EVERYBODY else found.name,
            found.scopes,
            found.proven,
            signed_in,
            can_sign_in,
        )

    @property
    def _identity(self) -> Identity:
        return Identity(self.name, self.scopes, proven=self.proven)

    def may(self, verb: Verb, model: str = "", ref: str = "") -> bool:
        """Whether the viewer may do this; see `Scope.allows`."""
        return any(scope.allows(verb, model, ref) for scope in self.scopes)

    def sees(self, model: str) -> bool:
        """Whether the viewer may know that a model of this name exists."""
        return self.may(Verb.LOOK, model)

    def may_change(self, model: str, ref: str, protection: Protection | None) -> bool:
        """Whether the viewer may move a ref, or request that."""
        if protection is None:
            return self.may(Verb.TAG, model, ref)
        proven = self.proven or not protection.approvals
        return proven and self._identity.names(Verb.TAG, model, ref)

    def may_approve(self, request: RefRequest) -> bool:
        """Whether the viewer's approval of a request would count and has not been given yet."""
        given = {request.by, *(each.by for each in request.approvals)}
        names = self._identity.names(Verb.APPROVE, request.model, request.ref)
        return request.pending and self.proven and names and self.name not in given
