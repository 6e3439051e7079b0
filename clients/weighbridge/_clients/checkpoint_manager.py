"""Checkpoints of a training loop of one's own: weights for engines, and training states to go on from."""

from __future__ import annotations

import logging
import time
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any, Unpack

from weighbridge._clients.push_handle import PushHandle
from weighbridge._clients.push_options import PushOptions, check_options
from weighbridge._clients.trainer import TrainerClient
from weighbridge._core.references import training_of
from weighbridge._core.resources import REF_LATEST, Version
from weighbridge._formats.torch_state import rank_and_world
from weighbridge.errors import FailedPrecondition, NotFound, WeighbridgeError

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


class CheckpointManager:
    """Saves a torch module, its optimizer and whatever else a loop needs, and restores them. Every rank has one, and calls the same methods.

    Each save is a version of the weights, which engines can pull, and one of the training state with the same step.

    Args:
        client: makes pushes and restores; stays open.
        model: ``namespace/name``, registered before.
        module: the module; after ``fully_shard`` or whatever else replaces its parameters.
        optimizer: of the module's parameters; one, or several.
        state: values by name, the same on all ranks; as for `TrainerClient.push_state_dict`.
        rank_state: likewise, of this rank alone.
        options: of each push, as for `TrainerClient.push`.

    Attributes:
        last: this rank's newest save, or None.
    """

    def __init__(
        self,
        client: TrainerClient,
        model: str,
        module: torch.nn.Module,
        optimizer: Any = None,
        *,
        state: MutableMapping[str, Any] | None = None,
        rank_state: MutableMapping[str, Any] | None = None,
        **options: Unpack[PushOptions],
    ) -> None:
        check_options(options)
        self.last: PushHandle | None = None
        self._client = client
        self._model = model
        self._module = module
        self._optimizer = optimizer
        self._state: MutableMapping[str, Any] = {} if state is None else state
        self._rank_state = rank_state
        self._options = options

    def save(self, step: int) -> PushHandle:
        """Save everything as it is after a step. Returns once it is copied out: training may go on, and the bytes travel behind it.

        A save before it that has failed meanwhile is told in the log; `wait` raises it.

        Raises:
            WeighbridgeError: as `TrainerClient.push_state_dict`.
        """
        self._tell()
        self.last = self._client.push_state_dict(
            self._model,
            self._module,
            step=step,
            optimizer=self._optimizer,
            state=self._state,
            rank_state=self._rank_state,
            **self._options,
        )
        return self.last

    def latest(self) -> Version | None:
        """The newest training state that is in the store; None if there is none yet.

        Raises:
            NotFound: the model is not registered.
        """
        try:
            return self._client.version(training_of(self._model), REF_LATEST)
        except NotFound:
            self._client.model(self._model)
            return None

    def restore(self, version: int | str | None = None, *, rank_state: bool = True) -> Version | None:
        """Bring everything back. With several ranks of torch.distributed, all restore what rank 0 finds.

        Args:
            version: of the training states, a number or a ref; by default the latest.
            rank_state: False leaves that as it is, as it must be on another number of ranks than saved it.

        Returns:
            The version, whose ``step`` is that of the save; None if ``version`` is not given and there is none: training begins anew.

        Raises:
            WeighbridgeError: as `TrainerClient.restore_state_dict`.
        """
        found = self._agreed(version)
        if found is None:
            return None
        return self._client.restore_state_dict(
            self._model,
            self._module,
            version=found.number,
            optimizer=self._optimizer,
            state=self._state,
            rank_state=self._rank_state if rank_state else None,
        )

    def wait(self, *, timeout: float | None = None) -> Version:
        """Wait until this rank's newest save is in the store, weights and training state; gives the latter's version.

        Raises:
            FailedPrecondition: nothing was saved.
            VersionFailed: one of them cannot be completed; lists what is missing.
            DeadlineExceeded: one of them is not there within ``timeout`` seconds.
        """
        if self.last is None or self.last.training is None:
            raise FailedPrecondition(f"nothing of {self._model} was saved", fix="call save(step) first")
        started = time.monotonic()
        self.last.wait(timeout=timeout)
        left = None if timeout is None else max(timeout - (time.monotonic() - started), 0.0)
        return self.last.training.wait(timeout=left)

    def _tell(self) -> None:
        """Say in the log what has become of the save before."""
        before = [] if self.last is None else [self.last, self.last.training]
        for handle in before:
            if handle is None or not handle.done:
                continue
            try:
                handle.report()
            except WeighbridgeError as error:
                log.error("%s@%d was not saved: %s", handle.model, handle.number, error)

    def _agreed(self, version: int | str | None) -> Version | None:
        """The version that rank 0 finds: what is newest may be another one a moment later."""
        rank, ranks = rank_and_world(None, None)
        found: list[tuple[Version | None, WeighbridgeError | None]] = [(None, None)]
        if rank == 0:
            try:
                found = [(self._found(version), None)]
            except WeighbridgeError as error:
                found = [(None, error)]
        if ranks > 1:
            import torch.distributed as dist

            dist.broadcast_object_list(found, src=0)
        there, refused = found[0]
        if refused is not None:
            raise refused
        return there

    def _found(self, version: int | str | None) -> Version | None:
        return self.latest() if version is None else self._client.version(training_of(self._model), version)
