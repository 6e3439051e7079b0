"""Does a scope allow what it says, and nothing else?"""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighbridge._core.operations.verbs import Verb
from weighbridge.errors import InvalidArgument
from weighbridge_service.access.scopes import Scope, matches


@pytest.mark.parametrize(
    ("scope", "verb", "model", "ref", "allowed"),
    [
        ("pull:acme/*", Verb.PULL, "acme/smol", "", True),
        ("pull:acme/*", Verb.PULL, "acme/smol", "live", True),
        ("pull:acme/*", Verb.PULL, "acme2/smol", "", False),
        ("pull:acme/*", Verb.PUSH, "acme/smol", "", False),
        ("pull:acme/*", Verb.LOOK, "acme/smol", "", True),
        ("pull:acme/*", Verb.LOOK, "other/smol", "", False),
        ("pull:acme/*", Verb.LOOK, "", "", True),
        ("pull:acme/*", Verb.PULL, "", "", False),
        ("pull", Verb.PULL, "", "", True),
        ("look:acme/smol", Verb.PULL, "acme/smol", "", False),
        ("tag:acme/smol@prod", Verb.TAG, "acme/smol", "prod", True),
        ("tag:acme/smol@prod", Verb.TAG, "acme/smol", "prod2", False),
        ("tag:acme/smol@prod", Verb.TAG, "acme/smol", "", False),
        ("tag:acme/smol", Verb.TAG, "acme/smol", "anything", True),
        ("tag:*@prod-*", Verb.TAG, "acme/smol", "prod-eu", True),
        ("tag:*@prod-*", Verb.TAG, "acme/smol", "prod", False),
        ("manage:acme/smol", Verb.TAG, "acme/smol", "prod", False),
        ("observe", Verb.OBSERVE, "", "", True),
        ("observe", Verb.LOOK, "acme/smol", "", False),
        ("replicate", Verb.REPLICATE, "acme/smol", "7", True),
        ("replicate", Verb.LOOK, "acme/smol", "", False),
        ("admin:acme/*", Verb.MANAGE, "acme/smol", "", True),
        ("admin:acme/*", Verb.OBSERVE, "", "", False),
        ("admin:acme/*", Verb.REPLICATE, "", "", False),
        ("admin", Verb.REPLICATE, "", "", True),
    ],
)
def test_a_scope_allows_what_it_says(scope: str, verb: Verb, model: str, ref: str, allowed: bool) -> None:
    assert Scope.parse(scope).allows(verb, model, ref) is allowed


@pytest.mark.parametrize(
    "text",
    ["", "probe", "read:acme/*", "pull:", "pull:acme/smol@live", "pull:a/b/c", "tag:@prod", "observe:acme/*", "PULL:a/b",
     "pull:acme/*\n", "pull: acme/*", "pull:acme/[a-z]"],
)  # fmt: skip
def test_what_is_no_scope_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        Scope.parse(text)


@pytest.mark.parametrize("text", ["pull:acme/*", "tag:acme/smol@prod", "tag:*@prod", "admin", "observe", "push"])
def test_a_scope_is_written_as_it_is_read(text: str) -> None:
    assert str(Scope.parse(text)) == text


@given(pattern=st.text("ab*", max_size=7), text=st.text("ab", max_size=9))
def test_a_pattern_matches_what_the_regular_expression_does(pattern: str, text: str) -> None:
    expression = ".*".join(map(re.escape, pattern.split("*")))
    assert matches(pattern, text) == (re.fullmatch(expression, text) is not None)
