"""Families that use mbridge. They have the same interface as all other families, so that mbridge can be replaced.

mbridge runs on tensors without weights; it needs neither a process group nor a device.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from weighbridge_service.families.family import Family
from weighbridge_service.families.rules import WHOLE, Rule, Shape

if TYPE_CHECKING:
    import torch

_TABLES = ("_DIRECT_MAPPING", "_ATTENTION_MAPPING", "_MLP_MAPPING", "_OTHER_MAPPING")
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_LAYERS = "decoder.layers.{layer}."


class MBridgeFamily(Family):
    """A family with mbridge's names and conversions for its model type."""

    mbridge_type: ClassVar[str] = ""
    """Model type of the family in mbridge, if it differs from the config's."""
    further_names: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Tensors of a decoder layer that mbridge's tables omit, such as biases: maps Megatron-core's names to Hugging
    Face's, as in rules.
    """

    def rules(self) -> Sequence[Rule]:
        """Rules from mbridge's tables."""
        return self.rules_of(self.transformers_config, self.mbridge_type or self.config["model_type"])

    def rules_of(self, config: Any, model_type: str) -> list[Rule]:
        """Rules from mbridge's tables for a transformers config and a model type of mbridge."""
        return list(self._rules(_offline_bridge(config, model_type, self.further_names)))

    def _rules(self, bridge: Any) -> Iterator[Rule]:
        for name, target in bridge._DIRECT_MAPPING.items():
            if name.endswith(_VOCABULARY):
                yield Rule(name, (target,), WHOLE, vocabulary=True)
            else:
                yield Rule(name, (target,), _MBridgeConversion(bridge, name))
        for suffix, targets in self._layer_names(bridge):
            name = suffix if "{layer_number}" in suffix else f"{_LAYERS}{suffix}"
            name = name.replace("{layer_number}", "{layer}")
            sample = name.replace("{layer}", "0")
            if "{expert_id}" in targets[0]:
                # mbridge's names end with the expert's number; in names of distributed checkpoints it precedes the
                # module
                sample += ("" if sample.endswith("weight") else ".weight") + "0"
                name = name.removesuffix(".weight").replace("experts.", "experts.experts.{expert}.") + ".weight"
            elif not name.endswith(("weight", "bias")):  # mbridge searches names for the keys of its tables
                name, sample = f"{name}.weight", f"{sample}.weight"
            hugging_face = tuple(
                target.replace("{layer_number}", "{layer}").replace("{expert_id}", "{expert}") for target in targets
            )
            halves = ".linear_fc1." in name and len(hugging_face) == 2
            yield Rule(name, hugging_face, _MBridgeConversion(bridge, sample), halves=halves)

    def _layer_names(self, bridge: Any) -> Iterator[tuple[str, Sequence[str]]]:
        for table in _TABLES[1:]:
            for suffix, targets in getattr(bridge, table).items():
                yield (f"mlp.{suffix}" if suffix.startswith("shared_experts.") else suffix), targets


class _MBridgeConversion:
    """mbridge's own conversion of one kind of tensor."""

    def __init__(self, bridge: Any, sample: str) -> None:
        self._bridge = bridge
        self._sample = sample

    def megatron_shape(self, shapes: Sequence[Shape]) -> Shape:
        import torch

        tensors = [torch.empty(shape, device="meta") for shape in shapes]
        return tuple(self._bridge._weight_to_mcore_format(self._sample, tensors).shape)

    def split(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        found: Sequence[torch.Tensor] = self._bridge._weight_to_hf_format(self._sample, tensor)[1]
        return found


def _offline_bridge(config: Any, model_type: str, further_names: Mapping[str, tuple[str, ...]]) -> Any:
    """An mbridge bridge that needs no process group and shares no state with other instances of its class."""
    # megatron-core and mbridge warn about everything that a machine without a GPU lacks; this module uses none of it
    warnings.filterwarnings("ignore", category=UserWarning, module=r"(megatron|mbridge)(\.|$)")
    import mbridge  # noqa: F401  (registers the families)
    from mbridge.core.bridge import _MODEL_REGISTRY
    from mbridge.core.parallel_states import ParallelStates

    family = _MODEL_REGISTRY[model_type]
    config = copy.deepcopy(config)
    text = getattr(config, "text_config", config)
    if getattr(text, "head_dim", None) is None:
        text.head_dim = text.hidden_size // text.num_attention_heads
    for name, value in text.to_dict().items():
        # mbridge reads fields of the language model from configs of multimodal models, which only transformers 4
        # supports
        if not hasattr(config, name):
            setattr(config, name, value)

    class Offline(family):  # type: ignore[misc, valid-type]
        def _build_config(self) -> SimpleNamespace:
            # mbridge writes the names of tied weights into tables of the class, so this instance gets copies
            for table in _TABLES:
                setattr(self, table, copy.deepcopy(getattr(self, table)))
            for name, targets in further_names.items():
                names = self._ATTENTION_MAPPING if "self_attention." in name else self._MLP_MAPPING
                names[name] = [target.replace("{layer}", "{layer_number}") for target in targets]
            return SimpleNamespace(
                num_layers=text.num_hidden_layers,
                mtp_num_layers=None,
                gated_linear_unit=True,
                num_moe_experts=None,
            )

    return Offline(config, dtype=None, parallel_states=ParallelStates(vpp_size=None))
