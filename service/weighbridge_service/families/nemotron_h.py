"""Nemotron-H and Nemotron 3: layers of a state space model, of attention, of an MLP and of experts, each after a norm.

Megatron-core's names are those of its `MambaModel`; tensors are converted as in Megatron-Bridge. The input projection
of a state space model, and its convolution, have sections that Megatron-core declares separately: gate, input, B, C and
time steps. Only transformers 5 supports the model type, so the shapes are computed here, with the defaults of its
config. Layers for multi-token prediction are not supported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weighbridge.errors import InvalidArgument
from weighbridge_service.families.family import Family
from weighbridge_service.families.rules import WHOLE, GroupedQKV, Rule, Section, Shape
from weighbridge_service.families.shapes import check_experts

_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 21504,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "n_routed_experts": 8,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
}
_HEAD_DIM = 128
_MAMBA, _ATTENTION, _MLP, _EXPERTS = "M", "*", "-", "E"
_SYMBOLS = {
    # all of transformers' names for kinds of layers, with the letters of published configs
    "mamba": _MAMBA,
    "linear_attention": _MAMBA,
    "attention": _ATTENTION,
    "full_attention": _ATTENTION,
    "mlp": _MLP,
    "moe": _EXPERTS,
}
_NORMS = {
    _MAMBA: "mixer.in_proj.layer_norm_weight",
    _ATTENTION: "self_attention.linear_qkv.layer_norm_weight",
    _MLP: "mlp.linear_fc1.layer_norm_weight",
    _EXPERTS: "pre_mlp_layernorm.weight",
}
_LAYER, _MIXER = "decoder.layers.{layer}", "backbone.layers.{layer}.mixer"


class NemotronH(Family):
    """Nemotron-H, Nemotron Nano 2 and Nemotron 3."""

    transformers_type = "llama"
    keep_in_fp32 = ("e_score_correction_bias",)
    one_key_for_all_layers = False

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.layers = _kinds_of_layers(config)
        given = {name: value for name, value in config.items() if value is not None}
        head_dim = given.get("head_dim") or given.get("attention_head_dim") or _HEAD_DIM
        of_layers = {"num_hidden_layers": len(self.layers), "head_dim": head_dim}
        super().__init__({**_DEFAULTS, **given, **of_layers})
        check_experts(self.layers.count(_EXPERTS), self.experts)
        if config.get("use_bias") or config.get("mlp_bias"):
            raise InvalidArgument(
                "config.json asks for biases (use_bias, mlp_bias), and the weight map of nemotron_h has none",
                fix="register the model without a weight map: weight_map=False, or --no-weight-map",
            )

    @property
    def experts(self) -> int:
        """Number of routed experts in each layer that has experts; 0 if no layer has experts."""
        return int(self.config["n_routed_experts"]) if _EXPERTS in self.layers else 0

    def hugging_face_shapes(self) -> dict[str, Shape]:
        """Shapes of the model's tensors, in the order of the files."""
        hidden = self.config["hidden_size"]
        found: dict[str, Shape] = {}
        found["backbone.embeddings.weight"] = (self.vocab_size, hidden)
        makers = {
            _MAMBA: self._mamba_shapes,
            _ATTENTION: self._attention_shapes,
            _MLP: lambda: _mlp("", hidden, self.config["intermediate_size"]),
            _EXPERTS: self._expert_shapes,
        }
        for layer, kind in enumerate(self.layers):
            found[f"backbone.layers.{layer}.norm.weight"] = (hidden,)
            found |= {f"backbone.layers.{layer}.mixer.{name}": shape for name, shape in makers[kind]().items()}
        found["backbone.norm_f.weight"] = (hidden,)
        found["lm_head.weight"] = (self.vocab_size, hidden)
        return found

    def rules(self) -> Sequence[Rule]:
        """Rules of all kinds of tensors, and one rule for the norm of each layer, whose name depends on the kind of the
        layer.
        """
        return [
            Rule("embedding.word_embeddings.weight", ("backbone.embeddings.weight",), WHOLE, vocabulary=True),
            Rule("decoder.final_norm.weight", ("backbone.norm_f.weight",), WHOLE),
            Rule("output_layer.weight", ("lm_head.weight",), WHOLE, vocabulary=True),
            *(
                Rule(f"decoder.layers.{layer}.{_NORMS[kind]}", (f"backbone.layers.{layer}.norm.weight",), WHOLE)
                for layer, kind in enumerate(self.layers)
            ),
            *self._mamba(),
            *self._attention_and_mlp(),
        ]

    def parallel_plan(self) -> Mapping[str, str]:
        """Tensor-parallel plan: state space models are split by heads, section by section, other modules as usual."""
        there = "backbone.layers.*.mixer"
        rows = ("in_proj", "conv1d", "norm", "q_proj", "k_proj", "v_proj", "up_proj")
        plan = dict.fromkeys((there, *(f"{there}.{module}" for module in rows)), "colwise")
        plan |= {f"{there}.{module}": "rowwise" for module in ("out_proj", "o_proj", "down_proj")}
        return {**plan, "lm_head": "colwise"}

    def _mamba(self) -> Iterator[Rule]:
        here, there = f"{_LAYER}.mixer", _MIXER
        gate, inputs, outputs = (Section(name, self._inner) for name in ("z", "x", "x"))
        states = tuple(Section(name, self._states) for name in "BC")
        steps = Section("dt", self.config["mamba_num_heads"])
        projected = (gate, inputs, *states, steps)
        yield Rule(f"{here}.in_proj.weight", (f"{there}.in_proj.weight",), WHOLE, sections=projected)
        for kind in ("weight", "bias"):
            name = f"conv1d.{kind}"
            yield Rule(f"{here}.{name}", (f"{there}.{name}",), WHOLE, sections=(outputs, *states))
        for name in ("A_log", "D", "dt_bias", "norm.weight"):
            yield Rule(f"{here}.{name}", (f"{there}.{name}",), WHOLE, by_heads=True)
        yield Rule(f"{here}.out_proj.weight", (f"{there}.out_proj.weight",), WHOLE)

    def _attention_and_mlp(self) -> Iterator[Rule]:
        attention, mlp, there = f"{_LAYER}.self_attention", f"{_LAYER}.mlp", _MIXER
        projections = tuple(f"{there}.{part}_proj.weight" for part in "qkv")
        yield Rule(f"{attention}.linear_qkv.weight", projections, GroupedQKV(*self.head_counts()))
        yield Rule(f"{attention}.linear_proj.weight", (f"{there}.o_proj.weight",), WHOLE)
        experts = "experts.experts.{expert}.", "experts.{expert}."
        for ours, theirs in (("", ""), experts, ("shared_experts.", "shared_experts.")):
            yield Rule(f"{mlp}.{ours}linear_fc1.weight", (f"{there}.{theirs}up_proj.weight",), WHOLE)
            yield Rule(f"{mlp}.{ours}linear_fc2.weight", (f"{there}.{theirs}down_proj.weight",), WHOLE)
        for name in ("fc1_latent_proj.weight", "fc2_latent_proj.weight"):
            yield Rule(f"{mlp}.{name}", (f"{there}.{name}",), WHOLE)
        yield Rule(f"{mlp}.router.weight", (f"{there}.gate.weight",), WHOLE)
        yield Rule(f"{mlp}.router.expert_bias", (f"{there}.gate.e_score_correction_bias",), WHOLE)

    @property
    def _inner(self) -> int:
        """Number of elements of all heads of a state space model."""
        return int(self.config["mamba_num_heads"] * self.config["mamba_head_dim"])

    @property
    def _states(self) -> int:
        """Number of elements of B, which equals that of C."""
        return int(self.config["n_groups"] * self.config["ssm_state_size"])

    def _mamba_shapes(self) -> dict[str, Shape]:
        heads, hidden = self.config["mamba_num_heads"], self.config["hidden_size"]
        channels = self._inner + 2 * self._states
        bias = {"conv1d.bias": (channels,)} if self.config["use_conv_bias"] else {}
        return {
            **dict.fromkeys(("dt_bias", "A_log", "D"), (heads,)),
            "conv1d.weight": (channels, 1, self.config["conv_kernel"]),
            **bias,
            "in_proj.weight": (self._inner + channels + heads, hidden),
            "norm.weight": (self._inner,),
            "out_proj.weight": (hidden, self._inner),
        }

    def _attention_shapes(self) -> dict[str, Shape]:
        hidden, size = self.config["hidden_size"], self.config["head_dim"]
        heads, kv_heads = self.head_counts()
        return {
            "q_proj.weight": (heads * size, hidden),
            "k_proj.weight": (kv_heads * size, hidden),
            "v_proj.weight": (kv_heads * size, hidden),
            "o_proj.weight": (hidden, heads * size),
        }

    def _expert_shapes(self) -> dict[str, Shape]:
        hidden, latent = self.config["hidden_size"], self.config.get("moe_latent_size")
        found: dict[str, Shape] = {}
        for expert in range(self.experts):
            found |= _mlp(f"experts.{expert}.", latent or hidden, self.config["moe_intermediate_size"])
        found["gate.weight"] = (self.experts, hidden)
        found["gate.e_score_correction_bias"] = (self.experts,)
        found |= _mlp("shared_experts.", hidden, self.config["moe_shared_expert_intermediate_size"])
        if latent:
            found |= {"fc1_latent_proj.weight": (latent, hidden), "fc2_latent_proj.weight": (hidden, latent)}
        return found


def _mlp(prefix: str, hidden: int, inner: int) -> dict[str, Shape]:
    """Shapes of an MLP without a gate."""
    return {f"{prefix}up_proj.weight": (inner, hidden), f"{prefix}down_proj.weight": (hidden, inner)}


def _kinds_of_layers(config: Mapping[str, Any]) -> str:
    """The letter of each layer's kind, from fields of published configs or of transformers 5.

    Raises InvalidArgument.
    """
    pattern, listed = config.get("hybrid_override_pattern"), config.get("layers_block_type")
    letters = pattern
    if isinstance(listed, list):
        letters = [_SYMBOLS.get(str(word), str(word)) for word in listed]
    if not isinstance(letters, str | list) or not letters or not {*_NORMS}.issuperset(letters):
        raise InvalidArgument(
            "config.json does not state the kind of each layer in hybrid_override_pattern or layers_block_type: "
            f"{str(letters)[:80]!r} is not a sequence of {' '.join(_NORMS)}"
        )
    return "".join(letters)
