"""Qwen3-Next: layers with gated delta nets and layers with gated attention, each with routed experts and a shared
expert.

Names are Megatron-core's own (``experimental_attention_variant="gated_delta_net"``, ``attention_output_gate``); tensors
are converted as in Megatron-Bridge. Norms are stored as offsets from one on both sides, except for the norm in a gated
delta net, which Hugging Face stores without the offset. Published files contain a layer for multi-token prediction,
which transformers omits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weighbridge.errors import InvalidArgument
from weighbridge_service.families.decoders import Decoder
from weighbridge_service.families.family import MTP, Family, mtp_rules
from weighbridge_service.families.rules import WHOLE, Rule, Section, Shape
from weighbridge_service.families.shapes import label_count

if TYPE_CHECKING:
    import torch

_HERE, _THERE = "decoder.layers.{layer}.self_attention", "model.layers.{layer}.linear_attn"
_FULL = "full_attention"
_OWN = {
    "eh_proj.weight": "mtp.fc.weight",
    "enorm.weight": "mtp.pre_fc_norm_embedding.weight",
    "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
    "final_layernorm.weight": "mtp.norm.weight",
}
"""Tensors of a layer for multi-token prediction that are not in its decoder layer."""
_PREDICTED = "num_nextn_predict_layers"


@dataclass(frozen=True)
class DeltaNetProjections:
    """Input projections of a gated delta net: query, key, value, gate, beta and alpha.

    Megatron-core concatenates them, each with all heads. Hugging Face stores the first four in one tensor and the
    others in another, both grouped by key head.

    Attributes:
        heads: number of key heads.
        rows: number of rows of each of the six projections.
    """

    heads: int
    rows: tuple[int, ...]

    def megatron_shape(self, shapes: Sequence[Shape]) -> Shape:
        """Shape of the Megatron-core tensor, from those of the Hugging Face tensors."""
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def split(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """The Hugging Face tensors, in the order in which the rule names them."""
        import torch

        parts = torch.split(tensor, list(self.rows))
        by_head = [part.reshape(self.heads, -1, *tensor.shape[1:]) for part in parts]
        return [torch.cat(some, dim=1).flatten(0, 1) for some in (by_head[:4], by_head[4:])]


class Qwen3Next(Family):
    """Qwen3-Next."""

    experts_field = "num_experts"
    one_key_for_all_layers = False

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        keys, values = self.text_config.linear_num_key_heads, self.text_config.linear_num_value_heads
        if values % keys:
            raise InvalidArgument(
                f"config.json has linear_num_value_heads = {values}, not a multiple of linear_num_key_heads = {keys}"
            )
        if self.mtp_layers > 1:
            raise InvalidArgument(
                f"config.json has {_PREDICTED} = {self.mtp_layers}, and files of qwen3_next have names for one layer"
            )

    @property
    def mtp_layers(self) -> int:
        """Number of layers for multi-token prediction: 1 by default, 0 for a model with a value or reward head."""
        given = self.config.get(_PREDICTED)
        return 0 if label_count(self.config) is not None else 1 if given is None else int(given)

    def hugging_face_shapes(self) -> dict[str, Shape]:
        """Shapes of transformers, followed by those of the layer for multi-token prediction."""
        shapes = super().hugging_face_shapes()
        if not self.mtp_layers:
            return shapes
        one = {
            "num_hidden_layers": 1,
            "layer_types": [_FULL],
            "mlp_only_layers": [],
            "decoder_sparse_step": 1,
        }
        predicting = type(self)({**self.config, **one, _PREDICTED: 0}).hugging_face_shapes()
        hidden, layer = self.text_config.hidden_size, "model.layers.0."
        own = {name: (hidden, 2 * hidden) if name == "mtp.fc.weight" else (hidden,) for name in _OWN.values()}
        of_layer = {name: shape for name, shape in predicting.items() if name.startswith(layer)}
        return shapes | own | {name.replace(layer, "mtp.layers.0."): s for name, s in of_layer.items()}

    def rules(self) -> Sequence[Rule]:
        """Rules of a decoder with experts.

        Rules of the norms before gated delta nets come first, as these have other names than norms before attention.
        """
        decoder = [*self._decoder.rules(), *self._decoder.experts(), self._shared_gate]
        predicting = mtp_rules(decoder, "mtp.layers.{layer}", {})
        own = [Rule(f"mtp.layers.0.{ours}", (theirs,), WHOLE, part=MTP) for ours, theirs in _OWN.items()]
        return [*self._norms(), *self._delta_net(), *decoder, *own, *predicting]

    def parallel_plan(self) -> Mapping[str, str]:
        """transformers' plan plus gated delta nets, which engines split by heads, and the layer for multi-token
        prediction.
        """
        there = "model.layers.*.linear_attn"
        rows = (there, *(f"{there}.{module}" for module in ("in_proj_qkvz", "in_proj_ba", "conv1d")))
        predicting = dataclasses.replace(self._decoder, theirs="mtp.").parallel_plan()
        plan = {**super().parallel_plan(), **self._decoder.parallel_plan(), **predicting}
        return {**plan, **dict.fromkeys(rows, "colwise"), f"{there}.out_proj": "rowwise"}

    @property
    def _decoder(self) -> Decoder:
        return Decoder(self.head_counts(), shared="shared_expert", gated_attention=True)

    @property
    def _shared_gate(self) -> Rule:
        here, there = "decoder.layers.{layer}.mlp.shared_experts.gate_weight", "model.layers.{layer}.mlp"
        return Rule(here, (f"{there}.shared_expert_gate.weight",), WHOLE)

    def _norms(self) -> Iterator[Rule]:
        for layer, kind in enumerate(self.text_config.layer_types):
            if kind != _FULL:
                here, there = f"decoder.layers.{layer}.self_attention.in_proj", f"model.layers.{layer}"
                yield Rule(f"{here}.layer_norm_weight", (f"{there}.input_layernorm.weight",), WHOLE)

    def _delta_net(self) -> Iterator[Rule]:
        config = self.text_config
        heads, values = config.linear_num_key_heads, config.linear_num_value_heads
        keys, inner = heads * config.linear_key_head_dim, values * config.linear_value_head_dim
        names = ("query", "key", "value", "z", "beta", "alpha")
        rows = (keys, keys, inner, inner, values, values)
        sections = tuple(Section(name, count) for name, count in zip(names, rows, strict=True))
        yield Rule(
            f"{_HERE}.in_proj.weight",
            (f"{_THERE}.in_proj_qkvz.weight", f"{_THERE}.in_proj_ba.weight"),
            DeltaNetProjections(heads, rows),
            sections=sections,
        )
        yield Rule(f"{_HERE}.conv1d.weight", (f"{_THERE}.conv1d.weight",), WHOLE, sections=sections[:3])
        for name in ("A_log", "dt_bias"):
            yield Rule(f"{_HERE}.{name}", (f"{_THERE}.{name}",), WHOLE, by_heads=True)
        yield Rule(f"{_HERE}.out_norm.weight", (f"{_THERE}.norm.weight",), WHOLE, shift=1.0)
        yield Rule(f"{_HERE}.out_proj.weight", (f"{_THERE}.out_proj.weight",), WHOLE)
