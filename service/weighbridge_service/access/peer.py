"""Peer of a call: who asks, as the connection says it, and what it may do.

What a client says of itself (`client_id`) tells its processes apart, and is proof of nothing.
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
        host: its address; ``local`` for processes of this machine that come by a Unix socket.
        connection: tells the connections of one host apart.
        identity: who it is, by what it has shown.
    """

    host: str
    connection: str = ""
    identity: Identity = field(default=EVERYBODY, compare=False)

    @staticmethod
    def of_grpc(text: str, identity: Identity = EVERYBODY) -> Peer:
        """As gRPC names it: ``ipv4:10.0.0.7:41234``, ``ipv6:%5B::1%5D:41234``, ``unix:``."""
        kind, _, rest = text.partition(":")
        if kind not in ("ipv4", "ipv6"):
            return Peer(LOCAL, rest, identity)
        host, _, port = unquote(rest).rpartition(":")
        return Peer(host.removeprefix("[").removesuffix("]"), port, identity)

    def sees(self, model: str) -> bool:
        """Whether it may know that there is a model of this name."""
        return self.identity.may(Verb.LOOK, model)

    @property
    def name(self) -> str:
        """The name that the policy has for it; empty if there is none."""
        return self.identity.name if self.identity is not EVERYBODY else ""

    def called(self, said: str) -> str:
        """The name under which something that it does is written down.

        Args:
            said: what it calls itself; counts where nobody knows better.
        """
        return self.name or said or self.host

    def asker(self, verb: Verb, model: str, ref: str) -> Asker:
        """Who asks for something of a ref, where it may be protected."""
        names = self.identity.names(verb, model, ref)
        return Asker(self.identity.name, self.identity.proven, names, str(_scope(verb, model, ref)))

    def __str__(self) -> str:
        return f"{self.host}:{self.connection}"


LOCAL = "local"


def authorize(peer: Peer, verb: Verb, model: str = "", ref: str = "") -> None:
    """Access control. Every face asks here before it does what it was asked for.

    Args:
        peer: who asks.
        verb: what it wants to do.
        model: to which model; empty for all of them.
        ref: to which ref or version; empty for all of them.

    Raises:
        Unauthenticated: nobody knows who asks.
        PermissionDenied: who asks may not do this.
    """
    identity = peer.identity
    if identity.may(verb, model, ref):
        return
    if identity.problem:
        raise Unauthenticated(
            identity.problem,
            fix="show a token (WEIGHBRIDGE_TOKEN; over HTTP `Authorization: Bearer ...`) or a certificate that the service's policy knows",
        )
    scope = _scope(verb, model, ref)
    what = f"{verb} {model}{'' if scope.ref == ALL else f'@{scope.ref}'}".strip()
    raise PermissionDenied(
        f"{identity.name} may not {what}",
        fix=f"ask whoever administers the service's policy to give {identity.name} the scope {scope}",
    )


def _scope(verb: Verb, model: str, ref: str) -> Scope:
    """The least scope that allows something; versions have none of their own."""
    named = ref if verb in WITH_REF and not ref.isdecimal() else ""
    return Scope(verb, whole_model(model) or ALL, named or ALL)
