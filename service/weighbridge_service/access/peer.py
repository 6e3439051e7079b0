"""Peer of a call: the caller as its connection identifies it, and the authorization check.

A client's own `client_id` distinguishes its processes, and proves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import unquote

from weighbridge._core.operations.verbs import Verb
from weighbridge.errors import PermissionDenied, Unauthenticated
from weighbridge_service.access.identities import EVERYBODY, Identity
from weighbridge_service.access.scopes import ALL, WITH_REF, Scope, whole_model
from weighbridge_storage.head.requests import Asker


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a connection.

    Attributes:
        host: address of the caller; ``local`` for processes on this machine that connect through a Unix socket.
        connection: distinguishes the connections of one host.
        identity: identity that the caller's evidence proves.
    """

    host: str
    connection: str = ""
    identity: Identity = field(default=EVERYBODY, compare=False)

    @staticmethod
    def of_grpc(text: str, identity: Identity = EVERYBODY) -> Peer:
        """A peer from gRPC's notation: ``ipv4:10.0.0.7:41234``, ``ipv6:%5B::1%5D:41234``, ``unix:``."""
        kind, _, rest = text.partition(":")
        if kind not in ("ipv4", "ipv6"):
            return Peer(LOCAL, rest, identity)
        host, _, port = unquote(rest).rpartition(":")
        return Peer(host.removeprefix("[").removesuffix("]"), port, identity)

    def sees(self, model: str) -> bool:
        """Whether the caller may know that a model of this name exists."""
        return self.identity.may(Verb.LOOK, model)

    @property
    def name(self) -> str:
        """The caller's name in the policy; empty if there is no policy or the caller was not recognised."""
        return self.identity.name if self.identity is not EVERYBODY else ""

    def called(self, said: str) -> str:
        """The name under which the caller's actions are recorded.

        Args:
            said: name that the caller gives itself; used if the policy has no name for the caller.
        """
        return self.name or said or self.host

    def asker(self, verb: Verb, model: str, ref: str) -> Asker:
        """The caller as the store's head records it, for requests on refs that may be protected."""
        names = self.identity.names(verb, model, ref)
        return Asker(self.identity.name, self.identity.proven, names, str(_scope(verb, model, ref)))

    def __str__(self) -> str:
        return f"{self.host}:{self.connection}"


LOCAL = "local"


def authorize(peer: Peer, verb: Verb, model: str = "", ref: str = "") -> None:
    """Check that a caller may do something. The server of every protocol calls this before it executes a call.

    Args:
        peer: the caller.
        verb: verb that the call needs.
        model: name of the model; empty for all models.
        ref: ref or version; empty for all of them. Scopes name refs, never versions: for a version by number, a scope
            must allow all refs.

    Raises:
        Unauthenticated: the caller was not recognised.
        PermissionDenied: the caller was recognised, but no scope of it allows this.
    """
    identity, ref = peer.identity, "" if ref.isascii() and ref.isdigit() else ref
    if identity.may(verb, model, ref):
        return
    if identity.problem:
        raise Unauthenticated(
            identity.problem,
            fix=(
                "send a token (WEIGHBRIDGE_TOKEN; over HTTP `Authorization: Bearer ...`) or a "
                "certificate that the service's policy knows"
            ),
        )
    scope = _scope(verb, model, ref)
    what = f"{verb} {model}{'' if scope.ref == ALL else f'@{scope.ref}'}".strip()
    raise PermissionDenied(
        f"{identity.name} may not {what}",
        fix=f"ask the administrator of the service's policy to give {identity.name} the scope {scope}",
    )


def _scope(verb: Verb, model: str, ref: str) -> Scope:
    """The narrowest scope that allows something."""
    return Scope(verb, whole_model(model) or ALL, (ref if verb in WITH_REF else "") or ALL)
