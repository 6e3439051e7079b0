"""Viewer of pages: what somebody may, as a value, so that pages of those who may the same are rendered once. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from weighbridge._core.operations.verbs import Verb
from weighbridge._core.resources import Protection, RefRequest
from weighbridge_service.access.identities import EVERYBODY, Identity
from weighbridge_service.access.peer import Peer
from weighbridge_service.access.scopes import Scope


@dataclass(frozen=True, slots=True)
class Viewer:
    """Who looks at a page.

    Attributes:
        name: in the policy; empty if the service has none, or knows nobody by name.
        scopes: what they may.
        proven: whether they have shown something that others have not.
        signed_in: whether they have done so by a session that can be ended.
        can_sign_in: whether tokens are known here.
    """

    name: str
    scopes: tuple[Scope, ...]
    proven: bool
    signed_in: bool = False
    can_sign_in: bool = False

    @staticmethod
    def of(peer: Peer, *, signed_in: bool, can_sign_in: bool) -> Viewer:
        """Who has sent a request."""
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
        """Whether they may do this; see `Scope.allows`."""
        return any(scope.allows(verb, model, ref) for scope in self.scopes)

    def sees(self, model: str) -> bool:
        """Whether they may know that there is a model of this name."""
        return self.may(Verb.LOOK, model)

    def may_change(self, model: str, ref: str, protection: Protection | None) -> bool:
        """Whether they may move a ref, or ask for it."""
        if protection is None:
            return self.may(Verb.TAG, model, ref)
        proven = self.proven or not protection.approvals
        return proven and self._identity.names(Verb.TAG, model, ref)

    def may_approve(self, request: RefRequest) -> bool:
        """Whether their approval of a request would count, and has not been given."""
        given = {request.by, *(each.by for each in request.approvals)}
        names = self._identity.names(Verb.APPROVE, request.model, request.ref)
        return request.pending and self.proven and names and self.name not in given
