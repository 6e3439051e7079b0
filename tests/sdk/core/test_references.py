"""Is a version named as people name it, apart or in one, and is a slip in a name answered with what was meant?"""

from __future__ import annotations

import pytest
import torch

from weighbridge._core import dtypes
from weighbridge._core.references import Reference, is_training
from weighbridge._core.text.shortening import shortened
from weighbridge._core.text.suggestions import did_you_mean, model_meant
from weighbridge.errors import InvalidArgument


@pytest.mark.parametrize(
    ("named", "meant"),
    [
        (("acme/smol", 17), ("acme/smol", "17")),
        (("acme/smol@17", None), ("acme/smol", "17")),
        (("acme/smol@17", 17), ("acme/smol", "17")),
        (("acme/smol@prod", "prod"), ("acme/smol", "prod")),
        (("acme/smol", None), ("acme/smol", "latest")),
    ],
)
def test_model_and_version_are_named_apart_or_in_one(
    named: tuple[str, str | int | None], meant: tuple[str, str]
) -> None:
    assert Reference.of(*named, default="latest") == Reference(*meant)


def test_training_states_are_known_by_the_name_of_their_part_and_by_no_ref() -> None:
    for name in ("acme/smol:training", "acme/smol:training@17", "acme/smol:training@latest"):
        assert is_training(name)
    for name in ("acme/smol", "acme/training", "acme/smol@17", "acme/smol@a:training"):
        assert not is_training(name)


@pytest.mark.parametrize("named", [("acme/smol@17", 18), ("acme/smol@latest", 17), ("a/b@1@2", None), ("a/b@", None)])
def test_two_versions_in_one_call_are_refused(named: tuple[str, int | None]) -> None:
    with pytest.raises(InvalidArgument):
        Reference.of(*named)


@pytest.mark.parametrize("version", ["", "latest", "0", "-1", "1.5", "٣", "9" * 30, "1" * 30, "1" * 5000])
def test_only_a_number_is_a_number(version: str) -> None:
    assert Reference("acme/smol", "17").number == 17
    with pytest.raises(
        InvalidArgument, match="not a version number" if version else "no version of acme/smol is named"
    ):
        _ = Reference("acme/smol", version).number


def test_torch_dtypes_are_dtypes_by_any_name() -> None:
    for dtype in (torch.bfloat16, "bf16", "BF16", "torch.bfloat16", dtypes.parse("bfloat16")):
        assert dtypes.parse(dtype).torch is torch.bfloat16
    with pytest.raises(InvalidArgument):
        dtypes.parse(16)  # type: ignore[arg-type]


def test_a_suggestion_is_alike_and_has_the_same_numbers() -> None:
    names = ["model.layers.0.q_proj", "model.layers.1.q_proj", "prod", "latest"]
    assert did_you_mean("prd", names) == "; did you mean prod?"
    assert did_you_mean("model.layers.1.q_prj", names) == "; did you mean model.layers.1.q_proj?"
    assert did_you_mean("model.layers.2.q_proj", names) == "", "another layer is no slip"
    assert did_you_mean("something", names) == ""


def test_a_model_that_was_meant_is_alike_in_both_parts_whatever_its_number() -> None:
    names = ["acme/smol", "acme/gpt2", "labs/smol3", "acme/qwen3-8b"]
    assert model_meant("acme/smol2", names) == "acme/smol"
    assert model_meant("acne/smol", names) == "acme/smol"
    assert model_meant("acme/qwen3-4b", names) == "acme/qwen3-8b"
    assert model_meant("acme/nope", names) == "", "the namespace alone makes no likeness"
    assert model_meant("other/smol", names) == ""
    assert model_meant("acme/smol", []) == ""


def test_long_names_that_differ_in_a_word_are_not_alike() -> None:
    names = ["model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"]
    assert did_you_mean("transformer.layers.0.self_attn.q_proj.weight", names) == ""
    assert did_you_mean("model.layers.0.self_attn.wide.weight", names) == ""
    assert did_you_mean("model.embed_token.weight", names) == "; did you mean model.embed_tokens.weight?"


def test_a_text_that_is_too_long_ends_after_a_word() -> None:
    assert shortened("as it is", 8) == "as it is"
    assert shortened("rank 3 was refused: names", 21) == "rank 3 was refused:…"
    assert shortened("x" * 30, 10) == "x" * 9 + "…"
