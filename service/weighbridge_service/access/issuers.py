"""Issuers of JSON web tokens (RFC 7519), such as Kubernetes and OpenID providers, and the keys that they sign with.

The policy, not the token, names the algorithms. All of them sign with a private key: with a shared secret, a service
that verifies tokens could also issue them.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jwt

from weighbridge.errors import InvalidArgument

log = logging.getLogger(__name__)

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
LONGEST_TOKEN = 16 << 10
_LEEWAY = 30.0
"""Seconds by which clocks may differ."""
_REFRESH_SECONDS = 300.0
_RETRY_SECONDS = 10.0
"""Minimum interval between two requests for keys, so that tokens with invented keys cannot make the service flood the
issuer.
"""
_FETCH_SECONDS = 5.0
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Issuer:
    """An issuer that a policy trusts.

    Attributes:
        name: name by which identities of the policy refer to it.
        issuer: issuer in its tokens (``iss``).
        audience: audience that its tokens must have (``aud``).
        algorithms: algorithms that its tokens may be signed with.
        keys: path of a file with a JSON web key set (RFC 7517), or an ``https://`` URL of one.
    """

    name: str
    issuer: str
    audience: str
    algorithms: tuple[str, ...]
    keys: str


@dataclass(frozen=True, slots=True)
class Claims:
    """Verified claims of a token.

    Attributes:
        issuer: name of the issuer.
        subject: subject of the token (``sub``).
        expires: seconds since 1970 at which the token expires, with the leeway for clocks.
        signed: returns whether the issuer still has the key that the token was signed with.
    """

    issuer: str
    subject: str
    expires: float
    signed: Callable[[], bool]


class KeyRing:
    """Keys of one issuer. Thread-safe; waits for the network only in `start`.

    Each reload creates new key objects, so an ``is`` comparison tells whether a key is still the one of an earlier
    call.

    Args:
        issuer: the issuer.
        fetch: downloads the body of a URL.
        clock: returns seconds of a monotonic clock.
    """

    def __init__(
        self,
        issuer: Issuer,
        fetch: Callable[[str], bytes] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.issuer = issuer
        self._fetch = fetch or _fetched
        self._clock = clock
        self._lock = threading.Lock()
        self._keys: Mapping[str, jwt.PyJWK] = {}
        self._asked = -_REFRESH_SECONDS
        self._asking = False
        self._changed = 0

    def start(self, *, wait: bool = True) -> None:
        """Read the keys for the first time.

        Args:
            wait: whether to wait for a download from a URL; otherwise there are no keys until it has ended.

        Raises:
            InvalidArgument: the file cannot be read or has no usable keys. A failed download does not raise; it is
                retried later.
        """
        if not self._remote:
            self._read_file()
        elif wait:
            self._refresh()
        else:
            self._refresh_soon()

    def key(self, kid: str) -> jwt.PyJWK | None:
        """The key with that id; None if it is not known now.

        An unknown key of a URL may arrive soon, since this starts a download.
        """
        if not self._remote:
            self._read_file_if_changed()
            return self._keys.get(kid)
        found, age = self._keys.get(kid), self._clock() - self._asked
        if age > (_RETRY_SECONDS if found is None else _REFRESH_SECONDS):
            self._refresh_soon()
        return found

    def _refresh_soon(self) -> None:
        with self._lock:
            asking, self._asking = self._asking, True
        if not asking:
            threading.Thread(target=self._refresh, name="issuer-keys", daemon=True).start()

    @property
    def _remote(self) -> bool:
        return "://" in self.issuer.keys

    def _refresh(self) -> None:
        try:
            self._keys = _keys_in(self._fetch(self.issuer.keys), self.issuer)
        except (OSError, ValueError, InvalidArgument) as error:
            log.warning("keys of %s stay as they are: %s", self.issuer.name, error)
        finally:
            self._asked, self._asking = self._clock(), False

    def _read_file_if_changed(self) -> None:
        changed = _changed(Path(self.issuer.keys))
        if changed == self._changed:
            return
        self._changed = changed  # before it is parsed: an invalid file is logged once
        try:
            self._read_file()
        except InvalidArgument as error:
            log.warning("keys of %s stay as they are: %s", self.issuer.name, error)

    def _read_file(self) -> None:
        path = Path(self.issuer.keys)
        try:
            changed, raw = _changed(path), path.read_bytes()
        except OSError as error:
            raise InvalidArgument(
                f"the keys of {self.issuer.name} cannot be read: {path}: {error.strerror}",
                fix="name a file with a JSON web key set, or its https:// URL",
            ) from error
        self._keys, self._changed = _keys_in(raw, self.issuer), changed


def _changed(path: Path) -> int:
    """Modification time of a file in ns; -1 if it cannot be read."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return -1


def claims(token: str, rings: Mapping[str, KeyRing]) -> Claims | str:
    """Verified claims of a token, or the reason why the token is not valid.

    Args:
        token: the encoded token.
        rings: keys of the trusted issuers, by ``iss``.
    """
    if len(token) > LONGEST_TOKEN:
        return "the token is too long"
    try:
        unproved = jwt.decode(token, options={"verify_signature": False})
        ring = rings.get(str(unproved.get("iss", "")))
        if ring is None:
            return "the token comes from an issuer that is not trusted here"
        issuer = ring.issuer
        kid = str(jwt.get_unverified_header(token).get("kid", ""))
        key = ring.key(kid)
        if key is None:
            return f"the token is signed with a key that is not among those of {issuer.name}"
        proved: dict[str, Any] = jwt.decode(
            token,
            key,
            algorithms=list(issuer.algorithms),
            issuer=issuer.issuer,
            audience=issuer.audience,
            leeway=_LEEWAY,
            options={"require": ["exp", "sub", "iss", "aud"]},
        )
    except (jwt.PyJWTError, ValueError, TypeError) as error:
        return f"the token is not valid: {error}"
    return Claims(issuer.name, str(proved["sub"]), float(proved["exp"]) + _LEEWAY, lambda: ring.key(kid) is key)


def _keys_in(raw: bytes, issuer: Issuer) -> Mapping[str, jwt.PyJWK]:
    """Keys by their ids, without those of kinds or algorithms that are not supported or not allowed."""
    try:
        listed = json.loads(raw)["keys"]
        found = {}
        for each in listed:
            try:
                key = jwt.PyJWK(each)
            except jwt.PyJWTError:
                continue
            if key.algorithm_name in issuer.algorithms:
                found[str(each.get("kid", ""))] = key
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidArgument(
            f"the keys of {issuer.name} are not a JSON web key set", fix=f"check {issuer.keys}"
        ) from error
    if not found:
        raise InvalidArgument(
            f"none of the keys of {issuer.name} is for {', '.join(issuer.algorithms)}",
            fix="name the algorithms that it signs with",
        )
    return found


class _OverTls(urllib.request.HTTPRedirectHandler):
    """Follows only redirects to ``https://``: without TLS, anyone on the path could substitute the keys."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if not newurl.startswith("https://"):
            raise OSError(f"{req.full_url} redirects to {newurl[:200]}, which is not https://")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _fetched(url: str) -> bytes:
    with urllib.request.build_opener(_OverTls).open(url, timeout=_FETCH_SECONDS) as answer:
        found: bytes = answer.read(_MOST_BYTES)
    return found
