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
    """Difference between elements of two sides.

    Attributes:
        elements: number of elements that were compared, or are known to be equal.
        changed: number of these whose bits differ.
        nonfinite: number of changed elements that are NaN or infinite on either side; they have no step.
        step: the largest step of the other changed elements, ``max |a - b|``.
    """

    elements: int
    changed: int = 0
    nonfinite: int = 0
    step: float = 0

    @property
    def fraction(self) -> float:
        """Fraction of the elements that have changed, 0 to 1."""
        return self.changed / self.elements if self.elements else 0.0

    def plus(self, other: Difference) -> Difference:
        """Difference between the elements of both."""
        return Difference(
            self.elements + other.elements,
            self.changed + other.changed,
            self.nonfinite + other.nonfinite,
            max(self.step, other.step),
        )

    def to_json(self) -> dict[str, Any]:
        """Its fields and the fraction."""
        return {**JsonValue.to_json(self), "fraction": self.fraction}


@dataclass(frozen=True, slots=True)
class TensorDifference(JsonValue):
    """Difference between two sides of a tensor that both have.

    Attributes:
        spec: its spec, the same on both sides.
        found: the difference of its elements.
    """

    spec: TensorSpec
    found: Difference

    @property
    def in_sums(self) -> Difference:
        """The difference as it counts in sums, without steps of integers: these are codes or counters, not weights."""
        found = self.found
        if encoding_of(self.spec.dtype) is not None:
            return found
        return Difference(found.elements, found.changed, found.nonfinite)

    def to_json(self) -> dict[str, Any]:
        """Name, dtype and shape, and the difference."""
        spec = self.spec
        return {
            "name": spec.name,
            "dtype": spec.dtype.name,
            "shape": list(spec.shape),
            **self.found.to_json(),
        }


@dataclass(frozen=True, slots=True)
class LayerDifference(JsonValue):
    """Difference between two sides of the tensors of a layer that both have.

    Attributes:
        name: name of the layer; see `layer_of`.
        tensors: number of the tensors.
        found: the difference of their elements.
    """

    name: str
    tensors: int
    found: Difference

    def to_json(self) -> dict[str, Any]:
        """Name and number of tensors, and the difference."""
        return {"name": self.name, "tensors": self.tensors, **self.found.to_json()}


@dataclass(frozen=True, slots=True)
class OtherSpec(JsonValue):
    """A tensor that has another dtype or shape on the other side."""

    before: TensorSpec
    after: TensorSpec

    def to_json(self) -> dict[str, Any]:
        """Its name, with dtype and shape on both sides."""
        sides = {"before": self.before, "after": self.after}
        said = {key: {"dtype": spec.dtype.name, "shape": list(spec.shape)} for key, spec in sides.items()}
        return {"name": self.before.name, **said}


@dataclass(frozen=True, slots=True)
class Comparison(JsonValue):
    """Result of the comparison of two sides.

    Attributes:
        before, after: titles of the sides, such as ``acme/smol@16``.
        tensors: tensors that both sides have, with the same dtype and shape.
        only_before, only_after: names of tensors that only one side has.
        others: tensors whose dtype or shape differs; they were not compared.
        bytes_read: bytes of each side that were read.
        bytes_known: bytes of each side that were not read, as their digests are equal.
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
        """Difference of all tensors."""
        return _sum(self.tensors)

    @property
    def layers(self) -> list[LayerDifference]:
        """Differences by layer, in the order of the layers' numbers."""
        found: dict[str, list[TensorDifference]] = {}
        for tensor in self.tensors:
            found.setdefault(layer_of(tensor.spec.name), []).append(tensor)
        return [LayerDifference(name, len(found[name]), _sum(found[name])) for name in sorted(found, key=_natural)]

    def most_changed(self, most: int | None = None) -> list[TensorDifference]:
        """The changed tensors, by descending fraction of changed elements, then by descending step."""
        changed = [each for each in self.tensors if each.found.changed]
        changed.sort(key=lambda each: (-each.found.fraction, -each.found.step, _natural(each.spec.name)))
        return changed[:most]

    def to_json(self) -> dict[str, Any]:
        """All fields, with the sums."""
        return {
            **JsonValue.to_json(self),
            "total": self.total.to_json(),
            "layers": [layer.to_json() for layer in self.layers],
        }


def layer_of(tensor: str) -> str:
    """The layer of a tensor, by its name: up to the first number in it, as in ``model.layers.3``; without one, up to
    its last part.
    """
    parts = tensor.split(".")
    for index, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: index + 1])
    return ".".join(parts[:-1]) or tensor


@dataclass(frozen=True, slots=True)
class Matching:
    """Tensors of two sides, matched by name.

    Attributes:
        same: tensors that both sides have, with the same dtype and shape, in the order of the first side.
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


def known_equal(specs: Iterable[TensorSpec], before: Mapping[str, str], after: Mapping[str, str]) -> frozenset[str]:
    """Names of the tensors that need not be read: their digests on both sides are known and equal, or they have no
    elements.
    """
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
    """Sort key that orders names by the numbers in them: layer 2 before layer 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in _NUMBER.split(name)]
