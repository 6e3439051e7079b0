"""Facts of a model by which engines cut its tensors: heads, experts, the vocabulary, places, its own parallel plan."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weighbridge._core.layouts import TensorSpec
from weighbridge_service.models.bridges import Bridge, kind_of
from weighbridge_service.models.megatron_layouts import BEHIND_THE_LAYERS, place_of

_LATENT_KIND = " (latent)"
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\..+")
_STACKED = re.compile(r".*\.experts\.(gate_up_proj|down_proj)(_bias)?")


@dataclass(frozen=True)
class EngineFacts:
    """What the cuts need to know.

    Attributes:
        model_type: of its config.
        tensors: by name.
        plan: its own parallel plan.
        heads: attention heads.
        kv_heads: key-value heads.
        num_layers: decoder layers.
        vocab_size: rows of the embedding.
        experts_in_a_layer: routed experts; 0 if there are none.
        experts: how many there are, by the name they are under.
        of_expert: the tensors of one expert, by the name it is under and its number; each with its place in the order.
        common: the other tensors, in the same form.
        stacked: the tensors that hold all experts of a layer.
        sections: rows of the sections of tensors that are cut section by section.
        alternating: tensors in which rows of gate and up take turns along the last axis.
        kinds: of which kind each tensor is; those of one kind and shape are cut alike.
        latent: where attention is multi-head latent attention, as the names of its modules.
        block: rows and columns of an fp8 weight that share a scale.
        places: the decoder layer of each tensor, or its place before or behind the layers.
        vocabulary: tensors whose first axis is the vocabulary.
        output_too: tensors that are before the layers and behind them: an embedding that is the output layer too.
    """

    model_type: str
    tensors: Mapping[str, TensorSpec]
    plan: Mapping[str, str]
    heads: int
    kv_heads: int
    num_layers: int
    vocab_size: int
    experts_in_a_layer: int
    experts: Mapping[str, int]
    of_expert: Mapping[tuple[str, int], Sequence[tuple[int, str]]]
    common: Sequence[tuple[int, str]]
    stacked: frozenset[str]
    sections: Mapping[str, Sequence[int]]
    alternating: frozenset[str]
    kinds: Mapping[str, str]
    latent: frozenset[str]
    block: tuple[int, int]
    places: Mapping[str, int]
    vocabulary: frozenset[str]
    output_too: frozenset[str]

    @staticmethod
    def of(bridge: Bridge, tensors: Mapping[str, TensorSpec], block: tuple[int, int]) -> EngineFacts:
        """What a family says of its tensors, and what their names say.

        Args:
            bridge: of the family.
            tensors: the model's, by name.
            block: rows and columns of an fp8 weight that share a scale.
        """
        experts: dict[str, int] = {}
        of_expert: dict[tuple[str, int], list[tuple[int, str]]] = {}
        common: list[tuple[int, str]] = []
        for place, name in enumerate(tensors):
            found = _EXPERT.fullmatch(name) if ".experts." in name else None
            if found:
                of_expert.setdefault((found[1], int(found[2])), []).append((place, name))
                experts[found[1]] = max(experts.get(found[1], 0), int(found[2]) + 1)
            else:
                common.append((place, name))
        heads, kv_heads = bridge.head_counts()
        latent = {name.rpartition(".kv_b_proj.")[0] for _, name in common if ".self_attn.kv_b_proj." in name}
        return EngineFacts(
            bridge.model_type,
            tensors,
            bridge.parallel_plan(),
            heads,
            kv_heads,
            bridge.num_layers,
            bridge.vocab_size,
            bridge.experts,
            experts,
            of_expert,
            common,
            frozenset(name for _, name in common if _STACKED.fullmatch(name)),
            {
                entry.targets[0].name: [section.rows for section in entry.rule.sections]
                for entry in bridge.megatron.values()
                if entry.rule.sections and len(entry.targets) == 1
            },
            frozenset(
                target.name
                for entry in bridge.megatron.values()
                if entry.rule.every > 1
                for target in entry.targets
            ),
            {name: kind_of(name) + _LATENT_KIND * (_attention(name) in latent) for name in tensors},
            frozenset(latent),
            block,
            *_places(bridge),
        )

    def is_expert(self, name: str) -> bool:
        """Whether a tensor is one of a single routed expert."""
        return _EXPERT.fullmatch(name) is not None

    def is_latent(self, name: str) -> bool:
        """Whether a parameter is of multi-head latent attention."""
        return _attention(name) in self.latent


def _places(bridge: Bridge) -> tuple[dict[str, int], frozenset[str], frozenset[str]]:
    """Where Hugging Face's tensors belong, which are of the vocabulary, and which the last stage has as well."""
    places: dict[str, int] = {}
    vocabulary: set[str] = set()
    embedding: set[str] = set()
    untied = False
    for name, entry in bridge.megatron.items():
        place = place_of(name)
        for target in entry.targets:
            places[target.name] = place
        # what a model has a second time is for its layers that predict further tokens
        places |= dict.fromkeys(entry.rule.copies, BEHIND_THE_LAYERS)
        if entry.rule.vocabulary:
            vocabulary |= {*(target.name for target in entry.targets), *entry.rule.copies}
        if name.endswith("word_embeddings.weight"):
            embedding |= {target.name for target in entry.targets}
        untied = untied or name.endswith("output_layer.weight")
    return places, frozenset(vocabulary), frozenset(() if untied else embedding)


def _attention(name: str) -> str:
    """The module two levels above a parameter: of the weights of its projections, the attention."""
    return name.rpartition(".")[0].rpartition(".")[0]
