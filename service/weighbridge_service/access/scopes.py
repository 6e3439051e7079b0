"""Scopes: a verb, and the models and refs for which somebody may do it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from weighbridge._core.operations.verbs import Verb
from weighbridge.errors import InvalidArgument

ADMIN = "admin"
"""In place of a verb: all of them."""
ALL = "*"

_SCOPE = re.compile(
    r"(?P<verb>[a-z]+)(?::(?P<model>[A-Za-z0-9._*-]+(?:/[A-Za-z0-9._*-]+)?)(?:@(?P<ref>[A-Za-z0-9._*-]+))?)?"
)
WITH_REF = frozenset({Verb.TAG, Verb.APPROVE})
"""Verbs of which a scope may be for some refs alone; of others no scope is, as they see through a ref to the version."""
_WITHOUT_MODEL = frozenset({Verb.OBSERVE, Verb.REPLICATE})
_WORDS = (*(verb.value for verb in Verb if verb is not Verb.PROBE), ADMIN)


@dataclass(frozen=True, slots=True)
class Scope:
    """What an identity may do. In patterns ``*`` stands for any characters.

    Attributes:
        verb: None for all of them.
        model: pattern of ``namespace/name``; is for the model's parts, too.
        ref: pattern of refs; of those in `WITH_REF` alone.
    """

    verb: Verb | None
    model: str = ALL
    ref: str = ALL

    @staticmethod
    def parse(text: str) -> Scope:
        """``pull:acme/*``, ``tag:acme/smol@prod``, ``observe``, ``admin``. Raises InvalidArgument."""
        found = _SCOPE.fullmatch(text)
        if found is None or found["verb"] not in _WORDS:
            raise InvalidArgument(
                f"{text[:80]!r} is no scope",
                fix=f"write VERB, VERB:MODEL, tag:MODEL@REF or approve:MODEL@REF, with * for any characters; verbs are {', '.join(_WORDS)}",
            )
        verb = None if found["verb"] == ADMIN else Verb(found["verb"])
        if found["ref"] is not None and verb not in WITH_REF:
            raise InvalidArgument(
                f"the scope {text!r} names a ref, which those of tag and approve alone do",
                fix=f"write {text.partition('@')[0]}",
            )
        if found["model"] is not None and verb in _WITHOUT_MODEL:
            raise InvalidArgument(
                f"the scope {text!r} names a model", fix=f"write {verb}: it is for all models"
            )
        return Scope(verb, found["model"] or ALL, found["ref"] or ALL)

    def __str__(self) -> str:
        model = "" if self.model == ALL else f":{self.model}"
        return f"{self.verb or ADMIN}{model or (':*' if self.ref != ALL else '')}{'' if self.ref == ALL else f'@{self.ref}'}"

    def allows(self, verb: Verb, model: str, ref: str) -> bool:
        """Whether it allows this.

        Args:
            verb: what is to be done.
            model: to which model; empty for all of them, or none.
            ref: to which ref; empty for all of them, or none.
        """
        if verb is Verb.LOOK and not model:  # what is listed is asked for by name
            return True
        if self.verb is not None and verb not in (self.verb, Verb.LOOK):
            return False
        if self.verb in _WITHOUT_MODEL and verb is Verb.LOOK:
            return False
        if not (matches(self.model, whole_model(model)) if model else self.model == ALL):
            return False
        return verb not in WITH_REF or (matches(self.ref, ref) if ref else self.ref == ALL)

    def names(self, verb: Verb, model: str, ref: str) -> bool:
        """Whether it allows this by naming the ref: neither by a pattern of refs, nor by a scope for all verbs."""
        return self.verb is verb and self.ref == ref and self.allows(verb, model, ref)


def whole_model(model: str) -> str:
    """The model that a name is of, or that of a part of it."""
    return model.partition(":")[0]


def matches(pattern: str, text: str) -> bool:
    """Whether a text is what a pattern says, in which ``*`` stands for any characters."""
    if pattern == ALL:
        return True
    first, *others = pattern.split("*")
    if not others:
        return text == pattern
    if (
        not text.startswith(first)
        or not text.endswith(others[-1])
        or len(text) < len(first) + len(others[-1])
    ):
        return False
    position, end = len(first), len(text) - len(others[-1])
    for part in others[:-1]:
        found = text.find(part, position, end)
        if found < 0:
            return False
        position = found + len(part)
    return True
