"""Callback of transformers' ``Trainer`` that pushes the model while it is trained."""

from __future__ import annotations

import contextlib
import copy
import logging
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from transformers import TrainerCallback

from weighbridge._clients.push_handle import PushHandle
from weighbridge._clients.push_options import PushOptions, check_options
from weighbridge._formats.peft_models import has_adapters
from weighbridge._formats.side_files.carried import carried_files
from weighbridge._formats.side_files.reading import SideFiles
from weighbridge._formats.torch_state import rank_and_world, torch_shards
from weighbridge._trainers.model_folders import replace_files
from weighbridge._trainers.trainer import TrainerClient
from weighbridge._transport.credentials import Credentials
from weighbridge.errors import FailedPrecondition, InvalidArgument, LayoutError, NotFound
from weighbridge.integrations.guarded_pushes import GuardedPushes, PushHook

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from weighbridge._core.layouts import TensorSpec

logger = logging.getLogger(__name__)


class PushCallback(PushHook, TrainerCallback):  # type: ignore[misc]  # transformers is seen as untyped
    """Pushes the model of a ``Trainer`` as versions; a version's step is the trainer's global step: ``Trainer(...,
    callbacks=[PushCallback("acme/smol")])``.

    If the service does not know the model, rank 0 registers it with the trainer's config and tokenizer; otherwise these
    replace the registered ones before the first push of a training. A push returns once the weights are copied. If a
    push fails, the failure is logged and training continues.

    Args:
        model: ``namespace/name``.
        server: ``host:port`` of the service; by default ``WEIGHBRIDGE_SERVER``, or 127.0.0.1:50051.
        every: number of steps between pushes; by default, push whenever the trainer saves.
        dtype: dtype to register the model with, such as ``bf16``; by default the config's.
        run: name of the training run, part of the version's lineage.
        strict: raise if a push fails or a version cannot be completed; each push waits until its version is ready.
        lane, retry_seconds, credentials: as for `TrainerClient`.
        options: of each push, as for `TrainerClient.push`: ``metadata``, ``candidate``, ``allow_nonfinite``,
            ``max_hold_s``. ``on_failure`` is ``warn`` by default here; ``raise`` is the same as ``strict``, except that
            a push does not wait until its version is ready.

    Raises:
        InvalidArgument: ``every`` is less than 1.
    """

    def __init__(
        self,
        model: str,
        server: str | None = None,
        *,
        every: int | None = None,
        dtype: str = "",
        run: str = "default",
        strict: bool = False,
        lane: str | None = None,
        retry_seconds: float = 60.0,
        credentials: Credentials | None = None,
        **options: Unpack[PushOptions],
    ) -> None:
        if every is not None and every < 1:
            raise InvalidArgument(f"every={every} is not a number of steps", fix="use 1 or more")
        self.model = model
        self._every = every
        check_options(options)
        self._dtype = dtype
        self._client = TrainerClient(server, run=run, retry_seconds=retry_seconds, lane=lane, credentials=credentials)
        self._pushes = GuardedPushes(self._client, model, None, strict=strict, logger=logger, options=options)
        self._carried = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Forget which step was pushed last: each training counts its own steps."""
        self._pushes.begin_anew()
        self._carried = False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Push if ``every`` steps have passed."""
        if self._every is not None and state.global_step % self._every == 0:
            self._push(state, **kwargs)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Push if ``every`` is not set."""
        if self._every is None:
            self._push(state, **kwargs)

    def _push(self, state: TrainerState, *, model: Any, processing_class: Any = None, **_: Any) -> None:
        def prepare() -> tuple[int, Any]:
            rank, world_size = rank_and_world(None, None)
            _check_no_collective(model)
            if rank == 0:
                self._register(model, processing_class)
            with contextlib.suppress(NotFound):  # rank 0 may be registering it
                tensors = self._client.describe_tensors(self.model, refresh=True)
                torch_shards(model, tensors, whole=world_size == 1, merge=False)
                if rank == 0 and not self._carried:
                    self._carry(model, processing_class, tensors)
            return int(state.global_step), model

        def push(module: Any, step: int, rank: int, world_size: int) -> PushHandle:
            return self._client.push_state_dict(
                self.model, module, step=step, rank=rank, world_size=world_size, **self._pushes.options
            )

        self._pushes.push(f"step {state.global_step}", "training", prepare, push)

    def _register(self, model: Any, processing_class: Any) -> None:
        with contextlib.suppress(NotFound):
            self._client.model(self.model)
            return
        if getattr(model, "config", None) is None:
            raise FailedPrecondition(
                f"{self.model} is not registered, and this model has no config to register it with",
                fix="register it: TrainerClient(server).register_model(name, folder)",
            )
        with _saved(model, processing_class) as folder:
            try:
                self._client.register_model(self.model, folder, dtype=self._dtype)
            except InvalidArgument:  # perhaps because the weight map is missing
                self._client.register_model(self.model, folder, dtype=self._dtype, tensors=model)
        self._carried = True

    def _carry(self, model: Any, processing_class: Any, tensors: Mapping[str, TensorSpec]) -> None:
        """Add the trainer's files other than weights to versions. All ranks wait for this before they push."""
        config = getattr(model, "config", None)
        # pushed weights are not quantised, even if those in the trainer's memory are
        if config is not None and not getattr(config, "quantization_config", None):
            known = self._client.model_files(self.model)
            with _saved(model, processing_class) as folder:
                files = carried_files(known, SideFiles.read(folder).files)
            source = "the trainer's config"
            replace_files(self._client, self.model, source, known, files, tensors, cast=True)
        self._carried = True


@contextlib.contextmanager
def _saved(model: Any, processing_class: Any) -> Iterator[Path]:
    """A folder as `save_pretrained` writes it, without weights: config, generation config, code of a class from a
    repository, and the tokenizer if there is one.
    """
    config = copy.copy(model.config)
    # FSDP2 and torch.compile create their own classes; peft's wrap the model
    inner = model.get_base_model() if has_adapters(model) and hasattr(model, "get_base_model") else model
    made_by = [each.__name__ for each in type(inner).__mro__ if each.__module__.startswith("transformers.")]
    config.architectures = config.architectures or made_by[:1]
    with tempfile.TemporaryDirectory(prefix="weighbridge-") as folder:
        _save_code(inner, config, folder)
        config.save_pretrained(folder)
        generation = getattr(inner, "generation_config", None)
        # a generation config that transformers derived from the config adds nothing, and would replace the registered
        # one
        if generation is not None and not generation._from_model_config:
            generation.to_json_file(Path(folder) / "generation_config.json")
        if hasattr(processing_class, "save_pretrained"):
            processing_class.save_pretrained(folder)
        yield Path(folder)


def _save_code(model: Any, config: Any, folder: str) -> None:
    """Save the code of a model whose class comes from a repository, and name it in the config.

    The code of the config's class is saved with the config.
    """
    from transformers.dynamic_module_utils import custom_object_save

    for made_by in type(model).__mro__:
        if made_by.__module__.startswith("transformers_modules.") and getattr(made_by, "_auto_class", None):
            config.auto_map = dict(getattr(config, "auto_map", None) or {})
            # FSDP2 wraps it in its own class, whose code belongs to torch
            custom_object_save(object.__new__(made_by), folder, config=config)
            return


def _check_no_collective(model: Any) -> None:
    """Refuse a module whose ``state_dict()`` waits for all ranks: here some ranks may never call it.

    Raises:
        LayoutError: the module is sharded with FSDP version 1.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise LayoutError(
            "the model is sharded by version 1 of FSDP, which is not supported",
            fix="use version 2: accelerate's fsdp_version: 2, or torch's fully_shard",
        )
