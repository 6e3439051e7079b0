"""Are limits of a policy read as they are meant, and those that say something else than they seem refused by their
names?
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.identities import identity, policy_file
from weighbridge.errors import InvalidArgument
from weighbridge_service.access import tokens
from weighbridge_service.access.access import Access
from weighbridge_service.access.identities import NO_LIMITS, IdentityLimits, PresentedCredentials
from weighbridge_service.access.policy import Policy


def limited(name: str = "a", **limits: Any) -> str:
    """An identity with limits, as a policy has it."""
    inline = ", ".join(f"{key} = {value!r}".replace("'", '"').replace("True", "true") for key, value in limits.items())
    return identity(name, ["pull"], token=f"token-of-{name}") + f"limits = {{{inline}}}\n"


def namespace(**said: Any) -> str:
    return "[[namespace]]\n" + "".join(f"{key} = {value!r}\n" for key, value in said.items())


def test_limits_are_those_of_the_identity_and_of_the_namespace_that_they_stand_with() -> None:
    policy = Policy.parse(
        limited("trainer", streams=8, bytes_per_second="2GB", versions_per_hour=60)
        + limited("engine", streams=2)
        + identity("free", ["pull"])
        + namespace(name="acme", stored="20TB")
        + namespace(name="lab", stored="1.5GiB")
    )
    assert {entry.identity.name: entry.identity.limits for entry in policy.entries} == {
        "trainer": IdentityLimits(streams=8, bytes_per_second=2_000_000_000, versions_per_hour=60),
        "engine": IdentityLimits(streams=2),
        "free": NO_LIMITS,
    }
    assert policy.stored == {"acme": 20 * 10**12, "lab": 3 << 29}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *(
            (limited(streams=wrong), "streams of limits of the identity 'a'")
            for wrong in (0, -1, 1.5, True, "8", 2**70)
        ),
        *(
            (limited(versions_per_hour=wrong), "versions_per_hour of limits of the identity 'a'")
            for wrong in (0, -1, "60", 2**70)
        ),
        *(
            (limited(streams=1, bytes_per_second=wrong), "bytes_per_second of limits of the identity 'a'")
            for wrong in (0, 10**9, -5, "", "2000000000", "-2GB", "0GB", "999kB", "2 parsec", "9" * 15 + "TB")
        ),
        (limited(bytes_per_second="2GB"), "not streams"),
        (limited(stream=1), "stream"),
        (identity("a", ["pull"], limits=3), "not a table"),
        (namespace(name="acme"), "the namespace 'acme' has no limit"),
        *(
            (namespace(name="acme", stored=wrong), "stored of the namespace 'acme'")
            for wrong in (0, 5, "5", "-1TB", "lots", "9" * 15 + "TB")
        ),
        (namespace(name="acme", stored="1TB", streams=3), "streams"),
        (namespace(name="acme", stored="1TB") * 2, "twice"),
        *((namespace(name=wrong, stored="1TB"), "not a namespace") for wrong in ("", "acme/smol", "*", 7, "../x")),
        ("namespace = 'acme'", "list of tables"),
    ],
)
def test_limits_that_are_wrong_are_refused_by_their_names(text: str, said: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        Policy.parse(text)
    assert said in refused.value.message
    assert refused.value.fix


def test_new_limits_count_at_once_and_wrong_ones_leave_those_before_in_force(tmp_path: Path) -> None:
    policy = policy_file(tmp_path, limited("trainer", streams=8))
    access, shown = Access(policy, look_seconds=0.0), PresentedCredentials(authorization="Bearer token-of-trainer")
    assert policy.read_text().count(tokens.digest("token-of-trainer")) == 1
    before = access.identify(shown)
    assert (before.limits.streams, access.stored_limits()) == (8, {})
    policy_file(tmp_path, limited("trainer", streams=4), namespace(name="acme", stored="1TB"))
    assert access.identify(shown).limits.streams == 4
    assert access.identify(shown) != before, "what goes on by the limits of before is to end"
    assert access.stored_limits() == {"acme": 10**12}
    policy_file(tmp_path, limited("trainer", streams=-4))
    assert access.identify(shown).limits.streams == 4
    assert access.stored_limits() == {"acme": 10**12}
    assert [each.name for each in access.limited()] == ["trainer"]
