"""Relation of two tensor spaces: boxes of the one to boxes of the other, as data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from weighbridge._core.boxes import Box, Link
from weighbridge._core.layouts import Layout, TensorSpec


@dataclass(frozen=True)
class WeightMap:
    """How the tensors of a trainer in megatron-core's space relate to the tensors of Hugging Face.

    Attributes:
        megatron: the trainer's tensors.
        hugging_face: the model's tensors.
        links: from megatron-core to Hugging Face.
        copies: the same for tensors that Hugging Face has a second time: they are written, and not read on the way back.
        padding: parts of the trainer's tensors that have no counterpart (padded vocabulary), as name and box. Dropped
            on the way to Hugging Face, zero on the way back.
        seen: shapes of the model's tensors of which links have the last axis as two, because rows of different origin take turns
            along it: so two boxes say what would take one for each row.
        shifts: what is added to each element of some of the trainer's tensors, by their names, on the way to Hugging Face, copies
            included, and subtracted on the way back.
    """

    megatron: Mapping[str, TensorSpec]
    hugging_face: Mapping[str, TensorSpec]
    links: tuple[Link, ...]
    padding: tuple[tuple[str, Box], ...]
    copies: tuple[Link, ...] = ()
    seen: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    shifts: Mapping[str, float] = field(default_factory=dict)

    def as_seen(self, files: Layout) -> Layout:
        """A layout of the model's tensors, each of them whole, with the axes that the links have. The bytes are where they were."""
        if not self.seen:
            return files
        tensors = {
            name: replace(spec, shape=self.seen.get(name, spec.shape)) for name, spec in files.tensors.items()
        }
        placements = [
            p._replace(shard=p.shard._replace(box=Box.whole(self.seen[p.shard.tensor])))
            if p.shard.tensor in self.seen
            else p
            for p in files.placements
        ]
        return Layout(tensors, tuple(placements))

    @property
    def unevenly_placed(self) -> frozenset[str]:
        """The trainer's tensors of which a part lies in no place of the model, or in several."""
        return frozenset((*(name for name, _ in self.padding), *(link.source for link in self.copies)))

    @cached_property
    def inverse_links(self) -> tuple[Link, ...]:
        """From Hugging Face to megatron-core."""
        return tuple(link.inverse() for link in self.links)

    @cached_property
    def shifts_there(self) -> Mapping[str, float]:
        """The shifts by the names of the model's tensors, which get them."""
        links = (link for link in (*self.links, *self.copies) if link.source in self.shifts)
        return {link.target: self.shifts[link.source] for link in links}

    @cached_property
    def inverse_shifts(self) -> Mapping[str, float]:
        """What is added to each element of the trainer's tensors on the way back."""
        return {name: -shift for name, shift in self.shifts.items()}


def identity_links(tensors: Iterable[TensorSpec]) -> tuple[Link, ...]:
    """The links of a tensor space with itself."""
    boxes = ((t, Box.whole(t.shape)) for t in tensors)
    return tuple(Link(t.name, box, t.name, box, tuple(range(len(t.shape)))) for t, box in boxes)
