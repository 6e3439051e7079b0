"""Is a policy read as it is meant, and one that says something else than it seems refused?"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.identities import identity
from weighbridge.errors import InvalidArgument
from weighbridge_service.access import tokens
from weighbridge_service.access.policy import Policy

_DOCUMENT = Path(__file__).parents[3] / "docs/access.md"
_ISSUER = """
[[issuer]]
name = "cluster"
issuer = "https://issuer.test"
audience = "weighbridge"
algorithms = ["RS256"]
keys = "/keys.json"
"""


def test_an_identity_is_found_by_each_of_its_proofs() -> None:
    policy = Policy.parse(
        _ISSUER
        + identity(
            "trainer",
            ["push:acme/*"],
            token="secret",
            certificates=["spiffe://cluster/ns/rl/*"],
            users=[1000],
            subjects=["cluster|system:serviceaccount:rl:*"],
        )
        + identity("others", ["pull"], certificates=["*"], anybody=True)
    )
    trainer = policy.by_token[tokens.digest("secret")]
    assert trainer.name == "trainer"
    assert policy.by_user[1000] == trainer
    assert policy.of_certificate(("spiffe://cluster/ns/rl/sa/x",)) == trainer
    assert policy.of_subject("cluster", "system:serviceaccount:rl:x") == trainer
    assert policy.of_subject("other", "system:serviceaccount:rl:x") is None
    others = policy.of_certificate(("node-7",))
    assert others is not None
    assert others.name == "others"
    assert policy.anybody == replace(others, proven=False), "whoever comes, and not somebody"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[identity", "TOML"),
        ("x = " + "[" * 100_000, "TOML"),
        ("x = " + "9" * 5000, "TOML"),
        ("[[identities]]\nname = 'a'", "identities"),
        (identity("a", ["pull"], tokens=["plain text"]), "digest"),
        (identity("a", ["pull"], token_s=["x"]), "token_s"),
        (identity("a", []), "may do nothing"),
        (identity("a", ["pull:a/b/c"]), "not a scope"),
        (identity("", ["pull"]), "no name"),
        (identity("a", ["pull"]) + identity("a", ["push"]), "twice"),
        (identity("a", ["pull"], token="x") + identity("b", ["push"], token="x"), "another identity"),
        (identity("a", ["pull"], users=[1]) + identity("b", ["push"], users=[1]), "another identity"),
        (identity("a", ["pull"], users=[True]), "user ids"),
        (identity("a", ["pull"], users=[-1]), "user ids"),
        (identity("a", ["pull"], anybody="false"), "neither true nor false"),
        (identity("a", ["pull"], anybody=True) + identity("b", ["push"], anybody=True), "second"),
        (identity("a", ["pull"], subjects=["cluster|x"]), "names no issuer"),
        (_ISSUER + identity("a", ["pull"], subjects=["cluster"]), "names no issuer"),
        (_ISSUER.replace("RS256", "HS256"), "HS256"),
        (_ISSUER.replace("RS256", "none"), "none"),
        (_ISSUER.replace('"weighbridge"', '""'), "audience"),
        (_ISSUER.replace("/keys.json", "http://issuer.test/keys"), "TLS"),
        ("identity = 'me'", "list of tables"),
    ],
)
def test_a_policy_that_is_wrong_is_refused_and_says_why(text: str, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        Policy.parse(text)


def test_the_policy_of_the_document_lets_nobody_in_before_tokens_are_put_in() -> None:
    found = re.search(r"```toml\n(.*?)```", _DOCUMENT.read_text(), re.DOTALL)
    assert found is not None
    text = found[1]
    with pytest.raises(InvalidArgument, match="not the digest") as refused:
        Policy.parse(text)
    assert "weighbridge token" in refused.value.fix

    made = [tokens.new_token(), tokens.new_token()]
    for token in made:
        text = text.replace("sha256:...", tokens.digest(token), 1)
    policy = Policy.parse(text)
    assert [policy.by_token[tokens.digest(token)].name for token in made] == ["trainer", "releases"]


def test_no_policy_of_the_document_has_a_digest_of_a_token() -> None:
    policies = re.findall(r"```toml\n(.*?)```", _DOCUMENT.read_text(), re.DOTALL)
    assert len(policies) > 1
    for text in policies:
        assert not re.search(r"sha256:[0-9a-f]", text)
