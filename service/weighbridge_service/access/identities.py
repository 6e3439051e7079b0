"""Identities, their limits, and the evidence that proves them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from weighbridge._core.operations.verbs import Verb
from weighbridge_service.access.scopes import Scope

_SEVERAL = "several"
"""In place of several authorizations; not a valid authorization itself."""


@dataclass(frozen=True, slots=True)
class PresentedCredentials:
    """Credentials that a connection or a call presents.

    Attributes:
        authorization: authorization of the call, as ``Bearer TOKEN``; empty if it has none.
        certificate: names in the certificate that TLS has verified: its alternative names, or its common name if it has
            none of these.
        user: id of the user that runs the calling process, as the kernel reports it; None for callers on other
            machines.
    """

    authorization: str = field(default="", repr=False)
    certificate: tuple[str, ...] = ()
    user: int | None = None

    @staticmethod
    def of_call(authorizations: Sequence[str], certificate: tuple[str, ...]) -> PresentedCredentials:
        """Evidence of a call. Several authorizations prove nothing."""
        return PresentedCredentials(
            authorizations[0] if len(authorizations) == 1 else _SEVERAL if authorizations else "", certificate
        )


@dataclass(frozen=True, slots=True)
class IdentityLimits:
    """Limits of an identity; None is no limit, except for `adapters`.

    Attributes:
        streams: concurrent streams of weights, at each replica of the service.
        bytes_per_second: bytes of weights per second over all of its streams, at each replica.
        versions_per_hour: versions that it may open per hour, at each replica.
        adapters: number of versions of one model that adapters may pin, at all replicas together. A pin counts for the
            identity that opened the adapter's first version on it. None is `bases.DEFAULT_ADAPTERS`.
    """

    streams: int | None = None
    bytes_per_second: int | None = None
    versions_per_hour: int | None = None
    adapters: int | None = None


NO_LIMITS = IdentityLimits()


@dataclass(frozen=True, slots=True)
class Identity:
    """A recognised caller, or the reason why the caller was not recognised.

    Attributes:
        name: name in the policy; empty for an unrecognised caller.
        scopes: scopes of the caller.
        problem: the reason why the caller was not recognised; empty if it was.
        proven: whether the caller has presented credentials of its own; False for anonymous callers.
        expires: seconds since 1970 at which the evidence expires; None if it does not.
        limits: limits of the caller.
    """

    name: str
    scopes: tuple[Scope, ...] = ()
    problem: str = ""
    proven: bool = True
    expires: float | None = field(default=None, compare=False)
    limits: IdentityLimits = NO_LIMITS

    def may(self, verb: Verb, model: str = "", ref: str = "") -> bool:
        """Whether one of its scopes allows this; see `Scope.allows`."""
        return verb is Verb.PROBE or any(scope.allows(verb, model, ref) for scope in self.scopes)

    def names(self, verb: Verb, model: str, ref: str) -> bool:
        """Whether one of its scopes allows this and names this very ref, not a pattern of refs; see `Scope.names`."""
        return any(scope.names(verb, model, ref) for scope in self.scopes)

    @staticmethod
    def unidentified(problem: str) -> Identity:
        """An unrecognised caller, with the reason."""
        return Identity("", (), problem, proven=False)


EVERYBODY = Identity("anonymous", (Scope(None),), proven=False)
"""The identity of every caller of a service without a policy."""
REPLICA = Identity("replica", (Scope(Verb.REPLICATE),))
"""Another service over the same store."""
