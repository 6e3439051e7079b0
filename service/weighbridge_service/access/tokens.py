"""Tokens: secrets of 256 random bits, of which a service keeps digests.

A digest without salt is enough for what cannot be guessed; a password is no token.
"""

from __future__ import annotations

import hashlib
import secrets

from weighbridge.errors import InvalidArgument

PREFIX = "wb_"
"""Tells scanners for leaked secrets what they have found."""
_KIND = "sha256:"
_DIGITS = 64
_BYTES = 32


def new_token() -> str:
    """A token that nobody knows yet."""
    return PREFIX + secrets.token_urlsafe(_BYTES)


def digest(token: str) -> str:
    """What a policy says of a token: ``sha256:`` and 64 hexadecimal digits."""
    return _KIND + hashlib.sha256(token.encode()).hexdigest()


def check_digest(text: str) -> str:
    """A digest as `digest` writes it. Raises InvalidArgument if it is none."""
    found = text.strip().lower()
    digits = found.removeprefix(_KIND)
    if not found.startswith(_KIND) or len(digits) != _DIGITS or set(digits) - set("0123456789abcdef"):
        raise InvalidArgument(
            "a token stands there that is no digest of one",
            fix="put in what `weighbridge token` prints behind `digest`, and give the token itself to its user alone",
        )
    return found
