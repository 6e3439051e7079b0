"""Tokens: secrets of 256 random bits. A service stores only their digests.

A digest without salt is enough because a token cannot be guessed. Passwords must not be used as tokens.
"""

from __future__ import annotations

import hashlib
import secrets

from weighbridge.errors import InvalidArgument

PREFIX = "wb_"
"""Lets scanners for leaked secrets recognise a token."""
_KIND = "sha256:"
_DIGITS = 64
_BYTES = 32


def new_token() -> str:
    """A new random token."""
    return PREFIX + secrets.token_urlsafe(_BYTES)


def digest(token: str) -> str:
    """Digest of a token as a policy lists it: ``sha256:`` and 64 hexadecimal digits."""
    return _KIND + hashlib.sha256(token.encode()).hexdigest()


def check_digest(text: str) -> str:
    """Normalise a digest to the form that `digest` returns. Raises InvalidArgument if it is not a digest."""
    found = text.strip().lower()
    digits = found.removeprefix(_KIND)
    if not found.startswith(_KIND) or len(digits) != _DIGITS or set(digits) - set("0123456789abcdef"):
        raise InvalidArgument(
            "an entry of tokens is not the digest of a token",
            fix=(
                "enter the digest that `weighbridge token` prints after `digest`; give the token "
                "itself only to its user"
            ),
        )
    return found
