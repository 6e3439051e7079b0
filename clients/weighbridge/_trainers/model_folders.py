"""Hugging Face folders that a trainer's client imports: the files and tensors that register a model, and the weights
that are pushed.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weighbridge._clients.client import Client
from weighbridge._core import dtypes
from weighbridge._core.dtypes import DType
from weighbridge._core.layouts import TensorSpec
from weighbridge._formats import safetensors_files
from weighbridge._formats.folder_weights import FolderWeights
from weighbridge._formats.hf_folder import in_dtype_of, with_dtype
from weighbridge._formats.side_files.carried import carried_files, has_tokenizer
from weighbridge._formats.side_files.reading import CONFIG, SideFiles
from weighbridge._formats.torch_state import tensor_specs
from weighbridge.errors import FailedPrecondition, InvalidArgument, LayoutError

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


def registered_by(
    model: str, hf_dir: str | Path, dtype: str | torch.dtype, tensors: Any
) -> tuple[dict[str, bytes], Iterable[TensorSpec]]:
    """Return the files and the tensors by which a folder registers a model; see `TrainerClient.register_model`."""
    folder = Path(hf_dir)
    files = _side_files(model, folder)
    specs: Iterable[TensorSpec] = ()
    if tensors is not None:
        specs = tensor_specs(tensors)
    elif safetensors_files.has_weights(folder):
        specs = _read(model, folder, files[CONFIG]).layout.tensors.values()
    if dtype:
        files[CONFIG] = _in_dtype(files[CONFIG], dtypes.parse(dtype))
    return files, specs


def imported(
    model: str, hf_dir: str | Path, dtype: str | torch.dtype, dequantize: str
) -> tuple[dict[str, bytes], FolderWeights]:
    """Return the files by which a folder registers a model, and its weights; see `TrainerClient.import_folder`."""
    wide = dtypes.parse(dequantize) if dequantize else None
    if wide is not None and not wide.is_float:
        raise InvalidArgument(f"fp8 weights cannot become {wide}", fix="use bf16, fp16 or fp32")
    if wide is not None and dtype:
        raise InvalidArgument("weights are either dequantised or cast, not both", fix=f"leave the dtype {dtype} out")
    files = _side_files(model, Path(hf_dir))
    weights = _read(model, Path(hf_dir), files[CONFIG], wide)
    files[CONFIG] = weights.config_json
    if dtype:  # before anything is registered: a model keeps the dtypes that it was registered with
        files[CONFIG] = _in_dtype(weights.config_json, weights.castable_to(dtype))
    return files, weights


def pushed(model: str, folder: Path, registered: Mapping[str, bytes]) -> tuple[Mapping[str, bytes], FolderWeights]:
    """Return the files that versions have after a push of a folder, and the folder's weights; see
    `TrainerClient.push_folder`.

    Args:
        model: ``namespace/name``.
        folder: folder with weights, and optionally other files.
        registered: the files that are registered now.
    """
    files = registered
    if os.path.lexists(folder / CONFIG):
        sides = SideFiles.read(folder)
        sides.tell(model, folder)
        files = carried_files(registered, sides.files)
    return files, _read(model, folder, files[CONFIG])


def _read(model: str, folder: Path, config_json: bytes, dequantize: DType | None = None) -> FolderWeights:
    """Read the weights in a folder. Logs the files that are not pushed."""
    weights = FolderWeights.read(folder, config_json, dequantize=dequantize)
    for remark in weights.remarks:
        log.warning("%s: %s", model, remark)
    return weights


def _in_dtype(config_json: bytes, dtype: DType) -> bytes:
    """Return a config with a dtype entered.

    A config that cannot be read is returned unchanged: the service reports what is wrong with it.
    """
    try:
        return with_dtype(config_json, dtype)
    except (ValueError, AttributeError, TypeError, RecursionError):
        return config_json


def _side_files(model: str, folder: Path) -> dict[str, bytes]:
    """Return the files of a folder other than its weights. Logs files that are omitted or missing."""
    sides = SideFiles.read(folder)
    sides.tell(model, folder)
    if not has_tokenizer(sides.files) and _is_first_rank():
        log.warning("%s: %s has no tokenizer: engines that need one will not find it here", model, folder)
    return sides.files


def _is_first_rank() -> bool:
    """Whether this process logs what all ranks of its job would log."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        return bool(torch.distributed.get_rank() == 0)
    return os.environ.get("RANK", "0") == "0"


def replace_files(
    client: Client,
    model: str,
    source: str,
    registered: Mapping[str, bytes],
    files: Mapping[str, bytes],
    tensors: Mapping[str, TensorSpec],
    *,
    cast: bool,
) -> None:
    """Replace the registered files by these, for the next versions, if they differ.

    Args:
        client: client that registers the files.
        model: ``namespace/name``.
        source: name of the config in errors.
        registered: the files that are registered now.
        files: the new files.
        tensors: the model's tensors, which do not change.
        cast: whether weights are cast to the model's dtypes during the push. The folder's config then names another
            dtype than the version has.

    Raises:
        LayoutError: the config describes a model with other tensors, or with the same tensors in a different
            arrangement, for example because of its heads.
    """
    if cast:
        files = {**files, CONFIG: in_dtype_of(tensors.values(), files[CONFIG])}
    if files == registered:
        return
    try:
        client.register_files(model, files, "", tensors.values(), weight_map=client.model(model).weight_map)
    except (FailedPrecondition, InvalidArgument) as error:
        raise LayoutError(
            f"{source} describes a different model than {model}: {error.message}",
            details=error.details,
            fix="register it under another name: weighbridge import, or TrainerClient.register_model",
        ) from error
    other = sorted(name for name in {*files, *registered} if files.get(name) != registered.get(name))
    log.info("%s: new versions have different files from now on: %s", model, ", ".join(other))
