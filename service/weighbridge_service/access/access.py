"""Access: the identity that a piece of evidence proves under the current policy."""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from weighbridge._core.lru import Cache
from weighbridge.errors import InvalidArgument, Unavailable
from weighbridge_service.access import issuers, tokens
from weighbridge_service.access.identities import EVERYBODY, NO_LIMITS, REPLICA, Identity, PresentedCredentials
from weighbridge_service.access.issuers import KeyRing
from weighbridge_service.access.policy import Policy

log = logging.getLogger(__name__)

_BEARER = "bearer "
_MOST_PROVED = 4096
_REPLICA_SECONDS = 600
_MOST_TICKETS = 8192
_TICKET_BYTES = 16


@dataclass(frozen=True, slots=True)
class _Proved:
    """The identity that a web token proves, and whether the issuer still has the key that the token is signed with."""

    identity: Identity
    signed: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class _Known:
    """A policy, and what was cached under it. A new policy starts with an empty cache."""

    policy: Policy | None = None
    rings: Mapping[str, KeyRing] = field(default_factory=dict)
    proved: Cache[_Proved] = field(default_factory=lambda: Cache(_MOST_PROVED))


class Access:
    """Resolves evidence to identities. Thread-safe, and never waits.

    Args:
        policy: the policy file. With None and without `certificates`, every caller may do everything.
        replica_key: secret that all replicas over one store share.
        certificates: whether clients are asked for certificates. Without a policy, only callers with a certificate are
            allowed.
        lane: whether there is a local lane.
        clock: returns seconds since 1970.
        look_seconds: interval between two checks of the policy file for changes.
        standing_seconds: interval between two authorization checks of a long call.

    Raises:
        InvalidArgument: the policy cannot be read, or is invalid.

    Attributes:
        standing_seconds: as given.
    """

    def __init__(
        self,
        policy: Path | None = None,
        replica_key: bytes = b"",
        *,
        certificates: bool = False,
        lane: bool = True,
        clock: Callable[[], float] = time.time,
        look_seconds: float = 1.0,
        standing_seconds: float = 5.0,
    ) -> None:
        self.standing_seconds = standing_seconds
        self._path = policy
        self._replica_key = replica_key
        self._certificates = certificates
        self._lane = lane
        self._clock = clock
        self._look_seconds = look_seconds
        self._lock = threading.Lock()
        self._changed = 0
        self._looked = time.monotonic()
        self._tickets: Cache[PresentedCredentials] = Cache(_MOST_TICKETS)
        self._known = _Known()
        if policy is not None:
            self._read(policy)

    @property
    def open(self) -> bool:
        """Whether every caller that reaches the service may do everything."""
        return self._path is None and not self._certificates

    @property
    def knows_tokens(self) -> bool:
        """Whether a token can prove an identity."""
        return self._known.policy is not None

    def identify(self, evidence: PresentedCredentials) -> Identity:
        """The identity that the evidence proves.

        An authorization is decisive: a caller with an invalid token is not recognised, even with a valid certificate.
        """
        if self.open:
            return EVERYBODY
        self._read_if_changed()
        known = self._known
        if evidence.authorization:
            return self._of_authorization(evidence.authorization, known)
        policy = known.policy
        if policy is None:
            return EVERYBODY if evidence.certificate else Identity.unidentified("the call has no certificate")
        found = None
        if evidence.certificate:
            found = policy.of_certificate(evidence.certificate)
        elif evidence.user is not None:
            found = policy.by_user.get(evidence.user)
        found = found or policy.anybody
        if found is not None:
            return found
        if evidence.certificate:
            return Identity.unidentified(f"the policy has no identity for {evidence.certificate[0][:100]}")
        if evidence.user is not None:
            return Identity.unidentified(f"the policy does not know user {evidence.user}")
        if not self._certificates and _by_certificate(policy):
            return Identity.unidentified(
                "the call has no token, and the service does not request certificates: it runs without --client-ca"
            )
        return Identity.unidentified("the call has no token")

    def named(self, name: str) -> Identity | None:
        """The identity of that name in the policy; None if there is none."""
        self._read_if_changed()
        policy = self._known.policy
        entries = () if policy is None else policy.entries
        return next((entry.identity for entry in entries if entry.identity.name == name), None)

    def limited(self) -> tuple[Identity, ...]:
        """Identities of the policy that have limits."""
        self._read_if_changed()
        policy = self._known.policy
        entries = () if policy is None else policy.entries
        return tuple(entry.identity for entry in entries if entry.identity.limits != NO_LIMITS)

    def stored_limits(self) -> Mapping[str, int]:
        """Limits of stored bytes by namespace. A namespace without an entry has no limit."""
        self._read_if_changed()
        policy = self._known.policy
        return {} if policy is None else policy.stored

    def lane_ticket(self, evidence: PresentedCredentials) -> str:
        """A new ticket with which a client presents, on the local lane, the evidence that it presented over gRPC."""
        ticket = secrets.token_urlsafe(_TICKET_BYTES)
        self._tickets.put(ticket, evidence)
        return ticket

    def shown_by(self, ticket: str, user: int) -> PresentedCredentials:
        """Evidence of a client of the local lane: that of its ticket, or without a ticket the user of its process.

        Raises:
            Unavailable: the ticket is unknown or was dropped; the client asks for a new one.
        """
        if not ticket:
            return PresentedCredentials(user=user)
        evidence = self._tickets.get(ticket)
        if evidence is None:
            raise Unavailable("the ticket for the local lane is not known", fix="request a new ticket")
        return evidence

    def replica_token(self) -> str:
        """A token that authenticates this service to other replicas, valid for `_REPLICA_SECONDS`."""
        until = int(self._clock()) + _REPLICA_SECONDS
        return f"replica.{until}.{self._code(until)}"

    def _without_effect(self, policy: Policy) -> Iterator[str]:
        """Warnings about entries of the policy that have no effect under the options of this service."""
        named = _by_certificate(policy)
        if named and not self._certificates:
            yield f"certificates of {', '.join(named)} have no effect: the service requests none without --client-ca"
        users = dict.fromkeys(each.name for each in policy.by_user.values())
        if users and not self._lane:
            yield f"users of {', '.join(users)} have no effect: the service has no local lane with --local-socket off"

    def _of_authorization(self, authorization: str, known: _Known) -> Identity:
        if authorization[: len(_BEARER)].lower() != _BEARER:
            return Identity.unidentified("the authorization of the call is not a bearer token")
        token = authorization[len(_BEARER) :].strip()
        if token.startswith("replica."):
            return self._of_replica(token)
        if known.policy is None:
            return Identity.unidentified("the service runs without --policy and accepts no tokens")
        found = known.policy.by_token.get(tokens.digest(token))
        if found is not None:
            return found
        if token.count(".") != 2 or not known.rings:
            return Identity.unidentified("the token is not known")
        return self._of_web_token(token, known, known.policy)

    def _of_web_token(self, token: str, known: _Known, policy: Policy) -> Identity:
        key = hashlib.sha256(token.encode()).digest()
        before = known.proved.get(key)
        if before is not None and (before.identity.expires or 0.0) > self._clock() and before.signed():
            return before.identity
        found = issuers.claims(token, known.rings)
        if isinstance(found, str):
            return Identity.unidentified(found)
        entry = policy.of_subject(found.issuer, found.subject)
        if entry is None:
            return Identity.unidentified(f"the policy has no identity for {found.subject[:100]}")
        proved = replace(entry, expires=found.expires)
        known.proved.put(key, _Proved(proved, found.signed))
        return proved

    def _of_replica(self, token: str) -> Identity:
        _, until, code = (*token.split(".", 2), "", "")[:3]
        if not until.isdecimal() or len(until) > 12 or not self._replica_key:
            return Identity.unidentified("the token is not known")
        # as bytes: compare_digest rejects strings that are not ASCII
        genuine = hmac.compare_digest(self._code(int(until)).encode(), code.encode())
        if not genuine or int(until) < self._clock():
            return Identity.unidentified("the token of a replica is not valid")
        return Identity(REPLICA.name, REPLICA.scopes, expires=float(until))

    def _code(self, until: int) -> str:
        return hmac.new(self._replica_key, f"replica.{until}".encode(), hashlib.sha256).hexdigest()

    def _read_if_changed(self) -> None:
        now = time.monotonic()
        if self._path is None or now - self._looked < self._look_seconds:
            return
        with self._lock:
            self._looked = now
            try:
                if self._path.stat().st_mtime_ns != self._changed:
                    self._read(self._path)
                    log.info("the policy %s was read again", self._path)
            except (OSError, InvalidArgument) as error:
                log.error("the policy stays as it was: %s", error)

    def _read(self, path: Path) -> None:
        try:
            changed, text = path.stat().st_mtime_ns, path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(
                f"the policy {path} cannot be read: {error}", fix="let the service's user read it"
            ) from error
        self._changed = changed  # before it is parsed: an invalid policy is logged once
        policy = Policy.parse(text)
        for line in self._without_effect(policy):
            log.warning("the policy %s: %s", path, line)
        rings = {}
        for url, issuer in policy.issuers.items():
            before = self._known.rings.get(url)
            if before is not None and before.issuer == issuer:
                rings[url] = before
            else:
                rings[url] = KeyRing(issuer)
                rings[url].start(wait=self._known.policy is None)
        self._known = _Known(policy, rings)


def _by_certificate(policy: Policy) -> list[str]:
    """Names of the identities that certificates can prove."""
    return [entry.identity.name for entry in policy.entries if entry.certificates]
