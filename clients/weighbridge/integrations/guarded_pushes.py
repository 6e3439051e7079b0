"""Pushes from hooks of a training loop. A failed push must not stop the training.

They follow the rules of every push (`weighbridge._clients.holding`), except that a hook logs failures unless the user
has asked for an error. Before a push, a hook registers the model and collects the weights. Either may fail on a single
rank, so all ranks first exchange whether they can push.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from weighbridge._clients.holding.policy import AGAIN_SECONDS, HoldPolicy, held
from weighbridge._clients.push_handle import PushHandle
from weighbridge._clients.push_options import PushOptions, check_options_of_each
from weighbridge._core.resources import Version, VersionState
from weighbridge._formats.torch_state import rank_and_world
from weighbridge._trainers.trainer import TrainerClient
from weighbridge.errors import DeadlineExceeded, FailedPrecondition, NotFound, Unavailable, WeighbridgeError

T = TypeVar("T")

_DURABLE_SECONDS = 60.0
"""Time for which the hook watches a version until it is stored, so that the log can report the outcome."""


class GuardedPushes:
    """This rank's pushes from a hook.

    Args:
        client: client that pushes; closed together with this object.
        model: ``namespace/name``.
        register: registers the model; None if it is registered already. Rank 0 calls it once.
        strict: raise if a push fails or a version cannot be completed; each push waits until its version is ready.
        logger: logger of the hook.
        options: options of its pushes. With ``on_failure="raise"`` a failed push raises, as with ``strict``, but a push
            does not wait until its version is ready.

    Attributes:
        last: this rank's newest push, or None.
        options: options for the hook's ``push``: failures are raised to this object.
    """

    def __init__(
        self,
        client: TrainerClient,
        model: str,
        register: Callable[[], object] | None,
        *,
        strict: bool,
        logger: logging.Logger,
        options: PushOptions | None = None,
    ) -> None:
        given: PushOptions = options or {}
        check_options_of_each(given)
        self.options: PushOptions = {**given, "on_failure": "raise"}
        self._policy = HoldPolicy.of(given)
        self._raises = strict or given.get("on_failure") == "raise"
        self.last: PushHandle | None = None
        self._client = client
        self._model = model
        self._register = register
        self._strict = strict
        self._logger = logger
        self._pushed_step: int | None = None
        self._away = False

    def push(
        self,
        what: str,
        goes_on: str,
        prepare: Callable[[], tuple[int, Any]],
        push: Callable[[Any, int, int, int], PushHandle],
    ) -> bool:
        """Push once per step. All ranks call it. Returns whether `last` is now this rank's push of that step.

        Args:
            what: name of the pushed object, for the log.
            goes_on: name of the activity that continues if the push fails, for the log: ``the save``.
            prepare: returns the step and the weights; raises if this rank cannot push. On ranks other than the first,
                the model may not be registered yet.
            push: pushes these weights; also receives the step, this rank and the number of ranks.
        """
        try:
            with held(self._policy.begin()):
                self._push(prepare, push)
        except Exception as error:
            self._away = self._away or isinstance(error, Unavailable)
            if self._raises:
                raise
            self._logger.error("%s: %s was not pushed; %s goes on. %s", self._model, what, goes_on, error)
            return False
        return True

    def wait(self, until: VersionState | str = VersionState.DURABLE, *, timeout: float | None = None) -> Version:
        """See `PushHook.wait`."""
        if self.last is None:
            raise FailedPrecondition(f"no version of {self._model} has been pushed", fix="see the log for the reason")
        started = time.monotonic()
        version = self.last.wait(until, timeout=timeout)
        if self.last.training is not None:
            left = None if timeout is None else max(timeout - (time.monotonic() - started), 0.0)
            self.last.training.wait(until, timeout=left)
        return version

    def begin_anew(self) -> None:
        """Forget the last step: the following steps are not those that were pushed before."""
        self._pushed_step = None

    def close(self) -> None:
        """Wait until all pushes have arrived or failed."""
        self._client.close()

    def _push(self, prepare: Callable[[], tuple[int, Any]], push: Callable[[Any, int, int, int], PushHandle]) -> None:
        rank, world_size = rank_and_world(None, None)
        step, weights = self._prepared(prepare, rank, world_size)
        if step == self._pushed_step:  # a trainer may save a step twice: once permanently and once temporarily
            self._logger.info("%s: step %s was pushed already", self._model, step)
            return
        handle = push(weights, step, rank, world_size)
        self.last, self._pushed_step = handle, step
        if self._strict:
            self.wait(VersionState.READY)
        # not a daemon: if the trainer ends after its last save, it must still log that the save was not pushed
        for each in (handle, handle.training):
            if each is not None:
                arguments = (each, step, rank, self._logger)
                threading.Thread(target=follow, args=arguments, name=f"follow-{each.number}").start()

    def _reach(self, rank: int) -> None:
        if self._away:
            with contextlib.suppress(NotFound):
                self._client.model(self._model, retry_seconds=AGAIN_SECONDS)
            self._away = False
        if rank:
            with contextlib.suppress(NotFound):  # rank 0 may be registering it
                self._client.model(self._model)
        elif self._register is None:
            self._client.model(self._model)
        else:
            self._register()
            self._register = None

    def _prepared(self, prepare: Callable[[], tuple[int, Any]], rank: int, world_size: int) -> tuple[int, Any]:
        """Step and weights to push, once every rank can push."""
        problem, step, weights = "", 0, None
        try:
            step, weights = prepare()
            self._reach(rank)
        except Exception as error:
            self._away = self._away or isinstance(error, Unavailable)
            problem = f"rank {rank}: {error}"
        has_pushed = not problem and step == self._pushed_step
        of_ranks = of_all_ranks((problem, has_pushed), world_size)
        if any(found for found, _ in of_ranks):
            raise FailedPrecondition("not all ranks can push", details=[found for found, _ in of_ranks if found][:5])
        if len({pushed for _, pushed in of_ranks}) > 1:
            missing = [str(number) for number, (_, pushed) in enumerate(of_ranks) if not pushed]
            raise FailedPrecondition(
                f"step {step} was pushed before, and failed on ranks {', '.join(missing[:10])}",
                fix="the same processes cannot push it again; push the next step",
            )
        return step, weights


class PushHook:
    """Base of hooks: access to the results of their pushes.

    Attributes:
        model: ``namespace/name``.
    """

    model: str
    _pushes: GuardedPushes

    @property
    def last(self) -> PushHandle | None:
        """This rank's newest push, or None."""
        return self._pushes.last

    def wait(self, until: VersionState | str = VersionState.DURABLE, *, timeout: float | None = None) -> Version:
        """Wait for the newest version that this rank has pushed to, and for its training state if there is one; as
        `PushHandle.wait`.

        Returns:
            The version of the weights.

        Raises:
            FailedPrecondition: this rank has pushed nothing.
        """
        return self._pushes.wait(until, timeout=timeout)

    def close(self) -> None:
        """Wait until all pushes have arrived or failed, and close the connection."""
        self._pushes.close()


def of_all_ranks(value: T, world_size: int) -> list[T]:
    """Gather a value from each rank; all ranks call it."""
    import torch.distributed as dist

    values = [value] * world_size
    if world_size > 1:
        dist.all_gather_object(values, value)
    return values


def follow(handle: PushHandle, step: int, rank: int, logger: logging.Logger) -> None:
    """Log the outcome of a push: each rank logs its own part, rank 0 logs the version."""
    what = f"{handle.model}@{handle.number} (step {step})"
    try:
        handle.report()
        if rank == 0:
            _follow_to_store(handle, what, logger)
    except DeadlineExceeded:
        logger.warning("%s is not in the store after %g s; it is still on its way", what, _DURABLE_SECONDS)
    except WeighbridgeError as error:
        logger.error("rank %s: the push of %s has failed: %s", rank, what, error)


def _follow_to_store(handle: PushHandle, what: str, logger: logging.Logger) -> None:
    try:
        handle.wait(VersionState.DURABLE, timeout=_DURABLE_SECONDS)
    except Unavailable:
        if not handle.closed:  # the service is unreachable
            raise
        logger.info("%s has arrived; its client was closed before it was in the store", what)
    else:
        logger.info("%s is in the store", what)
