"""Policy: the file (TOML) that lists identities with their scopes and limits.

::

    [[identity]]
    name = "trainer"
    may = ["push:acme/*", "pull:acme/*"]
    tokens = ["sha256:..."]                                # weighbridge token
    certificates = ["spiffe://cluster/ns/rl/sa/trainer"]   # names in certificates that --client-ca has issued
    users = [1000]                                         # of processes on this machine, by the local lane
    subjects = ["cluster|system:serviceaccount:rl:*"]      # of JSON web tokens: issuer and subject
    limits = {streams = 8, bytes_per_second = "2GB", versions_per_hour = 60}

    [[namespace]]
    name = "acme"
    stored = "20TB"

    [[issuer]]
    name = "cluster"
    issuer = "https://kubernetes.default.svc.cluster.local"
    audience = "weighbridge"
    algorithms = ["RS256"]
    keys = "/etc/weighbridge/jwks.json"                    # or an https:// URL
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from weighbridge._core.text.sizes import parse_size
from weighbridge.errors import InvalidArgument
from weighbridge_service.access import issuers, tokens
from weighbridge_service.access.identities import Identity, IdentityLimits
from weighbridge_service.access.issuers import Issuer
from weighbridge_service.access.scopes import Scope, matches

_IDENTITY = {"name", "may", "tokens", "certificates", "users", "subjects", "anybody", "limits"}
_ISSUER = {"name", "issuer", "audience", "algorithms", "keys"}
_LIMITS = {"streams", "bytes_per_second", "versions_per_hour", "adapters"}
_MOST_STREAMS = 65_536
_MOST_VERSIONS = 100_000
_MOST_ADAPTERS = 10_000
_LEAST_RATE = 1_000_000
"""Bytes per second.

At this rate a message of 1 MiB takes a second, so that the other side does not treat the stream as dead.
"""
_MOST_BYTES = 2**53
_NAMESPACE = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?")


@dataclass(frozen=True, slots=True)
class PolicyEntry:
    """An identity of a policy, with the certificates and subjects that prove it.

    Attributes:
        identity: the identity.
        certificates: patterns of names in certificates.
        subjects: subjects of JSON web tokens, each the name of the issuer and a pattern of the subject.
    """

    identity: Identity
    certificates: tuple[str, ...]
    subjects: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Policy:
    """Identities with their scopes, trusted issuers, and limits of namespaces.

    Attributes:
        entries: entries in the order of the file; the first one that matches is used.
        by_token: identities by the digests of their tokens.
        by_user: identities by user ids.
        issuers: trusted issuers of tokens, by ``iss``.
        anybody: identity of callers without evidence; None if they are not allowed.
        stored: limits of stored bytes, by namespace.
    """

    entries: tuple[PolicyEntry, ...]
    by_token: Mapping[str, Identity]
    by_user: Mapping[int, Identity]
    issuers: Mapping[str, Issuer]
    anybody: Identity | None
    stored: Mapping[str, int]

    def of_certificate(self, names: tuple[str, ...]) -> Identity | None:
        """The identity of the first entry that matches one of a certificate's names; None if none does."""
        for entry in self.entries:
            if any(matches(pattern, name) for name in names for pattern in entry.certificates):
                return entry.identity
        return None

    def of_subject(self, issuer: str, subject: str) -> Identity | None:
        """The identity of the first entry that matches a token's issuer and subject; None if none does."""
        for entry in self.entries:
            if any(name == issuer and matches(pattern, subject) for name, pattern in entry.subjects):
                return entry.identity
        return None

    @staticmethod
    def parse(text: str) -> Policy:
        """Parse a policy from its file's text. Raises InvalidArgument, which names the entry and the mistake."""
        try:
            found = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # a number of 5000 digits raises ValueError
            raise InvalidArgument(f"the policy is not valid TOML: {error}", fix="see docs/access.md") from error
        _check_keys(found, {"identity", "issuer", "namespace"}, "the policy")
        trusted = {each.issuer: each for each in map(_issuer, _tables(found, "issuer"))}
        names = {each.name for each in trusted.values()}
        entries: list[PolicyEntry] = []
        by_token: dict[str, Identity] = {}
        by_user: dict[int, Identity] = {}
        anybody = None
        for table in _tables(found, "identity"):
            entry = _entry(table, names)
            where = f"the identity {entry.identity.name!r}"
            if any(entry.identity.name == other.identity.name for other in entries):
                raise InvalidArgument(f"{where} appears twice", fix="give each a name of its own")
            for token in map(tokens.check_digest, _texts(table, "tokens", where)):
                if by_token.setdefault(token, entry.identity) != entry.identity:
                    raise InvalidArgument(
                        f"a token of {where} belongs to another identity, too",
                        fix="make a token for each identity",
                    )
            for user in _users(table, where):
                if by_user.setdefault(user, entry.identity) != entry.identity:
                    raise InvalidArgument(
                        f"user {user} of {where} belongs to another identity, too", fix="name it once"
                    )
            if table.get("anybody") is True:
                if anybody is not None:
                    raise InvalidArgument(f"{where} is a second identity for anybody", fix="keep one of them")
                anybody = replace(entry.identity, proven=False)
            entries.append(entry)
        return Policy(tuple(entries), by_token, by_user, trusted, anybody, _stored(_tables(found, "namespace")))


def _entry(table: Mapping[str, Any], issuer_names: set[str]) -> PolicyEntry:
    name = table.get("name")
    if not isinstance(name, str) or not name or not name.isprintable():
        raise InvalidArgument("an identity of the policy has no name", fix='write name = "trainer"')
    where = f"the identity {name!r}"
    _check_keys(table, _IDENTITY, where)
    if not isinstance(table.get("anybody", False), bool):
        raise InvalidArgument(f"anybody of {where} is neither true nor false", fix="write anybody = true")
    try:
        scopes = tuple(map(Scope.parse, _texts(table, "may", where)))
    except InvalidArgument as error:
        raise InvalidArgument(f"{where}: {error.message}", fix=error.fix) from error
    if not scopes:
        raise InvalidArgument(f"{where} may do nothing", fix='write may = ["pull:acme/*"]')
    subjects = []
    for text in _texts(table, "subjects", where):
        issuer, bar, subject = text.partition("|")
        if not bar or issuer not in issuer_names or not subject:
            raise InvalidArgument(
                f"the subject {text[:80]!r} of {where} names no issuer of this policy",
                fix='write "ISSUER|SUBJECT", with the name of an [[issuer]]',
            )
        subjects.append((issuer, subject))
    certificates = _texts(table, "certificates", where)
    return PolicyEntry(Identity(name, scopes, limits=_limits(table, where)), certificates, tuple(subjects))


def _limits(table: Mapping[str, Any], where: str) -> IdentityLimits:
    found = table.get("limits", {})
    if not isinstance(found, dict):
        raise InvalidArgument(f"limits of {where} are not a table", fix="write limits = {streams = 8}")
    where = f"limits of {where}"
    _check_keys(found, _LIMITS, where)
    limits = IdentityLimits(
        _count(found, "streams", where, _MOST_STREAMS),
        _size(found, "bytes_per_second", where, _LEAST_RATE),
        _count(found, "versions_per_hour", where, _MOST_VERSIONS),
        _count(found, "adapters", where, _MOST_ADAPTERS),
    )
    if limits.bytes_per_second is not None and limits.streams is None:
        raise InvalidArgument(
            (
                f"{where} limit bytes_per_second but not streams: each stream that is slowed down "
                "occupies a thread of the service"
            ),
            fix="write streams = 8, or as many as it needs at one time",
        )
    return limits


def _stored(tables: Iterator[Mapping[str, Any]]) -> dict[str, int]:
    """Bytes that each namespace may hold, by its name."""
    found: dict[str, int] = {}
    for table in tables:
        name = table.get("name")
        _check_keys(table, {"name", "stored"}, f"the namespace {str(name or '')[:80]!r}")
        if not isinstance(name, str) or not _NAMESPACE.fullmatch(name):
            raise InvalidArgument(
                f"{str(name)[:80]!r} of the policy is not a namespace",
                fix='write name = "acme", the first half of the names of its models',
            )
        where = f"the namespace {name!r}"
        if name in found:
            raise InvalidArgument(f"{where} appears twice", fix="name each once")
        stored = _size(table, "stored", where, 1)
        if stored is None:
            raise InvalidArgument(f"{where} has no limit", fix='write stored = "20TB"')
        found[name] = stored
    return found


def _count(table: Mapping[str, Any], key: str, where: str, most: int) -> int | None:
    value = table.get(key)
    if value is not None and (type(value) is not int or not 1 <= value <= most):
        raise InvalidArgument(
            f"{key} of {where} is {str(value)[:80]!r}, not a whole number from 1 to {most}",
            fix=f"write {key} = 8, or leave it out for no limit",
        )
    return value


def _size(table: Mapping[str, Any], key: str, where: str, least: int) -> int | None:
    value = table.get(key)
    if value is None:
        return None
    try:
        # a bare number could be meant in any unit
        size = parse_size(value) if isinstance(value, str) and value[-1:].isalpha() else 0
    except InvalidArgument:
        size = 0
    if not least <= size <= _MOST_BYTES:
        more = f", from {least // 1_000_000}MB on" if least > 1 else ""
        raise InvalidArgument(
            f"{key} of {where} is {str(value)[:80]!r}, not a size with a unit{more}",
            fix=f'write {key} = "2GB", or leave it out for no limit' if more else f'write {key} = "20TB"',
        )
    return size


def _issuer(table: Mapping[str, Any]) -> Issuer:
    name = str(table.get("name", ""))
    where = f"the issuer {name!r}"
    _check_keys(table, _ISSUER, where)
    missing = [key for key in sorted(_ISSUER - {"algorithms"}) if not isinstance(table.get(key), str) or not table[key]]
    if missing:
        raise InvalidArgument(f"{where} has no {' and no '.join(missing)}", fix="see docs/access.md")
    algorithms = _texts(table, "algorithms", where)
    unknown = [each for each in algorithms if each not in issuers.ALGORITHMS]
    if unknown or not algorithms:
        raise InvalidArgument(
            f"{where} signs with {unknown[0] if unknown else 'nothing'}",
            fix=f"name the algorithms that it signs with: {', '.join(issuers.ALGORITHMS)}",
        )
    if "://" in table["keys"] and not table["keys"].startswith("https://"):
        raise InvalidArgument(f"the keys of {where} do not come over TLS", fix="name an https:// URL, or a file")
    return Issuer(name, table["issuer"], table["audience"], algorithms, table["keys"])


def _tables(found: Mapping[str, Any], key: str) -> Iterator[Mapping[str, Any]]:
    tables = found.get(key, [])
    if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
        raise InvalidArgument(f"{key} of the policy is not a list of tables", fix=f"write [[{key}]]")
    yield from tables


def _texts(table: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    found = table.get(key, [])
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise InvalidArgument(f"{key} of {where} is not a list of strings", fix=f'write {key} = ["..."]')
    return tuple(found)


def _users(table: Mapping[str, Any], where: str) -> tuple[int, ...]:
    found = table.get("users", [])
    if not isinstance(found, list) or not all(type(each) is int and each >= 0 for each in found):
        raise InvalidArgument(f"users of {where} is not a list of user ids", fix="write users = [1000]")
    return tuple(found)


def _check_keys(table: Mapping[str, Any], known: set[str], where: str) -> None:
    """Reject unknown keys: a misspelt key would otherwise silently change the policy's meaning."""
    unknown = sorted(set(table) - known)
    if unknown:
        raise InvalidArgument(
            f"{where} has the unknown key {unknown[0]!r}",
            fix=f"known keys: {', '.join(sorted(known))}",
        )
