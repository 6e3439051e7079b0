"""Facts about a model that determine how engines cut its tensors: heads, experts, the vocabulary, places, its own
parallel plan.
"""

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
class CutFacts:
    """Facts that the cuts depend on.

    Attributes:
        model_type: model type in its config.
        tensors: its tensors, by name.
        plan: its own parallel plan.
        heads: number of attention heads.
        kv_heads: number of key-value heads.
        num_layers: number of decoder layers.
        vocab_size: rows of the embedding.
        experts_in_a_layer: routed experts in a layer; 0 if there are none.
        experts: number of experts in each module of experts, by the module's name.
        of_expert: tensors of one expert, by module and number of the expert; each with its place in the order of all
            tensors.
        common: the other tensors, in the same form.
        stacked: tensors that hold all experts of a layer.
        sections: rows of the sections of tensors that are cut section by section.
        alternating: tensors that interleave gate and up along the last axis.
        kinds: kind of each tensor; tensors of one kind and shape are cut alike.
        latent: names of the modules of multi-head latent attention.
        block: rows and columns of an fp8 weight that share a scale.
        places: the decoder layer of each tensor, or its place before or after the layers.
        vocabulary: tensors whose first axis is the vocabulary.
        output_too: tensors both before and after the layers: an embedding that is also the output layer.
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
    def of(bridge: Bridge, tensors: Mapping[str, TensorSpec], block: tuple[int, int]) -> CutFacts:
        """Facts from a model's family, and from the names of its tensors.

        Args:
            bridge: bridge of the model.
            tensors: tensors of the model, by name.
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
        return CutFacts(
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
                target.name for entry in bridge.megatron.values() if entry.rule.every > 1 for target in entry.targets
            ),
            {name: kind_of(name) + _LATENT_KIND * (_attention(name) in latent) for name in tensors},
            frozenset(latent),
            block,
            *_places(bridge),
        )

    def is_expert(self, name: str) -> bool:
        """Whether a tensor belongs to a single routed expert."""
        return _EXPERT.fullmatch(name) is not None

    def is_latent(self, name: str) -> bool:
        """Whether a parameter belongs to multi-head latent attention."""
        return _attention(name) in self.latent


def _places(bridge: Bridge) -> tuple[dict[str, int], frozenset[str], frozenset[str]]:
    """Places of Hugging Face's tensors, the tensors of the vocabulary, and the tensors that both the first and the last
    stage hold.
    """
    places: dict[str, int] = {}
    vocabulary: set[str] = set()
    embedding: set[str] = set()
    untied = False
    for name, entry in bridge.megatron.items():
        place = place_of(name)
        for target in entry.targets:
            places[target.name] = place
        # copies of tensors belong to layers for multi-token prediction
        places |= dict.fromkeys(entry.rule.copies, BEHIND_THE_LAYERS)
        if entry.rule.vocabulary:
            vocabulary |= {*(target.name for target in entry.targets), *entry.rule.copies}
        if name.endswith("word_embeddings.weight"):
            embedding |= {target.name for target in entry.targets}
        untied = untied or name.endswith("output_layer.weight")
    return places, frozenset(vocabulary), frozenset(() if untied else embedding)


def _attention(name: str) -> str:
    """The module two levels above a parameter; for weights of projections in attention, the attention module."""
    return name.rpartition(".")[0].rpartition(".")[0]
