"""Identities, how much each may have, and the evidence that proves them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from weighbridge._core.operations.verbs import Verb
from weighbridge_service.access.scopes import Scope

_SEVERAL = "several"
"""No authorization that anybody could show."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a connection or a call shows.

    Attributes:
        authorization: of the call; empty if it has none. ``Bearer TOKEN``.
        certificate: names in the certificate that TLS has verified: its alternative names, or its common name if it has none of these.
        user: id of the user whose process it is, as the kernel says; None from other machines.
    """

    authorization: str = field(default="", repr=False)
    certificate: tuple[str, ...] = ()
    user: int | None = None

    @staticmethod
    def of_call(authorizations: Sequence[str], certificate: tuple[str, ...]) -> Evidence:
        """What a call shows; of several tokens none counts."""
        return Evidence(
            authorizations[0] if len(authorizations) == 1 else _SEVERAL if authorizations else "", certificate
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """What an identity may have; None is no limit.

    Attributes:
        streams: of weights, at one time, at each replica of the service.
        bytes_per_second: of weights, over all of its streams, at each replica.
        versions_per_hour: that it opens, at each replica.
        adapters: pins of versions of one model by adapters whose first version on each it has opened, at all replicas together; None is `bases.DEFAULT_ADAPTERS`.
    """

    streams: int | None = None
    bytes_per_second: int | None = None
    versions_per_hour: int | None = None
    adapters: int | None = None


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Identity:
    """Somebody who was recognised, or the reason why not.

    Attributes:
        name: in the policy; empty for nobody.
        scopes: what they may do.
        problem: why nobody was recognised; empty if somebody was.
        proven: whether they have shown something that others have not.
        expires: seconds since 1970 at which the evidence ends to prove it; None if it does not.
        limits: how much they may have.
    """

    name: str
    scopes: tuple[Scope, ...] = ()
    problem: str = ""
    proven: bool = True
    expires: float | None = field(default=None, compare=False)
    limits: Limits = NO_LIMITS

    def may(self, verb: Verb, model: str = "", ref: str = "") -> bool:
        """Whether they may do this; see `Scope.allows`."""
        return verb is Verb.PROBE or any(scope.allows(verb, model, ref) for scope in self.scopes)

    def names(self, verb: Verb, model: str, ref: str) -> bool:
        """Whether one of their scopes for this names the ref, and not just all refs; see `Scope.names`."""
        return any(scope.names(verb, model, ref) for scope in self.scopes)

    @staticmethod
    def nobody(problem: str) -> Identity:
        """Who has shown nothing that proves anything."""
        return Identity("", (), problem, proven=False)


EVERYBODY = Identity("anonymous", (Scope(None),), proven=False)
"""Whoever reaches a service that was told of no policy."""
REPLICA = Identity("replica", (Scope(Verb.REPLICATE),))
"""Another service over the same store."""
