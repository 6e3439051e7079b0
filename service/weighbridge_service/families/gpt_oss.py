"""gpt-oss: mixtures of experts with biases everywhere, and an offset of the softmax in each attention head.

Names are Megatron-core's own (``softmax_type="learnable"``, ``add_bias_linear``). Hugging Face stacks the experts of a
layer as ``[experts, inputs, outputs]``, with alternating outputs of gate and up; Megatron-core stores all rows of the
gate before those of up. The family supports the bf16 form. The published MXFP4 weights can be dequantised to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from weighbridge_service.families.decoders import Decoder
from weighbridge_service.families.family import Family
from weighbridge_service.families.rules import WHOLE, Alternating, Rule, Transposed

_ATTENTION, _MLP = "decoder.layers.{layer}.self_attention", "decoder.layers.{layer}.mlp"
_EXPERT = f"{_MLP}.experts.experts.{{expert}}"
_THERE = "model.layers.{layer}"


class GptOss(Family):
    """gpt-oss of 20B and 120B."""

    experts_field = "num_local_experts"

    def rules(self) -> Sequence[Rule]:
        """Rules of a decoder, of the softmax offsets, and of the experts."""
        return [*self._decoder.rules(), *self._own()]

    def parallel_plan(self) -> Mapping[str, str]:
        """transformers' plan plus attention, which transformers 5 omits from its plan."""
        return {**super().parallel_plan(), **self._decoder.parallel_plan()}

    @property
    def _decoder(self) -> Decoder:
        return Decoder(self.head_counts(), router="router")

    def _own(self) -> Iterator[Rule]:
        yield Rule(f"{_ATTENTION}.core_attention.softmax_offset", (f"{_THERE}.self_attn.sinks",), WHOLE)
        for kind, ending, down in (("weight", "", Transposed()), ("bias", "_bias", WHOLE)):
            experts = f"{_THERE}.mlp.experts"
            yield Rule(
                f"{_EXPERT}.linear_fc1.{kind}",
                (f"{experts}.gate_up_proj{ending}[{{expert}}]",),
                Alternating(),
                halves=True,
                every=2,
            )
            yield Rule(f"{_EXPERT}.linear_fc2.{kind}", (f"{experts}.down_proj{ending}[{{expert}}]",), down)
