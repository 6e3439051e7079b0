"""Save hook that pushes whatever a Megatron trainer saves. The trainer needs one additional line.

`push_on_save` wraps ``megatron.core.dist_checkpointing.save``, through which both Megatron-LM's training loop (with
``--ckpt-format torch_dist``, its default) and users of plain ``dist_checkpointing`` save. The hook first pushes the
model's weights, then the rest of the state dict as a training state. Then Megatron saves, unless its save is disabled.
The hook wraps this function instead of a save strategy because only this function receives the whole state dict, with
the iteration, and newer training loops create their strategies themselves.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, Self, Unpack

from weighbridge._clients.push_handle import PushHandle
from weighbridge._clients.push_options import PushOptions, check_options
from weighbridge._formats.megatron_state import sharded_tensors
from weighbridge._formats.torch_state import rank_and_world
from weighbridge._trainers.trainer import TrainerClient
from weighbridge._transport.credentials import Credentials
from weighbridge.errors import FailedPrecondition, InvalidArgument
from weighbridge.integrations.checkpoint_names import step_named
from weighbridge.integrations.guarded_pushes import GuardedPushes, PushHook, of_all_ranks
from weighbridge.integrations.megatron_saved_state import OptimizerNotes, SavedState

logger = logging.getLogger(__name__)


def push_on_save(
    model: str,
    server: str | None = None,
    *,
    hf_dir: str | None = None,
    run: str = "default",
    step: Callable[[], int] | None = None,
    weights: Callable[[Mapping[str, Any]], Any] | None = None,
    training: bool = True,
    megatron_saves: bool = True,
    strict: bool = False,
    lane: str | None = None,
    retry_seconds: float = 60.0,
    credentials: Credentials | None = None,
    **options: Unpack[PushOptions],
) -> PushOnSave:
    """Push the state dict of every distributed checkpoint. All ranks call this before the first save.

    Each save becomes a version of the model. If an optimizer is saved with it, the save also becomes a version of the
    training state. That version contains the optimizer itself, without the parts that Megatron gathers, and every other
    entry of the state dict under its name, such as ``opt_param_scheduler``, ``rng_state`` and ``args``.
    `TrainerClient.restore` restores it. Megatron-LM's ``--load`` also reads the files that
    `TrainerClient.export_training` writes.

    Modules that import ``save`` by name have to be imported after this call.

    Args:
        model: ``namespace/name``.
        server: ``host:port`` of the service; by default ``WEIGHBRIDGE_SERVER``, or 127.0.0.1:50051.
        hf_dir: a folder with ``config.json`` and the tokenizer, by which rank 0 registers the model at the first save;
            None if it is registered already.
        run: name of the training run; part of the version's lineage.
        step: returns the training step at each save. By default the state dict's ``iteration``, or else the number at
            the end of the folder's name.
        weights: extracts the weights from the state dict. By default these are the entries ``model``, ``model0``,
            ``model1`` and so on, as Megatron-LM names them, or else the whole dict.
        training: False pushes only weights.
        megatron_saves: False: Megatron does not write a checkpoint if all ranks pushed it with its training state.
            Megatron still writes checkpoints that could not be pushed, and those without optimizer state.
        strict: if a push fails, a training state cannot be pushed, or a version cannot be completed, an error is raised
            before anything is saved; each save waits until its version is ready. Otherwise the failure is logged and
            the save continues.
        lane, retry_seconds, credentials: as for `TrainerClient`.
        options: of each push, as for `TrainerClient.push`: ``metadata``, ``candidate``, ``allow_nonfinite``,
            ``max_hold_s``. Held versions are logged. ``on_failure`` is ``warn`` by default here; ``raise`` is the same
            as ``strict``, except that a save does not wait until its version is ready.

    Returns:
        The hook; close it, or use it as a context manager, to undo it.

    Raises:
        InvalidArgument: the optimizer's state would not be saved: neither ``training`` nor ``megatron_saves`` is set.
    """
    check_options(options)
    if not (training or megatron_saves):
        raise InvalidArgument(
            "with training=False and megatron_saves=False the optimizer's state is not saved",
            fix="leave one of them out",
        )
    client = TrainerClient(server, run=run, retry_seconds=retry_seconds, lane=lane, credentials=credentials)
    return PushOnSave(
        client,
        model,
        hf_dir,
        step,
        weights or model_weights,
        training=training,
        megatron_saves=megatron_saves,
        strict=strict,
        options=options,
    )


def model_weights(state_dict: Mapping[str, Any]) -> Any:
    """The part of a state dict that contains the model: Megatron-LM's ``model`` or ``model<number>``, or the whole
    dict.
    """
    found = {key: value for key, value in state_dict.items() if re.fullmatch(r"model\d*", str(key))}
    return found or state_dict


class PushOnSave(PushHook):
    """An installed hook, with its pushes."""

    def __init__(
        self,
        client: TrainerClient,
        model: str,
        hf_dir: str | None,
        step: Callable[[], int] | None,
        weights: Callable[[Mapping[str, Any]], Any],
        *,
        training: bool,
        megatron_saves: bool,
        strict: bool,
        options: PushOptions | None = None,
    ) -> None:
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing import serialization

        self.model = model
        self._client = client
        self._step = step
        self._weights = weights
        register = None if hf_dir is None else functools.partial(client.register_model, model, hf_dir)
        self._pushes = GuardedPushes(client, model, register, strict=strict, logger=logger, options=options)
        self._strict = strict or (options or {}).get("on_failure") == "raise"
        self._megatron_saves = megatron_saves
        self._notes = OptimizerNotes() if training else None
        self._in_place = True
        self._places = (dist_checkpointing, serialization)
        self._original = dist_checkpointing.save
        self._wrapper = self._wrapped()
        for module in self._places:
            module.save = self._wrapper

    def close(self) -> None:
        """Remove the hook, and wait until every push has arrived or failed."""
        self._in_place = False  # code that has wrapped or kept our wrapper meanwhile goes on calling it
        for module in self._places:
            if module.save is self._wrapper:
                module.save = self._original
        if self._notes is not None:
            self._notes.close()
        super().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wrapped(self) -> Callable[..., Any]:
        original = self._original

        @functools.wraps(original)
        def save(sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
            if self._in_place and self._push(sharded_state_dict, str(checkpoint_dir)):
                return _nothing_to_write(original, sharded_state_dict, checkpoint_dir, *args, **kwargs)
            return original(sharded_state_dict, checkpoint_dir, *args, **kwargs)

        return save

    def _push(self, state_dict: Mapping[str, Any], folder: str) -> bool:
        """Push the state dict. Returns whether Megatron should skip its write; the value is the same on all ranks."""
        optimizer = (None, None) if self._notes is None else self._notes.taken(state_dict)

        def prepare() -> tuple[int, Any]:
            step = step_of(state_dict, folder) if self._step is None else self._step()
            weights = self._weights(state_dict)
            sharded_tensors(weights)
            return step, weights

        def push(weights: Any, step: int, rank: int, world_size: int) -> PushHandle:
            beside = self._beside(state_dict, weights, optimizer, rank, world_size)
            return self._client.push(
                self.model,
                weights if beside is None else beside.sharded,
                step=step,
                rank=rank,
                world_size=world_size,
                optimizer=None if beside is None else beside.optimizer,
                state=None if beside is None else beside.state,
                **self._pushes.options,
            )

        pushed = self._pushes.push(f"what is saved in {folder}", "the save", prepare, push)
        if self._megatron_saves:
            return False
        kept = pushed and self.last is not None and self.last.training is not None
        # the save is collective: all ranks make it, or none
        of_ranks = of_all_ranks(kept, rank_and_world(None, None)[1])
        if kept and all(of_ranks):
            return True
        logger.warning("%s: Megatron writes %s itself, because it was not pushed completely", self.model, folder)
        return False

    def _beside(
        self,
        state_dict: Mapping[str, Any],
        weights: Any,
        optimizer: tuple[str | None, Any],
        rank: int,
        world_size: int,
    ) -> SavedState | None:
        """State that is pushed together with the weights; None if there is none.

        All ranks call it; either all of them push a state, or none does.
        """
        problem, found = "", None
        if self._notes is not None:
            try:
                found = SavedState.of(state_dict, weights, optimizer)
                found.check(rank)
            except Exception as error:
                problem = f"rank {rank}: {error}"
        of_ranks = of_all_ranks((problem, optimizer[1] is not None), world_size)
        if not any(has_optimizer for _, has_optimizer in of_ranks):
            if problem and found is None:  # what is saved could not even be sorted: it may be an optimizer's
                logger.warning(
                    (
                        "%s: only the weights are pushed, because the saved state dict has no "
                        "optimizer's sharded state dict at its top level. %s"
                    ),
                    self.model,
                    problem,
                )
            return None
        problems = [each for each, _ in of_ranks if each]
        if not problems:
            return found
        refused = FailedPrecondition("not all ranks can push a training state", details=problems[:5])
        if self._strict:
            raise refused
        logger.error("%s: only the weights are pushed. %s", self.model, refused)
        return None


def _nothing_to_write(save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Result of a save that writes nothing: for an asynchronous save, a request without work."""
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

    called = inspect.signature(save).bind(*args, **kwargs).arguments
    return AsyncRequest(None, (), []) if called.get("async_sharded_save") else None


def step_of(state_dict: Mapping[str, Any], folder: str) -> int:
    """The training step of a checkpoint: the state dict's ``iteration``, or the number at the end of the folder's
    name.
    """
    iteration = state_dict.get("iteration")
    if isinstance(iteration, int):
        return iteration
    step = step_named(folder)
    if step is None:
        raise InvalidArgument(
            f"neither the state dict ('iteration') nor the name of {folder} contains the step",
            fix="give push_on_save a function that returns it: step=lambda: trainer.step",
        )
    return step
