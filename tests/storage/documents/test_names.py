"""Is every name that gets in safe as a path, a URL and a key, and every Hub name let in?"""

from __future__ import annotations

import string
from typing import Any

import pytest
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils._validators import validate_repo_id
from hypothesis import given
from hypothesis import strategies as st

from weighbridge.errors import InvalidArgument
from weighbridge_storage.documents.names import (
    ModelName,
    check_component,
    check_file_name,
    check_file_names,
    check_ref_name,
    check_version_file_name,
    version_key,
    version_prefix,
)
from weighbridge_storage.stores.objects import check_key

HOSTILE = [
    "", ".", "..", "../x", "a/../b", "/etc/passwd", "a\x00b", "a\\b", "a b", "a\nb", "x" * 10_000, ".hidden", "a//b", "a/", "a/.b/c",
    "é", "a\u202eb", "%2e%2e", "a:b", "*", "\ud800", "١٢", "-rf",
]  # fmt: skip
SMOL = ModelName("acme", "smol")


@pytest.mark.parametrize("name", HOSTILE)
def test_no_hostile_name_passes_any_check(name: str) -> None:
    for check in (check_ref_name, check_file_name, check_version_file_name, lambda n: ModelName("acme", n)):
        with pytest.raises(InvalidArgument) as caught:
            check(name)
        assert len(str(caught.value)) < 500
    with pytest.raises(InvalidArgument):
        ModelName.parse(f"acme/{name}")


def test_a_file_may_lie_in_folders_that_are_as_safe_as_its_name() -> None:
    for name in ("1_Pooling/config.json", "/".join("abcdefgh"), f"{'a' * 127}/{'b' * 128}"):
        assert check_file_name(name) == name
        assert check_key(version_key(SMOL, 7, name)) == f"{version_prefix(SMOL, 7)}{name}"
    for name in (
        "/".join("abcdefghi"),
        f"{'a' * 128}/{'b' * 128}",
        "signatures/a",
        "a/x.safetensors",
        "a/b.blake3",
    ):
        with pytest.raises(InvalidArgument):
            check_file_name(name)
    for check in (check_component, check_ref_name):
        with pytest.raises(InvalidArgument):
            check("a/b")
    with pytest.raises(InvalidArgument, match=r"^vocab is both a file and a folder"):
        check_file_names(["vocab/a.txt", "vocab", "config.json"])


@pytest.mark.parametrize("value", [None, 7, b"acme/smol", ["acme/smol"], True])
def test_what_is_no_text_is_no_name(value: Any) -> None:
    for check in (check_ref_name, check_file_name, ModelName.parse):
        with pytest.raises(InvalidArgument):
            check(value)


ALPHABET = string.ascii_letters[:4] + "Z09-_./ é"


@given(st.text(ALPHABET, max_size=12) | st.text("ab-", min_size=94, max_size=98) | st.just("a.git"))
def test_model_names_are_those_of_the_hub(name: str) -> None:
    def hub_takes(text: str) -> bool:
        try:
            validate_repo_id(text)
        except HFValidationError:
            return False
        return True

    def we_take(text: str) -> bool:
        try:
            ModelName.parse(text)
        except InvalidArgument:
            return False
        return True

    text = f"acme/{name}"
    # The Hub's pattern takes letters of every script; keys and URLs here are ASCII.
    assert we_take(text) == (hub_takes(text) and text.isascii())


@pytest.mark.parametrize("name", ["latest", "live", "0", "17", "000000000017"])
def test_a_ref_is_never_taken_for_a_number_or_for_one_that_moves_by_itself(name: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_ref_name(name)
    assert ("give the version a tag" in caught.value.fix) == name.isalpha()


@pytest.mark.parametrize("name", ["prod", "v1.2", "a", "_x", "x" * 64, "1a", "Latest"])
def test_usual_refs_pass(name: str) -> None:
    assert check_ref_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "weighbridge.json",
        "Weighbridge.JSON",
        "model.safetensors",
        "x.SafeTensors",
        "model.safetensors.index.json",
        "model.safetensors.blake3",
    ],
)
def test_a_side_file_cannot_stand_in_for_what_the_service_writes(name: str) -> None:
    with pytest.raises(InvalidArgument):
        check_file_name(name)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.model", "chat_template.jinja", "__init__.py"])
def test_usual_side_files_pass(name: str) -> None:
    assert check_file_name(name) == name


def test_version_folders_sort_by_number() -> None:
    numbers = [1, 2, 9, 10, 99, 100, 12345, 10**11]
    prefixes = [version_prefix(SMOL, n) for n in numbers]
    assert prefixes == sorted(prefixes)
    assert version_prefix(SMOL, 17) == "models/acme/smol/versions/000000000017/"
    assert version_key(SMOL, 17, "config.json") == "models/acme/smol/versions/000000000017/config.json"
    assert check_key(version_key(SMOL, 1, "x" * 128))


@pytest.mark.parametrize("number", [0, -1, 10**12])
def test_numbers_that_would_not_sort_are_refused(number: int) -> None:
    with pytest.raises(InvalidArgument):
        version_prefix(SMOL, number)
