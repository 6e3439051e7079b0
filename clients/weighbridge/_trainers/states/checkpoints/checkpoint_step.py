"""Training step of a folder of weights: the step in its content, otherwise the step in its name.

Trainers store it in different places: torch-based trainers in an entry or a scalar tensor of the checkpoint
(torchtitan: ``train_state.step``), Megatron-LM in the common state, transformers' Trainer in ``trainer_state.json``.
Folders are named ``iter_0000100``, ``global_step_100/actor``, ``checkpoint-100``, ``step-100``.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from weighbridge._core.layouts import Placement
from weighbridge._formats.safetensors_files import map_file
from weighbridge._trainers.states import blobs
from weighbridge._trainers.states.checkpoints.checkpoint_values import STEP_ENTRY
from weighbridge._trainers.torch_dist.folder import TorchDistCheckpoint, read_objects
from weighbridge._trainers.torch_dist.noted_values import common_values
from weighbridge.errors import DataLoss, InvalidArgument, WeighbridgeError

_STEP = r"(?:global_?step|train_?step|steps?|iter|iteration|checkpoint|ckpt)[-_=]?(\d{1,15})"
_OWN = re.compile(rf"(?:.*[^a-z0-9])?{_STEP}", re.IGNORECASE)
_ABOVE = re.compile(_STEP, re.IGNORECASE)
"""Pattern for the whole name of the parent folder, because that folder may belong to something else."""
_ENTRY = re.compile(r"(?:(?:train_state|trainer_state|trainer|state|meta|extra)[./])?(?:global_steps?|step|iteration)")
"""Names of entries that contain the trainer's step. The step entries of optimizers and schedulers are other counts."""
_TRAINER_STATE = "trainer_state.json"
_MOST_BYTES = 64 << 20
"""Maximum size of a file that is read for the step. The same file contains the history of losses."""
_MOST_STEP = 1 << 53


def step_of_folder(folder: Path, checkpoint: TorchDistCheckpoint | None = None) -> int | None:
    """Return the step of a folder; None if neither its content nor its name contains one.

    Args:
        folder: folder of a model in Hugging Face's format, or a checkpoint.
        checkpoint: content of the folder, if it is a checkpoint of Megatron-core or torch.

    Raises:
        DataLoss: the step that an export has recorded is invalid.
    """
    said = _in_trainer_state(folder) if checkpoint is None else _in_checkpoint(folder, checkpoint)
    return step_named(folder) if said is None else said


def step_named(folder: Path) -> int | None:
    """Return the step in the name of a folder or of its parent folder, which may contain a folder for each role or part
    of a model.
    """
    path = folder.resolve()
    found = _OWN.fullmatch(path.name) or _ABOVE.fullmatch(path.parent.name)
    return None if found is None else int(found[1])


def known_step(step: int | None, folder: str | Path) -> int:
    """Return the step of a checkpoint.

    Raises InvalidArgument if it is None, because training resumes from the step of a checkpoint.
    """
    if step is None:
        raise InvalidArgument(
            f"neither the checkpoint nor the name of its folder, {folder}, contains its step",
            fix="give the step: --step N (step=N); 0 is for weights before training",
        )
    return step


def _in_trainer_state(folder: Path) -> int | None:
    path = folder / _TRAINER_STATE
    with contextlib.suppress(OSError, ValueError, RecursionError):
        if path.is_file() and path.stat().st_size <= _MOST_BYTES:
            state = json.loads(path.read_bytes())
            return _as_step(state.get("global_step")) if isinstance(state, dict) else None
    return None


def _in_checkpoint(folder: Path, checkpoint: TorchDistCheckpoint) -> int | None:
    if STEP_ENTRY in checkpoint.others:
        [content] = read_objects(folder, {STEP_ENTRY: checkpoint.others[STEP_ENTRY]}, _MOST_BYTES).values()
        step = _as_step(blobs.load(content, STEP_ENTRY))
        if step is None:
            raise DataLoss(f"{STEP_ENTRY} is not a step")
        return step
    return next((step for step in _candidates(folder, checkpoint) if step is not None), None)


def _candidates(folder: Path, checkpoint: TorchDistCheckpoint) -> Iterator[int | None]:
    """Yield the steps in entries, scalar tensors and the common state, shortest name first.

    Values that cannot be read are ignored.
    """
    for name in _by_length(checkpoint.others):
        with contextlib.suppress(WeighbridgeError):
            [content] = read_objects(folder, {name: checkpoint.others[name]}, _MOST_BYTES).values()
            yield _as_step(blobs.load(content, name))
    for name in _by_length(checkpoint.layout.tensors):
        spec = checkpoint.layout.tensors[name]
        places = [checkpoint.layout.placements[i] for i in checkpoint.layout.by_tensor.get(name, ())]
        if len(places) == 1 and spec.nbytes == spec.dtype.itemsize and spec.dtype.name in ("I64", "I32"):
            with contextlib.suppress(WeighbridgeError):
                yield _as_step(int.from_bytes(_content(folder, places[0]), "little", signed=True))
    with contextlib.suppress(WeighbridgeError):
        yield _as_step(common_values(folder, checkpoint).get("iteration"))


def _by_length(names: Iterable[str]) -> list[str]:
    return sorted((name for name in names if _ENTRY.fullmatch(name)), key=lambda name: (len(name), name))


def _content(folder: Path, place: Placement) -> bytes:
    return map_file(folder, place.buffer)[place.offset : place.offset + place.nbytes].tobytes()


def _as_step(value: Any) -> int | None:
    """Return a value as a step, even if it is or contains a tensor; None if it is not a step."""
    if isinstance(value, Mapping):
        value = next((value[key] for key in ("step", "global_step", "iteration") if key in value), None)
    item = getattr(value, "item", None)
    if item is not None and getattr(value, "numel", int)() == 1:
        value = item()
    return value if type(value) is int and 0 <= value < _MOST_STEP else None
