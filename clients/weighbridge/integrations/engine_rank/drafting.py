"""Model that decodes speculatively: the one that answers, and a second one that drafts for it, updated as one.

Both take the same version. What they share, as embeddings and output layers, belongs to the model that answers: its loader alone fills it, as the
engine discards what the drafter's own loader has put there when it shares it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from weighbridge._lazy.recording import RecordedCopy, Recording
from weighbridge.errors import FailedPrecondition

PREFIX = "drafter."
"""Beginning of the names of tensors that the drafter has for itself."""
WITHOUT = "start the engine without speculative decoding"


@dataclass(frozen=True)
class Drafting:
    """Drafter of an engine.

    Attributes:
        name: of the drafter, as errors call it; empty if the engine has none that has weights.
        model: the drafter, if the policy's versions have its weights, so that they fill it; None if they have not.
    """

    name: str = ""
    model: Any = None


class WithDrafter(torch.nn.Module):
    """A model and its drafter; the model's own tensors keep their names, and what both have is named as the model's.

    Args:
        target: the model that answers.
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
        """Run the target's loader: of the drafter's, all is recorded."""
        target: Any = self.target
        return target.load_weights(tensors)


def joined(of_target: Recording, of_drafter: Recording, version: object) -> Recording:
    """What both loaders take of a version.

    Args:
        of_target, of_drafter: what each was recorded to do, over the targets of both.
        version: what to call it.

    Raises:
        FailedPrecondition: the drafter's loader computes something of a tensor that goes to the drafter.
    """
    if of_drafter.unrecorded:
        name, why = next(iter(of_drafter.unrecorded.items()))
        raise FailedPrecondition(
            f"the way of {name} of {version} into the engine's drafter cannot be followed: {why}", fix=WITHOUT
        )
    own = [step for step in of_drafter.steps if step.target.startswith(PREFIX)]
    written = {step.target for step in own}
    taken = {step.tensor for step in own if isinstance(step, RecordedCopy)}
    unwritten = {
        name: of_drafter.unwritten.get(name, 0)
        if name.startswith(PREFIX)
        else of_target.unwritten.get(name, 0)
        for name in {**of_target.unwritten, **of_drafter.unwritten}
    }
    return Recording(
        {**of_target.specs, **{name: spec for name, spec in of_drafter.specs.items() if name in taken}},
        {
            **of_target.targets,
            **{name: shape for name, shape in of_drafter.targets.items() if name in written},
        },
        (*of_target.steps, *own),
        of_target.unrecorded,
        {name: count for name, count in unwritten.items() if count},
    )
