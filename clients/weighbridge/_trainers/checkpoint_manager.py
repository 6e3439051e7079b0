"""Checkpoints of a custom training loop: weights for engines, and training states from which training resumes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any, Unpack

from weighbridge._clients.push_handle import PushHandle
from weighbridge._clients.push_options import PushOptions, check_options_of_each
from weighbridge._core.references import training_of
from weighbridge._core.resources import REF_LATEST, Version
from weighbridge._formats.torch_state import rank_and_world
from weighbridge._trainers.states.megatron_chunks import sharded_chunks, unwrapped
from weighbridge._trainers.trainer import TrainerClient
from weighbridge.errors import NotFound, WeighbridgeError

__all__ = ["CheckpointManager"]

log = logging.getLogger(__name__)


class CheckpointManager:
    """Saves a torch or Megatron-core module, its optimizer and other values of a training loop, and restores them.
    Every rank has a manager and calls the same methods. Each save creates a version of the weights, which engines can
    pull, and a version of the training state with the same step.

    Args:
        client: client that makes pushes and restores; the manager does not close it.
        model: ``namespace/name`` of a registered model.
        module: the torch module, after ``fully_shard`` or any other call that replaces its parameters; or a
            Megatron-core module, which has ``sharded_state_dict()``, with or without ``DistributedDataParallel``; or a
            list of the rank's model chunks; or a function that returns a sharded state dict.
        optimizer: the optimizer of the module's parameters: one or several torch optimizers, or the result of
            ``get_megatron_optimizer``.
        state: values by name, the same on all ranks; see `TrainerClient.push_state_dict`.
        rank_state: values by name for this rank only; see `TrainerClient.push_state_dict`.
        until: see `TrainerClient.push_state_dict`: with ``"optimizer_step"`` a thread copies during the next forward
            and backward.
        options: options of each push, as for `TrainerClient.push`.

    Attributes:
        last: this rank's newest save, or None.

    Examples:
        >>> checkpoints = CheckpointManager(trainer, "acme/smol", model, optimizer, state={"epoch": 3})
        >>> handle = checkpoints.save(200)
        >>> print(checkpoints.wait())
        acme/smol:training@2 (durable, step 200)
        >>> restored = checkpoints.restore()
        >>> restored.step
        200
    """

    def __init__(
        self,
        client: TrainerClient,
        model: str,
        module: Any,
        optimizer: Any = None,
        *,
        state: MutableMapping[str, Any] | None = None,
        rank_state: MutableMapping[str, Any] | None = None,
        until: Any = None,
        **options: Unpack[PushOptions],
    ) -> None:
        check_options_of_each(options)
        self.last: PushHandle | None = None
        self._client = client
        self._model = model
        self._module = module
        self._sharded = _sharded_state_of(module)
        self._until = until
        self._optimizer = optimizer
        self._state: MutableMapping[str, Any] = {} if state is None else state
        self._rank_state = rank_state
        self._options = options

    def __repr__(self) -> str:
        last = f"last saved as {self.last.model}@{self.last.number}" if self.last else "nothing saved yet"
        return f"<CheckpointManager of {self._model}, {last}>"

    def save(self, step: int) -> PushHandle:
        """Save everything in its state after a step. Training may continue when this returns: everything has been
        copied, or with ``until`` it will be copied before the optimizer's next step. A thread delivers the copies.

        Either all ranks save, or none. If one rank cannot save, for example because it cannot reach the service, all
        ranks raise an error. With ``on_failure="warn"`` all ranks log the reason and continue instead, and the handle
        is marked (`PushHandle.skipped`). If the previous save failed, this method logs the failure; `wait` raises it.

        Raises:
            WeighbridgeError: see `TrainerClient.push_state_dict`, or `TrainerClient.push` with Megatron-core.
        """
        self._tell()
        push: Callable[..., PushHandle] = self._client.push_state_dict
        if self._sharded is not None:
            push = self._client.push
        self.last = push(
            self._model,
            self._held(),
            step=step,
            optimizer=self._optimizer,
            state=self._state,
            rank_state=self._rank_state,
            until=self._until,
            **self._options,
        )
        return self.last

    def latest(self) -> Version | None:
        """Return the newest training state in the object store; None if the store does not contain one yet.

        Raises:
            NotFound: the model is not registered.
        """
        try:
            return self._client.version(training_of(self._model), REF_LATEST)
        except NotFound:
            self._client.model(self._model)
            return None

    def find(self, step: int) -> Version | None:
        """Return the newest training state of a step in the object store; None if the store does not contain one. With
        several ranks of torch.distributed, all of them get the result of rank 0.

        Raises:
            NotFound: the model is not registered.
        """
        return self._agreed(partial(self._of_step, step))

    def restore(self, version: int | str | None = None, *, rank_state: bool = True) -> Version | None:
        """Restore everything. With several ranks of torch.distributed, all restore the version that rank 0 finds.

        Args:
            version: number or ref of a training state; by default the latest.
            rank_state: False leaves ``rank_state`` unchanged, which is required if a different number of ranks saved
                it.

        Returns:
            The version, whose ``step`` is the step of the save; None if ``version`` is not given and no training state
            exists yet.

        Raises:
            WeighbridgeError: see `TrainerClient.restore_state_dict`, or `TrainerClient.restore` with Megatron-core.
        """
        found = self._agreed(partial(self._found, version))
        if found is None:
            return None
        restore: Callable[..., Version] = self._client.restore_state_dict
        if self._sharded is not None:
            restore = self._client.restore
        return restore(
            self._model,
            self._held(),
            version=found.number,
            optimizer=self._optimizer,
            state=self._state,
            rank_state=self._rank_state if rank_state else None,
        )

    def wait(self, *, timeout: float | None = None) -> Version | None:
        """Wait until the weights and the training state of this rank's newest save are in the object store.

        Returns:
            The training state's version; None if nothing was saved, for example if the loop was restored at its last
            step.

        Raises:
            VersionFailed: one of the two versions cannot be completed (lists the missing parts).
            WeighbridgeError: the newest save was skipped (names the reason).
            DeadlineExceeded: one of the two versions was not in the object store within ``timeout`` seconds.
        """
        if self.last is not None and self.last.skipped is not None:
            self.last.report()
        if self.last is None or self.last.training is None:
            return None
        started = time.monotonic()
        self.last.wait(timeout=timeout)
        left = None if timeout is None else max(timeout - (time.monotonic() - started), 0.0)
        return self.last.training.wait(timeout=left)

    def _held(self) -> Any:
        return self._module if self._sharded is None else self._sharded()

    def _tell(self) -> None:
        """Log a failure of the previous save."""
        before = [] if self.last is None else [self.last, self.last.training]
        for handle in before:
            if handle is None or not handle.done or handle.skipped is not None:  # skips are logged at once
                continue
            try:
                handle.report()
            except WeighbridgeError as error:
                log.error("%s@%d was not saved: %s", handle.model, handle.number, error)

    def _agreed(self, find: Callable[[], Version | None]) -> Version | None:
        """The version that rank 0 finds.

        The other ranks do not search themselves, because a newer version may appear in between.
        """
        rank, ranks = rank_and_world(None, None)
        found: list[tuple[Version | None, WeighbridgeError | None]] = [(None, None)]
        cause: Exception | None = None
        if rank == 0:
            try:
                found = [(find(), None)]
            except WeighbridgeError as error:
                found = [(None, error)]
            except (
                Exception
            ) as error:  # the other ranks wait for the broadcast, and may not be able to unpickle this error
                problem = f"rank 0 cannot find a training state of {self._model}: {error!r}"
                found, cause = [(None, WeighbridgeError(problem))], error
        if ranks > 1:
            import torch.distributed as dist

            dist.broadcast_object_list(found, src=0)
        there, refused = found[0]
        if refused is not None:
            raise refused from cause
        return there

    def _of_step(self, step: int) -> Version | None:
        self._client.model(self._model)
        try:
            there = self._client.versions(training_of(self._model))
        except NotFound:  # nothing has been pushed to it
            return None
        return next((each for each in there if each.step == step and each.state.stored), None)

    def _found(self, version: int | str | None) -> Version | None:
        return self.latest() if version is None else self._client.version(training_of(self._model), version)


def _sharded_state_of(module: Any) -> Callable[[], Any] | None:
    """Function that returns the current sharded state dict of a Megatron-core module; None for a torch module."""
    chunks = list(module) if isinstance(module, list | tuple) else [module]
    if chunks and all(hasattr(unwrapped(chunk), "sharded_state_dict") for chunk in chunks):
        return partial(sharded_chunks, chunks)
    # a torch module can be called as well
    return module if callable(module) and not hasattr(module, "state_dict") else None
