"""Base class of families: the extension point for a model's tensors and rules.

A family is a class in one file. Families of this package are in the table of `weighbridge_service.families`. Other
installed packages add families by the entry point group ``weighbridge.families``, under the ``model_type`` of their
configs::

    [project.entry-points."weighbridge.families"]
    my_model = "my_package.my_model:MyModel"

A family must implement `Family.rules`; everything else has a default that fits most models. `llama4` is an example that
uses only this interface.
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
    """A model of the family, from its config.

    Args:
        config: content of ``config.json``.

    Attributes:
        config: as given.
        transformers_config: transformers' config object, with only the fields of its class.
    """

    transformers_type: ClassVar[str] = ""
    """Model type of the architecture in transformers, if it differs from the config's."""
    experts_field: ClassVar[str] = ""
    """Name of the config's field with the number of routed experts; empty if models of the family have no experts."""
    keep_in_fp32: ClassVar[tuple[str, ...]] = ()
    """Suffixes of the names of tensors that are float32 regardless of the model's dtype."""

    one_key_for_all_layers: ClassVar[bool] = True
    """Whether Megatron-core uses one key for all identical layers; False if trainers list the layers with experts."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.transformers_config: Any = transformers_config(self.transformers_type or config["model_type"], config)

    def rules(self) -> Sequence[Rule]:
        """Rules of all kinds of tensors that the family may have.

        A rule applies if all of its Hugging Face tensors exist.
        """
        raise NotImplementedError

    def hugging_face_shapes(self) -> dict[str, Shape]:
        """Shapes of the model's tensors, by their names in files and in the order of the files.

        Tied tensors appear once.
        """
        if not self.experts_field or self.experts <= _FEW_EXPERTS:
            return shapes_of(self.model)
        return with_all_experts(shapes_of(self.model), shapes_of(self._model_with(3)), self.experts)

    def head_counts(self) -> tuple[int, int]:
        """Attention heads and key-value heads of the language model."""
        return self.text_config.num_attention_heads, self.text_config.num_key_value_heads

    def parallel_plan(self) -> Mapping[str, str]:
        """Tensor-parallel plan of the model, in the form of transformers' plans.

        Maps patterns of module names in files, with ``*`` for numbers, to ``colwise``, ``rowwise`` and others.
        """
        plan = parallel_plan_of(self.model)
        if self.text_config is not self.transformers_config:
            # only transformers 5 includes the output layer of multimodal models in its plan; drop it, so that slices do
            # not depend on the release
            plan = {module: style for module, style in plan.items() if not module.endswith("lm_head")}
        return plan

    @property
    def text_config(self) -> Any:
        """The config of the language model, which is nested in the configs of multimodal models."""
        return getattr(self.transformers_config, "text_config", self.transformers_config)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers of the language model, without layers for multi-token prediction."""
        return int(self.text_config.num_hidden_layers)

    @property
    def vocab_size(self) -> int:
        """Number of rows of the embedding, without padding."""
        return int(self.text_config.vocab_size)

    @property
    def experts(self) -> int:
        """Number of routed experts in each layer that has experts."""
        return int(getattr(self.text_config, self.experts_field)) if self.experts_field else 0

    @cached_property
    def model(self) -> Any:
        """transformers' model without memory for its weights; with only two experts if it has more than
        `_FEW_EXPERTS`.
        """
        many = self.experts_field and self.experts > _FEW_EXPERTS
        return self._model_with(2) if many else meta_model(self.transformers_config, self.config)

    def _model_with(self, experts: int) -> Any:
        config = copy.deepcopy(self.transformers_config)
        setattr(getattr(config, "text_config", config), self.experts_field, experts)
        return meta_model(config, self.config)

    def all_rules(self) -> list[Rule]:
        """The family's rules.

        If the model has a value or reward head, the rules of the head replace those of the output layer.
        """
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
    """Rules of layers for multi-token prediction. Each consists of a decoder layer and a few tensors of its own.

    Args:
        rules: rules of the decoder's layers.
        hugging_face_layer: Hugging Face's prefix of the layers, such as ``model.layers.{layer+61}``.
        own: Hugging Face's names of the layers' own tensors, by Megatron-core's names, which are relative to
            ``mtp.layers.{layer}.``.
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
            hugging_face=tuple(name.replace(decoder_there, f"{hugging_face_layer}.") for name in rule.hugging_face),
            part=MTP,
        )
        for rule in rules
        if rule.megatron.startswith(decoder)
    ]
    return found


MTP = "mtp"
"""Name of the optional part with the layers for multi-token prediction."""
