"""Scopes: a verb, and the models and refs that it is allowed for."""

from __future__ import annotations

import re
from dataclasses import dataclass

from weighbridge._core.operations.verbs import Verb
from weighbridge.errors import InvalidArgument

ADMIN = "admin"
"""All verbs, in place of a verb."""
ALL = "*"

_SCOPE = re.compile(
    r"(?P<verb>[a-z]+)(?::(?P<model>[A-Za-z0-9._*-]+(?:/[A-Za-z0-9._*-]+)?)(?:@(?P<ref>[A-Za-z0-9._*-]+))?)?"
)
WITH_REF = frozenset({Verb.TAG, Verb.APPROVE})
"""Verbs whose scopes may be limited to some refs.

Other verbs act on the version behind a ref, so their scopes cannot name refs.
"""
_WITHOUT_MODEL = frozenset({Verb.OBSERVE, Verb.REPLICATE})
_WORDS = (*(verb.value for verb in Verb if verb is not Verb.PROBE), ADMIN)


@dataclass(frozen=True, slots=True)
class Scope:
    """A permission of an identity. In patterns ``*`` matches any characters.

    Attributes:
        verb: the allowed verb; None for all verbs.
        model: pattern of ``namespace/name``; also covers the model's parts.
        ref: pattern of refs; only for verbs in `WITH_REF`.
    """

    verb: Verb | None
    model: str = ALL
    ref: str = ALL

    @staticmethod
    def parse(text: str) -> Scope:
        """Parse a scope such as ``pull:acme/*``, ``tag:acme/smol@prod``, ``observe`` or ``admin``.

        Raises InvalidArgument.
        """
        found = _SCOPE.fullmatch(text)
        if found is None or found["verb"] not in _WORDS:
            raise InvalidArgument(
                f"{text[:80]!r} is not a scope",
                fix=(
                    "write VERB, VERB:MODEL, tag:MODEL@REF or approve:MODEL@REF, with * for any "
                    f"characters; verbs are {', '.join(_WORDS)}"
                ),
            )
        verb = None if found["verb"] == ADMIN else Verb(found["verb"])
        if found["ref"] is not None and verb not in WITH_REF:
            raise InvalidArgument(
                f"the scope {text!r} names a ref, but only scopes of tag and approve have one",
                fix=f"write {text.partition('@')[0]}",
            )
        if found["model"] is not None and verb in _WITHOUT_MODEL:
            raise InvalidArgument(f"the scope {text!r} names a model", fix=f"write {verb}: it is for all models")
        return Scope(verb, found["model"] or ALL, found["ref"] or ALL)

    def __str__(self) -> str:
        model = "" if self.model == ALL else f":{self.model}"
        ref = "" if self.ref == ALL else f"@{self.ref}"
        return f"{self.verb or ADMIN}{model or (':*' if ref else '')}{ref}"

    def allows(self, verb: Verb, model: str, ref: str) -> bool:
        """Whether the scope allows a verb on a model and ref.

        Args:
            verb: the verb.
            model: name of the model; empty for all models, or none.
            ref: name of the ref; empty for all refs, or none.
        """
        if verb is Verb.LOOK and not model:  # a listing checks each of its models by name
            return True
        if self.verb is not None and verb not in (self.verb, Verb.LOOK):
            return False
        if self.verb in _WITHOUT_MODEL and verb is Verb.LOOK:
            return False
        if not (matches(self.model, whole_model(model)) if model else self.model == ALL):
            return False
        return verb not in WITH_REF or (matches(self.ref, ref) if ref else self.ref == ALL)

    def names(self, verb: Verb, model: str, ref: str) -> bool:
        """Whether the scope allows this and names this very ref and verb: no pattern of refs, and no scope for all
        verbs.
        """
        return self.verb is verb and self.ref == ref and self.allows(verb, model, ref)


def whole_model(model: str) -> str:
    """The name of the whole model, from its own name or the name of one of its parts."""
    return model.partition(":")[0]


def matches(pattern: str, text: str) -> bool:
    """Whether a text matches a pattern, in which ``*`` matches any characters."""
    if pattern == ALL:
        return True
    first, *others = pattern.split("*")
    if not others:
        return text == pattern
    if not text.startswith(first) or not text.endswith(others[-1]) or len(text) < len(first) + len(others[-1]):
        return False
    position, end = len(first), len(text) - len(others[-1])
    for part in others[:-1]:
        found = text.find(part, position, end)
        if found < 0:
            return False
        position = found + len(part)
    return True
