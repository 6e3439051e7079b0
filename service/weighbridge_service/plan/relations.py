"""Relation of two tensor spaces as data: links from boxes of one space to boxes of the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from weighbridge._core.boxes import Box, Link
from weighbridge._core.layouts import Layout, TensorSpec


@dataclass(frozen=True)
class WeightMap:
    """Relation of a trainer's tensors in Megatron-core's space to the model's tensors in Hugging Face's.

    Attributes:
        megatron: tensors of the trainer.
        hugging_face: tensors of the model.
        links: links from Megatron-core to Hugging Face.
        copies: links to further Hugging Face tensors with the same elements. They are written on a push and not read on
            a restore.
        padding: parts of the trainer's tensors without a counterpart (padded vocabulary), as name and box. They are
            dropped on the way to Hugging Face, and are zero on the way back.
        seen: shapes of the model's tensors whose last axis is split into two in links, because elements of different
            origin alternate along it. With the split, two boxes suffice instead of one for each row.
        shifts: constants that are added to each element of some of the trainer's tensors, by name, on the way to
            Hugging Face, including copies, and subtracted on the way back.
    """

    megatron: Mapping[str, TensorSpec]
    hugging_face: Mapping[str, TensorSpec]
    links: tuple[Link, ...]
    padding: tuple[tuple[str, Box], ...]
    copies: tuple[Link, ...] = ()
    seen: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    shifts: Mapping[str, float] = field(default_factory=dict)

    def as_seen(self, files: Layout) -> Layout:
        """A layout of the model's whole tensors with the axes of the links (`seen`).

        The places of the bytes are unchanged.
        """
        if not self.seen:
            return files
        tensors = {name: replace(spec, shape=self.seen.get(name, spec.shape)) for name, spec in files.tensors.items()}
        placements = [
            p._replace(shard=p.shard._replace(box=Box.whole(self.seen[p.shard.tensor])))
            if p.shard.tensor in self.seen
            else p
            for p in files.placements
        ]
        return Layout(tensors, tuple(placements))

    @property
    def unevenly_placed(self) -> frozenset[str]:
        """Names of the trainer's tensors with parts that have no place in the model, or several."""
        return frozenset((*(name for name, _ in self.padding), *(link.source for link in self.copies)))

    @cached_property
    def inverse_links(self) -> tuple[Link, ...]:
        """Links from Hugging Face to Megatron-core."""
        return tuple(link.inverse() for link in self.links)

    @cached_property
    def shifts_there(self) -> Mapping[str, float]:
        """The shifts, by the names of the model's tensors."""
        links = (link for link in (*self.links, *self.copies) if link.source in self.shifts)
        return {link.target: self.shifts[link.source] for link in links}

    @cached_property
    def inverse_shifts(self) -> Mapping[str, float]:
        """Constants that are added to each element of the trainer's tensors on the way back."""
        return {name: -shift for name, shift in self.shifts.items()}


def identity_links(tensors: Iterable[TensorSpec]) -> tuple[Link, ...]:
    """Links of a tensor space to itself."""
    boxes = ((t, Box.whole(t.shape)) for t in tensors)
    return tuple(Link(t.name, box, t.name, box, tuple(range(len(t.shape)))) for t, box in boxes)
