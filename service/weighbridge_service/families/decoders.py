"""Rules of a typical decoder, for families that list their rules themselves.

A rule applies if its Hugging Face tensors exist. So one list serves models with and without biases, norms of queries
and keys, experts and shared experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from weighbridge_service.families.rules import WHOLE, GroupedQKV, Halves, Rule, Transposed


@dataclass(frozen=True)
class Decoder:
    """A decoder, described by the prefixes of its tensors and the names of its modules.

    Attributes:
        heads: attention heads and key-value heads.
        ours: prefix of Megatron-core's names, such as ``language_model.``.
        theirs: prefix of Hugging Face's, such as ``model.language_model.``.
        output_layer: Hugging Face's name of the output layer.
        mlp: Hugging Face's module of the MLP or the experts in a layer.
        router: module in `mlp` that selects the experts of a token.
        shared: module in `mlp` of the shared experts.
        gated: modules in an MLP or an expert: the gate projection, the up projection and the down projection.
        norm_of_all_heads: whether queries, and keys, are normalised over all heads together.
        gated_attention: whether the query projection also computes a gate for each head.
    """

    heads: tuple[int, int]
    ours: str = ""
    theirs: str = "model."
    output_layer: str = "lm_head.weight"
    mlp: str = "mlp"
    router: str = "gate"
    shared: str = "shared_experts"
    gated: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    norm_of_all_heads: bool = False
    gated_attention: bool = False

    @property
    def _here(self) -> str:
        return f"{self.ours}decoder.layers.{{layer}}"

    @property
    def _there(self) -> str:
        return f"{self.theirs}layers.{{layer}}"

    def rules(self) -> Iterator[Rule]:
        """All rules except those of the routed experts."""
        here, there = self._here, self._there
        attention, mlp = f"{there}.self_attn", f"{there}.{self.mlp}"
        grouped = GroupedQKV(*self.heads, gated=self.gated_attention)
        yield Rule(
            f"{self.ours}embedding.word_embeddings.weight",
            (f"{self.theirs}embed_tokens.weight",),
            WHOLE,
            vocabulary=True,
        )
        yield Rule(f"{self.ours}decoder.final_layernorm.weight", (f"{self.theirs}norm.weight",), WHOLE)
        yield Rule(f"{self.ours}output_layer.weight", (self.output_layer,), WHOLE, vocabulary=True)
        for kind in ("weight", "bias"):
            projections = tuple(f"{attention}.{p}_proj.{kind}" for p in "qkv")
            yield Rule(f"{here}.self_attention.linear_qkv.{kind}", projections, grouped)
            yield Rule(f"{here}.self_attention.linear_proj.{kind}", (f"{attention}.o_proj.{kind}",), WHOLE)
        for part in "qk":
            yield Rule(
                f"{here}.self_attention.{part}_layernorm.weight",
                (f"{attention}.{part}_norm.weight",),
                WHOLE,
                by_heads=self.norm_of_all_heads,
            )
        yield Rule(f"{here}.self_attention.linear_qkv.layer_norm_weight", (f"{there}.input_layernorm.weight",), WHOLE)
        yield Rule(f"{here}.pre_mlp_layernorm.weight", (f"{there}.post_attention_layernorm.weight",), WHOLE)
        yield from self._gated(f"{here}.mlp", mlp)
        for kind in ("weight", "bias"):
            yield Rule(f"{here}.mlp.router.{kind}", (f"{mlp}.{self.router}.{kind}",), WHOLE)
        of_experts = f"{mlp}.{self.router}.e_score_correction_bias"
        yield Rule(f"{here}.mlp.router.expert_bias", (of_experts,), WHOLE)
        yield from self._gated(f"{here}.mlp.shared_experts", f"{mlp}.{self.shared}")

    def experts(self) -> Iterator[Rule]:
        """Rules of the routed experts, if Hugging Face has separate tensors for each expert."""
        yield from self._gated(
            f"{self._here}.mlp.experts.experts.{{expert}}", f"{self._there}.{self.mlp}.experts.{{expert}}"
        )

    def stacked_experts(self) -> Iterator[Rule]:
        """Rules of the routed experts, if Hugging Face stacks those of a layer as ``[experts, inputs, outputs]``."""
        here, there = f"{self._here}.mlp.experts.experts.{{expert}}", f"{self._there}.{self.mlp}.experts"
        yield Rule(f"{here}.linear_fc1.weight", (f"{there}.gate_up_proj[{{expert}}]",), Transposed(), halves=True)
        yield Rule(f"{here}.linear_fc2.weight", (f"{there}.down_proj[{{expert}}]",), Transposed())

    def parallel_plan(self) -> dict[str, str]:
        """Tensor-parallel plan of attention and dense layers, in the form of transformers' plans, for models whose own
        plan omits them.
        """
        there = f"{self.theirs}layers.*"
        *gate_and_up, down = (f"{there}.{self.mlp}.{module}" for module in self.gated)
        rows = [f"{there}.self_attn.{p}_proj" for p in "qkv"] + gate_and_up
        if self.norm_of_all_heads:
            rows += [f"{there}.self_attn.{p}_norm" for p in "qk"]
        return {
            **dict.fromkeys(rows, "colwise"),
            f"{there}.self_attn.o_proj": "rowwise",
            down: "rowwise",
        }

    def _gated(self, ours: str, theirs: str) -> Iterator[Rule]:
        """Rules of an MLP with a gate."""
        for kind in ("weight", "bias"):
            gate, up, down = (f"{theirs}.{module}.{kind}" for module in self.gated)
            yield Rule(f"{ours}.linear_fc1.{kind}", (gate, up), Halves(), halves=True)
            yield Rule(f"{ours}.linear_fc2.{kind}", (down,), WHOLE)
