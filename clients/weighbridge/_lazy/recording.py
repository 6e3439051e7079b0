"""Recording of a loader's run: the boxes of a version that it needs, and the part of a parameter that each fills."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeGuard

import torch

from weighbridge._core import dtypes
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import Layout, Shard, TensorSpec
from weighbridge._core.slices import Boxes
from weighbridge._lazy.views import Strided, is_whole
from weighbridge.errors import FailedPrecondition, InvalidArgument, LayoutError

_FORMAT = 2


class RecordedCopy(NamedTuple):
    """A copy of elements of a version to a part of a parameter.

    Attributes:
        target: name of the parameter or buffer.
        part: part of the target, counted from its own first element.
        tensor: name of the version's tensor.
        box: box of that tensor, fetched dense.
        view: view of the box that is copied.
        casts: dtypes that the elements are cast to first, one after the other.
    """

    target: str
    part: Strided
    tensor: str
    box: Box
    view: Strided
    casts: tuple[torch.dtype, ...]


class Constant(NamedTuple):
    """A part of a parameter that a loader sets to a number, as it does with padding."""

    target: str
    part: Strided
    value: float | int | bool


RecordedStep = RecordedCopy | Constant


class Shape(NamedTuple):
    """Shape, strides and dtype of a parameter."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> Shape:
        """The shape of a tensor."""
        return Shape(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    def __str__(self) -> str:
        return f"{dtypes.from_torch(self.dtype)}{list(self.size)}"


@dataclass(frozen=True)
class Recording:
    """Copies that one rank makes from any version of a model.

    Attributes:
        specs: the version's tensors that are copied from, by name.
        targets: the parameters and buffers that are copied to, by name.
        steps: the steps in the order in which the loader did them.
        unrecorded: tensors of the version whose copies could not be recorded, with the reason: the loader has to run
            for them each time, on tensors of `Source`.
        unwritten: number of elements that no step writes, by the parameter's name.
    """

    specs: Mapping[str, TensorSpec]
    targets: Mapping[str, Shape]
    steps: Sequence[RecordedStep] = field(repr=False)
    unrecorded: Mapping[str, str]
    unwritten: Mapping[str, int]
    spare: list[torch.Tensor] = field(default_factory=list, repr=False, compare=False)

    @cached_property
    def boxes(self) -> Mapping[tuple[str, Box], int]:
        """The boxes to be fetched, each once, with their indexes."""
        found: dict[tuple[str, Box], int] = {}
        for step in self.steps:
            if isinstance(step, RecordedCopy):
                found.setdefault((step.tensor, step.box), len(found))
        return found

    @cached_property
    def by_target(self) -> Mapping[str, tuple[RecordedStep, ...]]:
        """The steps that write to each parameter, in order."""
        found: dict[str, list[RecordedStep]] = {}
        for step in self.steps:
            found.setdefault(step.target, []).append(step)
        return {name: tuple(steps) for name, steps in found.items()}

    @cached_property
    def whole(self) -> Mapping[str, Shape]:
        """The parameters that a version fills completely."""
        return {name: shape for name, shape in self.targets.items() if not self.unwritten.get(name)}

    @cached_property
    def plain(self) -> Mapping[str, tuple[RecordedCopy, ...]]:
        """The parameters that boxes fill without cast or rearrangement, each box its own run of elements, and their
        steps.

        The order of these steps does not matter.
        """
        return {
            name: copies
            for name, all_steps in self.by_target.items()
            if (steps := [step for step in all_steps if step.part.numel])
            and len(copies := tuple(step for step in steps if self.is_straight(step))) == len(steps)
            and _are_apart([copy.part for copy in copies])
        }

    def is_straight(self, step: RecordedStep) -> TypeGuard[RecordedCopy]:
        """Whether a step copies a whole box, neither cast nor rearranged."""
        return (
            isinstance(step, RecordedCopy)
            and not step.casts
            and is_whole(step.view, step.box.extent)
            and step.part.numel == step.view.numel
            and self.targets[step.target].dtype == self.specs[step.tensor].dtype.torch
        )

    @property
    def request(self) -> Boxes:
        """The request to the service."""
        return Boxes([(name, box.offset, box.extent) for name, box in self.boxes])

    @cached_property
    def layout(self) -> Layout:
        """The layout of the slices for `request`."""
        return Layout.stream(self.specs.values(), [Shard(name, box) for name, box in self.boxes])

    @property
    def nbytes(self) -> int:
        """Bytes that an update transfers."""
        return sum(box.volume * self.specs[name].dtype.itemsize for name, box in self.boxes)

    def check(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Refuse parameters and buffers other than the recorded ones.

        Raises:
            FailedPrecondition: one is gone; the message names it.
            LayoutError: one has another shape, other strides or another dtype; the message names it.
        """
        for name in self.targets:
            if name not in targets:
                raise FailedPrecondition(f"{name} was recorded, and is no longer a parameter", fix="record again")
            self.check_target(name, targets[name])

    def check_target(self, name: str, tensor: torch.Tensor) -> None:
        """Refuse a tensor with another shape, other strides or another dtype than the recorded one.

        Raises:
            LayoutError: it has; the message shows both.
        """
        known = self.targets.get(name)
        if known is None:
            raise LayoutError(f"no recorded step writes to {name}")
        if Shape.of(tensor) != known:
            raise LayoutError(
                f"{name} was {known} with strides {list(known.stride)} when it was recorded, and is "
                f"{Shape.of(tensor)} with strides {list(tensor.stride())} now",
                fix="record again: the engine's configuration has changed",
            )

    @cached_property
    def digest(self) -> str:
        """Identity of the recording: SHA-256 of `to_json`, as 64 hex digits."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """The recording as text for `from_json`."""
        return json.dumps(
            {
                "format": _FORMAT,
                "specs": [[s.name, s.dtype.name, s.shape] for s in self.specs.values()],
                "targets": [[n, t.size, t.stride, dtypes.from_torch(t.dtype).name] for n, t in self.targets.items()],
                "steps": [_step_to_json(step) for step in self.steps],
                "unrecorded": dict(self.unrecorded),
                "unwritten": dict(self.unwritten),
            },
            separators=(",", ":"),
        )

    @staticmethod
    def from_json(text: str) -> Recording:
        """Read a text of `to_json`.

        Raises:
            InvalidArgument: it is malformed, or of another format.
        """
        try:
            found = json.loads(text)
            if found["format"] != _FORMAT:
                raise InvalidArgument(f"this is a recording of format {found['format']}, not {_FORMAT}")
            specs = [TensorSpec(n, dtypes.parse(d), tuple(shape)) for n, d, shape in found["specs"]]
            return Recording(
                {spec.name: spec for spec in specs},
                {
                    n: Shape(tuple(size), tuple(stride), dtypes.parse(d).torch)
                    for n, size, stride, d in found["targets"]
                },
                tuple(map(_step_from_json, found["steps"])),
                found["unrecorded"],
                found["unwritten"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidArgument(f"this is not a recording: {error}") from error


def _are_apart(parts: Iterable[Strided]) -> bool:
    """Whether each part is one run of elements, and no two have elements in common."""
    end = 0
    for part in sorted(parts, key=lambda each: each.offset):
        if part.offset < end or not is_whole(part._replace(offset=0), part.size):
            return False
        end = part.offset + part.numel
    return True


def _step_to_json(step: RecordedStep) -> list[Any]:
    if isinstance(step, Constant):
        return [step.target, *step.part, step.value]
    casts = [dtypes.from_torch(dtype).name for dtype in step.casts]
    return [step.target, *step.part, step.tensor, *step.box, *step.view, casts]


def _step_from_json(found: Sequence[Any]) -> RecordedStep:
    target, part, rest = found[0], _strided(found[1:4]), found[4:]
    if len(rest) == 1:
        return Constant(target, part, rest[0])
    tensor, offset, extent, *view, casts = rest
    box = Box(tuple(offset), tuple(extent))
    return RecordedCopy(target, part, tensor, box, _strided(view), tuple(dtypes.parse(name).torch for name in casts))


def _strided(found: Iterable[Any]) -> Strided:
    size, stride, offset = found
    return Strided(tuple(size), tuple(stride), offset)
