"""Differences of weights as values: of elements, of a tensor, of a layer, of a whole version."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from weighbridge._core.json_values import JsonValue
from weighbridge._core.layouts import TensorSpec
from weighbridge._core.nonfinite import encoding_of

_NUMBER = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class Difference(JsonValue):
    """How elements of one side differ from those of the other.

    Attributes:
        elements: that were compared, or are known to be equal.
        changed: of them, those whose bits differ.
        nonfinite: of these, those that are NaN or infinite on either side; they have no step.
        step: the largest step of the others, ``max |a - b|``.
    """

    elements: int
    changed: int = 0
    nonfinite: int = 0
    step: float = 0

    @property
    def fraction(self) -> float:
        """Of the elements, how many have changed: 0 to 1."""
        return self.changed / self.elements if self.elements else 0.0

    def plus(self, other: Difference) -> Difference:
        """Of the elements of both."""
        return Difference(
            self.elements + other.elements,
            self.changed + other.changed,
            self.nonfinite + other.nonfinite,
            max(self.step, other.step),
        )

    def to_json(self) -> dict[str, Any]:
        """Its fields, and the fraction."""
        return {**JsonValue.to_json(self), "fraction": self.fraction}


@dataclass(frozen=True, slots=True)
class TensorDifference(JsonValue):
    """How a tensor that both sides have differs.

    Attributes:
        spec: what it is on both.
        found: of its elements.
    """

    spec: TensorSpec
    found: Difference

    @property
    def in_sums(self) -> Difference:
        """As it counts in sums. The steps of integers do not: they are codes or counters, not weights."""
        found = self.found
        if encoding_of(self.spec.dtype) is not None:
            return found
        return Difference(found.elements, found.changed, found.nonfinite)

    def to_json(self) -> dict[str, Any]:
        """Name, dtype and shape, and what was found."""
        spec = self.spec
        return {
            "name": spec.name,
            "dtype": spec.dtype.name,
            "shape": list(spec.shape),
            **self.found.to_json(),
        }


@dataclass(frozen=True, slots=True)
class LayerDifference(JsonValue):
    """How the tensors of a layer differ that both sides have.

    Attributes:
        name: of the layer; see `layer_of`.
        tensors: how many there are.
        found: of their elements.
    """

    name: str
    tensors: int
    found: Difference

    def to_json(self) -> dict[str, Any]:
        """Name and number of tensors, and what was found."""
        return {"name": self.name, "tensors": self.tensors, **self.found.to_json()}


@dataclass(frozen=True, slots=True)
class OtherSpec(JsonValue):
    """A tensor that is another one on the other side: of another dtype or shape."""

    before: TensorSpec
    after: TensorSpec

    def to_json(self) -> dict[str, Any]:
        """Its name, and dtype and shape on both sides."""
        sides = {"before": self.before, "after": self.after}
        said = {key: {"dtype": spec.dtype.name, "shape": list(spec.shape)} for key, spec in sides.items()}
        return {"name": self.before.name, **said}


@dataclass(frozen=True, slots=True)
class Comparison(JsonValue):
    """What comparing two sides has found.

    Attributes:
        before, after: what was compared, such as ``acme/smol@16``.
        tensors: those that both have, with the same dtype and shape.
        only_before, only_after: names of those that only one has.
        others: those that have another dtype or shape; they were not compared.
        bytes_read: of each side.
        bytes_known: of each side, that were not read, as their digests are equal.
    """

    before: str
    after: str
    tensors: tuple[TensorDifference, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    others: tuple[OtherSpec, ...]
    bytes_read: int
    bytes_known: int

    @property
    def total(self) -> Difference:
        """Of all tensors."""
        return _sum(self.tensors)

    @property
    def layers(self) -> list[LayerDifference]:
        """By layer, in the order of their numbers."""
        found: dict[str, list[TensorDifference]] = {}
        for tensor in self.tensors:
            found.setdefault(layer_of(tensor.spec.name), []).append(tensor)
        return [
            LayerDifference(name, len(found[name]), _sum(found[name])) for name in sorted(found, key=_natural)
        ]

    def most_changed(self, most: int | None = None) -> list[TensorDifference]:
        """The tensors that have changed: those first of which the largest fraction has, and of these the ones with larger steps."""
        changed = [each for each in self.tensors if each.found.changed]
        changed.sort(key=lambda each: (-each.found.fraction, -each.found.step, _natural(each.spec.name)))
        return changed[:most]

    def to_json(self) -> dict[str, Any]:
        """All of it, with the sums."""
        return {
            **JsonValue.to_json(self),
            "total": self.total.to_json(),
            "layers": [layer.to_json() for layer in self.layers],
        }


def layer_of(tensor: str) -> str:
    """The layer that a tensor belongs to, by its name: up to the first number in it, as in ``model.layers.3``; without one, up to its last part."""
    parts = tensor.split(".")
    for index, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: index + 1])
    return ".".join(parts[:-1]) or tensor


@dataclass(frozen=True, slots=True)
class Matching:
    """Which tensors of two sides can be compared.

    Attributes:
        same: those that both have, with the same dtype and shape, in the order of the first side.
        only_before, only_after, others: as in `Comparison`.
    """

    same: tuple[TensorSpec, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    others: tuple[OtherSpec, ...]

    @staticmethod
    def of(before: Mapping[str, TensorSpec], after: Mapping[str, TensorSpec]) -> Matching:
        """Match the tensors of two sides by their names."""
        both = [(spec, after[name]) for name, spec in before.items() if name in after]
        return Matching(
            same=tuple(old for old, new in both if old == new),
            only_before=_without(before, after),
            only_after=_without(after, before),
            others=tuple(OtherSpec(old, new) for old, new in both if old != new),
        )


def known_equal(
    specs: Iterable[TensorSpec], before: Mapping[str, str], after: Mapping[str, str]
) -> frozenset[str]:
    """Names of the tensors that need not be read: their digests on both sides are known and equal, or they have no elements."""
    return frozenset(
        spec.name
        for spec in specs
        if not math.prod(spec.shape) or (spec.name in before and before[spec.name] == after.get(spec.name))
    )


def _without(names: Iterable[str], others: Mapping[str, TensorSpec]) -> tuple[str, ...]:
    return tuple(sorted((name for name in names if name not in others), key=_natural))


def _sum(tensors: Sequence[TensorDifference]) -> Difference:
    return reduce(Difference.plus, (each.in_sums for each in tensors), Difference(0))


def _natural(name: str) -> list[tuple[int, str]]:
    """Orders names by the numbers in them: layer 2 before layer 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in _NUMBER.split(name)]
