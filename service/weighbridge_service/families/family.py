"""Base class of families: the extension point for a model's tensors and rules.

A family is a class in one file. Those of this package are in the table of `weighbridge_service.families`; a package that is installed
beside Weighbridge brings further ones by the entry point group ``weighbridge.families``, under the ``model_type`` of their configs::

    [project.entry-points."weighbridge.families"]
    my_model = "my_package.my_model:MyModel"

It has to say one thing, `Family.rules`; for everything else there is an answer that fits most models. `llama4` is an example
that uses nothing but this.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from weighbridge_service.families.rules import WHOLE, Rule, Shape
from weighbridge_service.families.shapes import (
    label_count,
    meta_model,
    parallel_plan_of,
    shapes_of,
    transformers_config,
    with_all_experts,
)

_FEW_EXPERTS = 3


class Family:
    """A model of the family, by its config.

    Args:
        config: content of ``config.json``.

    Attributes:
        config: that content.
        transformers_config: the same as transformers' class, with only the family's own fields.
    """

    transformers_type: ClassVar[str] = ""
    """The model type under which transformers knows the architecture, where that is another."""
    experts_field: ClassVar[str] = ""
    """Name of the config's field that counts the routed experts; empty if there are none."""
    keep_in_fp32: ClassVar[tuple[str, ...]] = ()
    """What the names of tensors end with that are float32 whatever the dtype of the model."""

    one_key_for_all_layers: ClassVar[bool] = True
    """Whether Megatron-core gives layers that are alike one key; not where trainers list which layers have experts."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.transformers_config: Any = transformers_config(
            self.transformers_type or config["model_type"], config
        )

    def rules(self) -> Sequence[Rule]:
        """The kinds of tensors that the family may have. A rule counts where all of its Hugging Face tensors exist."""
        raise NotImplementedError

    def hugging_face_shapes(self) -> dict[str, Shape]:
        """Shapes of the model's tensors, by the names they have in files and in their order; tied ones once."""
        if not self.experts_field or self.experts <= _FEW_EXPERTS:
            return shapes_of(self.model)
        return with_all_experts(shapes_of(self.model), shapes_of(self._model_with(3)), self.experts)

    def head_counts(self) -> tuple[int, int]:
        """Attention heads and key-value heads of the language model."""
        return self.text_config.num_attention_heads, self.text_config.num_key_value_heads

    def parallel_plan(self) -> Mapping[str, str]:
        """How engines cut modules for tensor parallelism, as transformers writes its plans.

        Patterns of module names as files have them, with ``*`` for numbers, to ``colwise``, ``rowwise`` and others.
        """
        plan = parallel_plan_of(self.model)
        if self.text_config is not self.transformers_config:
            # transformers 5 cuts the output layer of models with images as well; slices are the same with either
            plan = {module: style for module, style in plan.items() if not module.endswith("lm_head")}
        return plan

    @property
    def text_config(self) -> Any:
        """The config of the language model, which multimodal models have inside theirs."""
        return getattr(self.transformers_config, "text_config", self.transformers_config)

    @property
    def num_layers(self) -> int:
        """Decoder layers of the language model, those for multi-token prediction not counted."""
        return int(self.text_config.num_hidden_layers)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, without padding."""
        return int(self.text_config.vocab_size)

    @property
    def experts(self) -> int:
        """Routed experts in each layer that has them."""
        return int(getattr(self.text_config, self.experts_field)) if self.experts_field else 0

    @cached_property
    def model(self) -> Any:
        """transformers' model without memory for its weights; with two experts only, if it has more than a few."""
        many = self.experts_field and self.experts > _FEW_EXPERTS
        return self._model_with(2) if many else meta_model(self.transformers_config, self.config)

    def _model_with(self, experts: int) -> Any:
        config = copy.deepcopy(self.transformers_config)
        setattr(getattr(config, "text_config", config), self.experts_field, experts)
        return meta_model(config, self.config)

    def all_rules(self) -> list[Rule]:
        """The family's rules, with the value or reward head in the place of the output layer if the model has one."""
        rules = list(self.rules())
        if label_count(self.config) is not None:
            rules = [rule for rule in rules if not rule.megatron.endswith("output_layer.weight")]
            rules += [
                Rule("output_layer.weight", ("score.weight",), WHOLE),
                Rule("output_layer.bias", ("score.bias",), WHOLE),
            ]
        return rules


def mtp_rules(
    rules: Sequence[Rule],
    hugging_face_layer: str,
    own: Mapping[str, str],
) -> list[Rule]:
    """Rules for layers of multi-token prediction: a decoder layer inside each, and a few tensors of their own.

    Args:
        rules: of the decoder's layers.
        hugging_face_layer: where the layers are, such as ``model.layers.{layer+61}``.
        own: for each of Megatron-core's own tensors below ``mtp.layers.{layer}.``, Hugging Face's.
    """
    found = [
        Rule(f"mtp.layers.{{layer}}.{ours}", (f"{hugging_face_layer}.{theirs}",), WHOLE, part=MTP)
        for ours, theirs in own.items()
    ]
    decoder, decoder_there = "decoder.layers.{layer}.", "model.layers.{layer}."
    found += [
        dataclasses.replace(
            rule,
            megatron=rule.megatron.replace(decoder, "mtp.layers.{layer}.transformer_layer."),
            hugging_face=tuple(
                name.replace(decoder_there, f"{hugging_face_layer}.") for name in rule.hugging_face
            ),
            part=MTP,
        )
        for rule in rules
        if rule.megatron.startswith(decoder)
    ]
    return found


MTP = "mtp"
"""The optional part with the layers for multi-token prediction."""
