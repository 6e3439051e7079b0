"""Save hook of a Megatron trainer, which pushes what is saved with one line of the trainer's own.

`push_on_save` wraps ``megatron.core.dist_checkpointing.save``, through which both Megatron-LM's training loop (with
``--ckpt-format torch_dist``, its default) and users of plain ``dist_checkpointing`` save. Of the state dict that is saved,
the model's weights are pushed first, and then the save takes its course. Taking hold there, rather than in a save
strategy, is what works for both: only that function sees the whole state dict, the iteration included, and newer training
loops make their strategies themselves.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import PurePath
from types import TracebackType
from typing import Any, Self

from weighbridge.errors import FailedPrecondition, InvalidArgument, NotFound, WeighbridgeError
from weighbridge.integrations.megatron import sharded_tensors
from weighbridge.push_handle import PushHandle
from weighbridge.resources import Version, VersionState
from weighbridge.trainer import TrainerClient

logger = logging.getLogger(__name__)

_DURABLE_SECONDS = 60.0
"""How long a version's way into the store is watched, so that the log can tell of its end."""


def push_on_save(
    model: str,
    server: str | None = None,
    *,
    hf_dir: str | None = None,
    run: str = "default",
    step: Callable[[], int] | None = None,
    weights: Callable[[Mapping[str, Any]], Any] | None = None,
    strict: bool = False,
    lane: str | None = None,
    retry_seconds: float = 60.0,
) -> PushOnSave:
    """Push the model's weights whenever a distributed checkpoint is saved. All ranks call it, before the first save.

    Modules that import ``save`` by name have to be imported after this call.

    Args:
        model: ``namespace/name``.
        server: ``host:port`` of the service; by default ``WEIGHBRIDGE_SERVER``, or 127.0.0.1:50051.
        hf_dir: a folder with ``config.json`` and the tokenizer, by which rank 0 registers the model at the first save; None if
            it is registered already.
        run: name of the training run; part of the version's lineage.
        step: is asked for the training step at each save. By default the state dict's ``iteration``, or else the number with
            which the checkpoint's folder ends.
        weights: takes the weights out of the state dict. By default what it has under ``model``, ``model0``, ``model1`` and so
            on, as Megatron-LM names them, or else all of it.
        strict: a push that fails, or a version that cannot be completed, raises before anything is saved, and each save waits
            until its version is ready. Otherwise it is logged, and the save goes on.
        lane, retry_seconds: as for `TrainerClient`.

    Returns:
        The hook; close it, or use it as a context manager, to undo it.
    """
    client = TrainerClient(server, run=run, retry_seconds=retry_seconds, lane=lane)
    return PushOnSave(client, model, hf_dir, step, weights or model_weights, strict=strict)


def model_weights(state_dict: Mapping[str, Any]) -> Any:
    """The part of a state dict that holds the model: what Megatron-LM calls ``model`` or ``model<number>``, or all of it."""
    found = {key: value for key, value in state_dict.items() if re.fullmatch(r"model\d*", str(key))}
    return found or state_dict


class PushOnSave:
    """A hook that is in place, and what it has pushed.

    Attributes:
        model: the model.
        last: this rank's newest push, or None.
    """

    def __init__(
        self,
        client: TrainerClient,
        model: str,
        hf_dir: str | None,
        step: Callable[[], int] | None,
        weights: Callable[[Mapping[str, Any]], Any],
        *,
        strict: bool,
    ) -> None:
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing import serialization

        self.model = model
        self.last: PushHandle | None = None
        self._client = client
        self._hf_dir = hf_dir
        self._step = step
        self._weights = weights
        self._strict = strict
        self._pushed_step: int | None = None
        self._in_place = True
        self._places = (dist_checkpointing, serialization)
        self._original = dist_checkpointing.save
        self._wrapper = self._wrapped()
        for module in self._places:
            module.save = self._wrapper

    def close(self) -> None:
        """Undo the hook, and wait until what was pushed has arrived or failed."""
        self._in_place = False  # whoever has wrapped or kept our wrapper meanwhile goes on calling it
        for module in self._places:
            if module.save is self._wrapper:
                module.save = self._original
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def wait(
        self, until: VersionState | str = VersionState.DURABLE, *, timeout: float | None = None
    ) -> Version:
        """Wait for the newest version that this rank has pushed to; as `PushHandle.wait`.

        Raises:
            FailedPrecondition: it has pushed nothing.
        """
        if self.last is None:
            raise FailedPrecondition(f"nothing of {self.model} has been pushed", fix="the log says why")
        return self.last.wait(until, timeout=timeout)

    def _wrapped(self) -> Callable[..., Any]:
        original = self._original

        @functools.wraps(original)
        def save(sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
            if self._in_place:
                self._push_or_log(sharded_state_dict, str(checkpoint_dir))
            return original(sharded_state_dict, checkpoint_dir, *args, **kwargs)

        return save

    def _push_or_log(self, state_dict: Mapping[str, Any], folder: str) -> None:
        try:
            self._push(state_dict, folder)
        except Exception as error:
            if self._strict:
                raise
            logger.error(
                "%s: what is saved in %s was not pushed; the save goes on. %s", self.model, folder, error
            )

    def _push(self, state_dict: Mapping[str, Any], folder: str) -> None:
        rank, world_size = _rank_and_size()
        step, weights = self._prepare(state_dict, folder, rank, world_size)
        if (
            step == self._pushed_step
        ):  # Megatron-LM may save one iteration twice, to be kept and not to be kept
            return
        handle = self._client.push(self.model, weights, step=step, rank=rank, world_size=world_size)
        self.last, self._pushed_step = handle, step
        if self._strict:
            handle.wait(VersionState.READY)
        # not a daemon: a trainer that ends after its last save must still say that it was not pushed
        threading.Thread(target=follow, args=(handle, step, rank), name=f"follow-{handle.number}").start()

    def _prepare(
        self, state_dict: Mapping[str, Any], folder: str, rank: int, world_size: int
    ) -> tuple[int, Any]:
        """What to push, once every rank can: if one could not, the others would wait for it, and training with them."""
        problem, step, weights = "", 0, None
        try:
            step = step_of(state_dict, folder) if self._step is None else self._step()
            weights = self._weights(state_dict)
            sharded_tensors(weights)
            self._reach(rank)
        except Exception as error:
            problem = f"rank {rank}: {error}"
        problems = _of_all_ranks(problem, world_size)
        if any(problems):
            raise FailedPrecondition(
                "not all ranks can push", details=[line for line in problems if line][:5]
            )
        return step, weights

    def _reach(self, rank: int) -> None:
        if rank:
            with contextlib.suppress(NotFound):  # rank 0 may be registering it
                self._client.model(self.model)
        elif self._hf_dir is None:
            self._client.model(self.model)
        else:
            self._client.register_model(self.model, self._hf_dir)
            self._hf_dir = None


def step_of(state_dict: Mapping[str, Any], folder: str) -> int:
    """The step of what is saved in a folder: the state dict's ``iteration``, or the number with which the name ends."""
    iteration = state_dict.get("iteration")
    if isinstance(iteration, int):
        return iteration
    number = re.search(r"\d+$", PurePath(folder).name)
    if number is None:
        raise InvalidArgument(
            f"neither the state dict ('iteration') nor the name of {folder} says which step this is",
            fix="give push_on_save a function that does: step=lambda: trainer.step",
        )
    return int(number[0])


def _rank_and_size() -> tuple[int, int]:
    import torch.distributed as dist

    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _of_all_ranks(value: str, world_size: int) -> list[str]:
    import torch.distributed as dist

    values = [value] * world_size
    if world_size > 1:
        dist.all_gather_object(values, value)
    return values


def follow(handle: PushHandle, step: int, rank: int) -> None:
    """Say in the log what became of a push: each rank of its own part, rank 0 of the version."""
    what = f"{handle.model}@{handle.number} (step {step})"
    try:
        handle.report()
        if rank == 0:
            handle.wait(VersionState.DURABLE, timeout=_DURABLE_SECONDS)
            logger.info("%s is in the store", what)
    except WeighbridgeError as error:
        logger.error("rank %s: the push of %s has failed: %s", rank, what, error)
