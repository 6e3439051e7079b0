"""Copying behind the caller: a push's shards are copied out while training goes on, until the optimizer's step would change them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from weighbridge._formats.training.steady import Steady, steady_until_step
from weighbridge.errors import InvalidArgument

if TYPE_CHECKING:
    import torch

OPTIMIZER_STEP = "optimizer_step"
"""What ``until=`` of a push may be: the next step of the optimizer that is pushed along."""


class Copying:
    """One push's copies, which are made by a thread of their own, on streams of their own.

    Args:
        tensors: what is copied, as it is when the current streams have done what they have been given by now.

    Attributes:
        ended: set when the tensors may change: they are copied, or will not be.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        import torch

        self.ended = threading.Event()
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        self._points = {device: torch.cuda.current_stream(device).record_event() for device in devices}

    @contextmanager
    def behind(self) -> Iterator[None]:
        """The block copies; it is run by the thread, and has made all its copies when it ends."""
        import torch

        with ExitStack() as stack:
            stack.callback(self.ended.set)
            for device, point in self._points.items():
                stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                stream.wait_event(point)
                stack.enter_context(torch.cuda.stream(stream))
            yield


class StepGate:
    """What lets the steps of optimizers wait for copies that are still being made. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waited_for: list[threading.Event] = []
        self._hooked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def until(self, wanted: Any, optimizer: Any) -> Deferral | None:
        """Up to when the shards of a push are copied; None if that is at once.

        Args:
            wanted: ``until`` of `TrainerClient.push`.
            optimizer: the one that is pushed along; None if none is.

        Raises:
            InvalidArgument: it is neither `OPTIMIZER_STEP` nor an optimizer, or no optimizer is named at all.
        """
        if wanted is None:
            return None
        named = optimizer if isinstance(wanted, str) else wanted
        if isinstance(wanted, str) and (wanted != OPTIMIZER_STEP or optimizer is None):
            raise InvalidArgument(
                f"until={wanted!r} names no optimizer",
                fix=f"push the optimizer along, optimizer=... and until={OPTIMIZER_STEP!r}; or name it, until=optimizer",
            )
        return Deferral(self, steady_until_step(named))

    def hold(self, optimizers: Sequence[torch.optim.Optimizer], copying: Copying) -> None:
        """Let the next step of each of these optimizers wait for the copies."""
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
        # only now: a wait that is interrupted is made again by the next step, and others that step meanwhile wait, too
        with self._lock:
            self._waited_for = [each for each in self._waited_for if not each.is_set()]


class Deferral:
    """Copies of the shards of one push, put off until a step.

    Args:
        gate: lets steps wait.
        steady: what stays as it is until then.
    """

    def __init__(self, gate: StepGate, steady: Steady) -> None:
        self._gate = gate
        self._steady = steady

    def copying(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], Copying]:
        """The same tensors, of which those are copied now that something else than the step may change; and how the others will be."""
        settled = self._steady.settled(tensors)
        copying = Copying(settled)
        self._gate.hold(self._steady.optimizers, copying)
        return settled, copying
