"""Are scales of quantised weights, and nothing else, kept from being cast?"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from weighbridge._core import dtypes
from weighbridge._core.block_scales import says_quantized
from weighbridge._core.layouts import TensorSpec
from weighbridge.errors import InvalidArgument
from weighbridge_service.plan.casting import cast_specs
from weighbridge_service.plan.quantised_scales import scales_of

W = "model.layers.0.mlp.down_proj"
SCHEMES: Mapping[str, tuple[Mapping[str, str], set[str]]] = {
    "NF4 of bitsandbytes": (
        {
            f"{W}.weight": "u8", f"{W}.weight.absmax": "fp32", f"{W}.weight.quant_map": "fp32",
            f"{W}.weight.nested_absmax": "fp32", f"{W}.weight.nested_quant_map": "fp32",
            f"{W}.weight.quant_state.bitsandbytes__nf4": "u8",
        },
        {f"{W}.weight.{name}" for name in ("absmax", "quant_map", "nested_absmax", "nested_quant_map")},
    ),
    "8 bits of bitsandbytes": ({f"{W}.weight": "i8", f"{W}.SCB": "fp32"}, {f"{W}.SCB"}),
    "GPTQ": (
        {f"{W}.qweight": "i32", f"{W}.qzeros": "i32", f"{W}.g_idx": "i32", f"{W}.scales": "fp16", f"{W}.bias": "fp16"},
        {f"{W}.scales"},
    ),
    "AWQ": ({f"{W}.qweight": "i32", f"{W}.qzeros": "i32", f"{W}.scales": "fp16"}, {f"{W}.scales"}),
    "compressed-tensors": (
        {f"{W}.weight_packed": "i32", f"{W}.weight_scale": "bf16", f"{W}.weight_shape": "i64"},
        {f"{W}.weight_scale"},
    ),
    "int8": ({f"{W}.weight": "i8", f"{W}.weight_scale": "fp32"}, {f"{W}.weight_scale"}),
    "MXFP4 with scales in float32": (
        {
            "mlp.experts.down_proj_blocks": "u8", "mlp.experts.down_proj_scales": "fp32",
            "mlp.experts.down_proj_bias": "bf16",
        },
        {"mlp.experts.down_proj_scales"},
    ),
    "NVFP4": (
        {f"{W}.weight": "u8", f"{W}.weight_scale": "fp8_e4m3", f"{W}.weight_scale_2": "fp32", f"{W}.input_scale": "fp32"},
        {f"{W}.weight_scale_2", f"{W}.input_scale"},
    ),
    "fp8 in blocks": ({f"{W}.weight": "fp8_e4m3", f"{W}.weight_scale_inv": "fp32"}, {f"{W}.weight_scale_inv"}),
}  # fmt: skip
PLAIN = {"model.norm.weight": "bf16", "model.embed_tokens.weight": "bf16"}


def specs(named: Mapping[str, str]) -> list[TensorSpec]:
    return [TensorSpec(name, dtypes.parse(dtype), (4, 4)) for name, dtype in named.items()]


@pytest.mark.parametrize("quantised", [False, True], ids=["by its tensors alone", "by its config"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_scales_of_every_scheme_are_known(scheme: str, quantised: bool) -> None:
    named, scales = SCHEMES[scheme]
    assert scales_of(specs({**named, **PLAIN}), quantised=quantised) == scales


def test_a_table_that_only_the_config_explains_is_a_scale() -> None:
    named = {f"{W}.codes": "i8", f"{W}.codebooks": "fp16", f"{W}.bias": "fp16"}
    assert scales_of(specs(named), quantised=True) == {f"{W}.codebooks"}
    assert scales_of(specs(named), quantised=False) == frozenset()


def test_plain_models_have_none_whatever_their_names() -> None:
    named = {
        "logit_scale": "fp32", "h.0.attn.bias": "u8", "h.0.attn.masked_bias": "fp32", "bn.weight": "fp32",
        "bn.num_batches_tracked": "i64", **PLAIN,
    }  # fmt: skip
    assert scales_of(specs(named), quantised=False) == frozenset()


def test_a_cast_names_the_scale_that_it_would_round_and_leaves_what_is_beside() -> None:
    named, scales = SCHEMES["GPTQ"]
    with pytest.raises(InvalidArgument, match=r"down_proj\.scales F16\[4, 4\] cannot be cast to BF16") as refused:
        cast_specs(specs(named), dtypes.parse("bf16"), scales=frozenset(scales))
    assert "dequantise" in refused.value.fix
    as_it_is = cast_specs(specs(named), dtypes.parse("fp16"), scales=frozenset(scales))
    assert as_it_is == specs(named)
    assert cast_specs(specs(PLAIN), dtypes.parse("fp32"), scales=frozenset(scales)) == specs(
        dict.fromkeys(PLAIN, "fp32")
    )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, True),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, True),
        ({"compression_config": {}}, True),
        ({"quantization": {"group_size": 64, "bits": 4}}, True),
        ({"quantization_config": None, "text_config": {}}, False),
        ({}, False),
    ],
)
def test_configs_say_that_weights_are_quantised(config: dict[str, object], expected: bool) -> None:
    assert says_quantized(config) is expected
