"""Peer of a call: who asks, as the connection says it, and what it may do.

What a client says of itself (`client_id`) tells its processes apart, and is proof of nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import unquote


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a connection.

    Attributes:
        host: its address; ``local`` for processes of this machine that come by a Unix socket.
        connection: tells the connections of one host apart.
    """

    host: str
    connection: str = ""

    @staticmethod
    def of_grpc(text: str) -> Peer:
        """As gRPC names it: ``ipv4:10.0.0.7:41234``, ``ipv6:%5B::1%5D:41234``, ``unix:``."""
        kind, _, rest = text.partition(":")
        if kind not in ("ipv4", "ipv6"):
            return Peer(LOCAL, rest)
        host, _, port = unquote(rest).rpartition(":")
        return Peer(host.removeprefix("[").removesuffix("]"), port)

    def __str__(self) -> str:
        return f"{self.host}:{self.connection}"


LOCAL = "local"


class Verb(StrEnum):
    """What a peer wants to do."""

    READ = "read"
    """Look at models, versions and refs, and pull them."""
    PUSH = "push"
    """Bring a version, or give one up."""
    APPROVE = "approve"
    """Hold versions no longer that are held."""
    MANAGE = "manage"
    """Register models, move tags, and say what is kept and what is held."""
    REPLICATE = "replicate"
    """Take part in the service as a replica."""


def authorize(peer: Peer, verb: Verb, model: str = "", ref: str = "") -> None:
    """Access control: allows everything today. Every face asks here before it does what it was asked for.

    Whoever reaches the service may do everything: it belongs in a network of its own.

    Args:
        peer: who asks.
        verb: what it wants to do.
        model: to which model; empty for all of them.
        ref: to which ref or version; empty for all of them.
    """
