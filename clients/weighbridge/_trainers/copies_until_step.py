"""Copying until the optimizer's step: a thread copies a push's shards while training continues, and the step that would
change them waits.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from weighbridge._clients.copying.copies import (
    Copies,
    Copying,
    Key,
    key_of,
    on_streams,
    points_of,
)
from weighbridge._core.layouts import Layout
from weighbridge._formats.push_sources import HeldShards, StagingPool, TensorSource
from weighbridge._trainers.states.steady import Steady, steady_until_step
from weighbridge.errors import InvalidArgument

if TYPE_CHECKING:
    import torch

OPTIMIZER_STEP = "optimizer_step"
"""Value of ``until=`` for the next step of the optimizer that is part of the push."""


class CopyingBehind(Copying):
    """Copies of one push, which a separate thread makes on its own streams.

    Args:
        tensors: tensors to copy. The copies begin after the work that is already enqueued on the current streams.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._points = points_of(tensors)

    def is_behind(self, shards: Iterable[int]) -> bool:
        """See `Copying.is_behind`."""
        return True

    @contextmanager
    def made(self) -> Iterator[None]:
        """See `Copying.made`."""
        with super().made(), on_streams(self._points):
            yield


class StepGate:
    """Gate that makes the steps of optimizers wait for unfinished copies. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waited_for: list[threading.Event] = []
        self._hooked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def until(self, wanted: Any, optimizer: Any) -> CopiesUntilStep:
        """Return copies that may be made until a step.

        Args:
            wanted: ``until`` of `TrainerClient.push`.
            optimizer: the optimizer that is part of the push; None if the push does not have one.

        Raises:
            InvalidArgument: ``wanted`` is neither `OPTIMIZER_STEP` nor an optimizer, or the push does not have an
                optimizer.
        """
        named = optimizer if isinstance(wanted, str) else wanted
        if isinstance(wanted, str) and (wanted != OPTIMIZER_STEP or optimizer is None):
            raise InvalidArgument(
                f"until={wanted!r} does not name an optimizer",
                fix=(
                    f"push the optimizer too, with optimizer=... and until={OPTIMIZER_STEP!r}; or "
                    "pass it as until=optimizer"
                ),
            )
        return CopiesUntilStep(self, steady_until_step(named))

    def hold(self, optimizers: Sequence[torch.optim.Optimizer], copying: Copying) -> None:
        """Make the next step of each of these optimizers wait for the copies."""
        with self._lock:
            self._waited_for = [each for each in self._waited_for if not each.is_set()] + [copying.ended]
            new = [each for each in optimizers if each not in self._hooked]
            self._hooked.update(new)
        for optimizer in new:
            optimizer.register_step_pre_hook(self._wait)

    def _wait(self, *_: object) -> None:
        with self._lock:
            waited_for = self._waited_for
        for each in waited_for:
            each.wait()
        # only now: the next step repeats an interrupted wait, and other optimizers that step in the meantime wait too
        with self._lock:
            self._waited_for = [each for each in self._waited_for if not each.is_set()]


class CopiesUntilStep(Copies):
    """Copies of the pushes of one call, which are deferred until a step. Tensors that other code may change before that
    are copied now, once.

    Args:
        gate: gate that makes steps wait.
        steady: memory that does not change until the step.
    """

    def __init__(self, gate: StepGate, steady: Steady) -> None:
        self._gate = gate
        self._steady = steady
        self._settled: dict[Key, torch.Tensor] = {}

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """See `Copies.keep`."""
        self._settled.update((key_of(each), each) for each in tensors)

    def shards(
        self, layout: Layout, tensors: Sequence[torch.Tensor], staging: StagingPool
    ) -> tuple[HeldShards, Copying]:
        """See `Copies.shards`."""
        settled = [self._settle(each) for each in tensors]
        copying = CopyingBehind(settled)
        self._gate.hold(self._steady.optimizers, copying)
        return TensorSource(staging, layout, settled), copying

    def _settle(self, tensor: torch.Tensor) -> torch.Tensor:
        key = key_of(tensor)
        found = self._settled.get(key)
        if found is None:
            found = self._settled[key] = self._steady.settled(tensor)
        return found
