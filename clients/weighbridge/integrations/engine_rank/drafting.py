"""Speculative decoding: the target model and its drafter are updated together.

Both load the same version, or the drafter has its own versions. Shared tensors, such as embeddings and output layers,
belong to the target model. Only its loader fills them, because the engine discards the values from the drafter's loader
when it shares the tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from weighbridge._lazy.pairs import Pair, prefixed
from weighbridge._lazy.recording import RecordedCopy, Recording
from weighbridge._lazy.source import Source
from weighbridge.errors import FailedPrecondition, LayoutError
from weighbridge.integrations.engine_rank.storageless import twin_of

PREFIX = "drafter."
"""Prefix of the names of the drafter's own tensors."""
WITHOUT = "start the engine without speculative decoding"
ALLOWING = "allow a stale drafter, as `weighbridge follow --stale-drafter allow` does"


class DrafterLeft(FailedPrecondition):
    """A version does not fill the drafter, or fills it in a way that cannot be recorded."""


@contextmanager
def filling_drafter(source: Source) -> Iterator[None]:
    """Block in which errors about a version that does not fit concern the drafter; they are raised as `DrafterLeft`.

    Args:
        source: the version, with the drafter's own version if there is one.
    """
    push = "push a version that fits it" if isinstance(source, Pair) else "push the drafter's tensors too"
    try:
        yield
    except (FailedPrecondition, LayoutError) as error:
        fix = f"{push}; or {WITHOUT}; or {ALLOWING}"
        raise DrafterLeft(error.message, details=error.details, fix=fix) from error


@dataclass(frozen=True)
class Drafting:
    """Drafter of an engine.

    Attributes:
        name: the drafter's name in errors; empty if the engine has no drafter with weights.
        model: the drafter; None if it cannot be updated.
        apart: whether it is a separate model that the policy's versions do not fill.
    """

    name: str = ""
    model: Any = None
    apart: bool = True


class WithDrafter(torch.nn.Module):
    """A model and its drafter. The model's own tensors keep their names; shared tensors have the model's names.

    Args:
        target: the target model.
        drafter: the model that drafts for it.
    """

    def __init__(self, target: torch.nn.Module, drafter: torch.nn.Module) -> None:
        super().__init__()
        self.target = target
        self.drafter = drafter

    def named_modules(
        self, memo: set[torch.nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        """All modules of both, the target's first and without a prefix."""
        memo = set() if memo is None else memo
        yield from self.target.named_modules(memo, prefix, remove_duplicate)
        yield from self.drafter.named_modules(memo, prefix + PREFIX.rstrip("."), remove_duplicate)

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Any:
        """Run the target's loader; the drafter's tensors are all recorded."""
        target: Any = self.target
        return target.load_weights(tensors)


def of_drafter(source: Source) -> Source:
    """The version that a drafter is filled from: its own, or the policy's."""
    return source.drafter if isinstance(source, Pair) else source


@contextmanager
def unshared(
    target: torch.nn.Module, drafter: torch.nn.Module, twin: Callable[[torch.Tensor], torch.Tensor] = twin_of
) -> Iterator[dict[str, torch.Tensor]]:
    """Temporarily replace the tensors that a drafter shares with its model by tensors without storage, for its loader
    to fill.

    Each place gets its own tensor, as in a newly created drafter, so that its loader finds all names.

    Args:
        target, drafter: the models.
        twin: creates such a tensor.

    Yields:
        These tensors, under unique names.
    """
    layers: set[Any] = set(target.modules())
    tensors = {id(t) for t in (*target.parameters(), *target.buffers())}
    twins: dict[str, torch.Tensor] = {}

    def made(tensor: torch.Tensor) -> Any:
        found = twins[f"shared.{len(twins)}"] = twin(tensor)
        return found

    own = [layer for layer in drafter.modules() if layer not in layers]
    shared: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (place, {n: each for n, each in place.items() if id(each) in tensors or _is_one(each, layers)})
        for layer in own
        for place in (layer._modules, layer._parameters, layer._buffers)
    ]
    try:
        for place, found in shared:
            place.update({n: made(t) if isinstance(t, torch.Tensor) else _copy(t, made) for n, t in found.items()})
        yield twins
    finally:
        for place, found in shared:  # a loader may have put others in place of what is not shared
            place.update(found)


def _is_one(each: Any, layers: set[Any]) -> bool:
    return isinstance(each, torch.nn.Module) and each in layers


def _copy(layer: torch.nn.Module, made: Callable[[torch.Tensor], Any]) -> torch.nn.Module:
    found = copy.copy(layer)
    attributes = vars(found)
    attributes["_modules"] = {n: None if c is None else _copy(c, made) for n, c in layer._modules.items()}
    for kind in ("_parameters", "_buffers"):
        attributes[kind] = {n: None if t is None else made(t) for n, t in getattr(layer, kind).items()}
    return found


def joined(of_target: Recording, of_drafter: Recording, version: object, prefix: str = "") -> Recording:
    """Combined recording of both loaders.

    Args:
        of_target, of_drafter: recording of each loader, over the targets of both; the drafter's was made inside
            `unshared`.
        version: name of the drafter's version in errors.
        prefix: prefix of the drafter's tensors if it has its own version; empty if both load the same version.

    Raises:
        FailedPrecondition: the drafter's loader computes with a tensor that goes to the drafter.
    """
    if of_drafter.unrecorded:
        name, why = next(iter(of_drafter.unrecorded.items()))
        raise FailedPrecondition(
            f"the copies of {name} of {version} into the engine's drafter cannot be recorded: {why}"
        )
    own = [
        step._replace(tensor=prefix + step.tensor) if isinstance(step, RecordedCopy) else step
        for step in of_drafter.steps
        if step.target.startswith(PREFIX)
    ]
    written = {step.target for step in own}
    taken = {step.tensor for step in own if isinstance(step, RecordedCopy)}
    specs = (prefixed(spec, prefix) for spec in of_drafter.specs.values())
    unwritten = {
        name: of_drafter.unwritten.get(name, 0) if name.startswith(PREFIX) else of_target.unwritten.get(name, 0)
        for name in {**of_target.unwritten, **of_drafter.unwritten}
    }
    return Recording(
        {**of_target.specs, **{spec.name: spec for spec in specs if spec.name in taken}},
        {
            **of_target.targets,
            **{name: shape for name, shape in of_drafter.targets.items() if name in written},
        },
        (*of_target.steps, *own),
        of_target.unrecorded,
        {name: count for name, count in unwritten.items() if count},
    )
