"""Hugging Face folders, written as transformers loads them."""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weighbridge._core.dtypes import DType
from weighbridge._core.file_names import ALLOWED, folders_of, is_adapter, is_file_name
from weighbridge._core.layouts import TensorSpec
from weighbridge._core.text.shortening import shown
from weighbridge._formats import safetensors_files
from weighbridge.errors import (
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
    WeighbridgeError,
)

if TYPE_CHECKING:
    import torch


def unwritable(path: Path, error: OSError) -> WeighbridgeError:
    """Error to raise if the operating system refuses to write."""
    text = f"{path} cannot be written: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceExhausted(text, fix="make room and try again")
    return FailedPrecondition(text, fix="check that the folder can be written")


def check_free(folder: Path, *, fix: str = "name a new folder") -> None:
    """Refuse a folder that is not empty; the error has this ``fix``.

    Raises:
        InvalidArgument: the path exists and is not an empty folder.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidArgument(f"{folder} exists and is not an empty folder", fix=fix)


def write_hf_folder(
    folder: Path,
    specs: Sequence[TensorSpec],
    tensors: Callable[[Sequence[TensorSpec]], Iterable[tuple[str, Any]]],
    files: Mapping[str, bytes],
    *,
    dtype: DType | None = None,
    max_shard_bytes: int = safetensors_files.DEFAULT_SHARD_BYTES,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> list[str]:
    """Write a folder of safetensors files, their index and the model's other files.

    Each file is written under a temporary name and renamed when it is complete, the index last. If anything fails, the
    folder is left empty. Memory for one tensor at a time is required.

    Args:
        folder: created if it does not exist; must be empty.
        specs: specs of all whole tensors to write, in the order of the state dict.
        tensors: returns the torch tensors in the order of its argument, the specs; tensors of a different dtype are
            cast.
        files: content of the other files by name.
        dtype: dtype of the model for ``config.json``; None leaves it unchanged.
        max_shard_bytes: maximum size of a file.
        on_progress: called with the bytes written so far and the total.

    Returns:
        Names of the files written.

    Raises:
        InvalidArgument: the folder is not empty, or a name does not name a file in it.
        ResourceExhausted: the disk is full.
        FailedPrecondition: the folder cannot be written.
    """
    check_free(folder)
    for name in files:
        check_file_name(name)
    if is_adapter(files):
        laid_out = safetensors_files.lay_out_adapter(specs)
    else:
        laid_out = safetensors_files.lay_out_files(specs, max_shard_bytes)
    in_file_order = [laid_out.layout.tensors[p.shard.tensor] for p in laid_out.layout.placements]
    chunks = _chunks(tensors(in_file_order), laid_out.layout.tensors)
    total = sum(file.nbytes for file in laid_out.files)
    done = 0
    config = files.get("config.json")
    side = dict(files)
    if dtype is not None and config is not None:
        side["config.json"] = with_dtype(config, dtype)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in laid_out.files:
            partial = folder / f".{file.name}.partial"
            with partial.open("wb") as out:
                out.write(file.header)
                written = len(file.header)
                while written < file.nbytes:
                    chunk = next(chunks)
                    out.write(chunk)
                    written += len(chunk)
                    on_progress(done + written, total)
                out.flush()
                os.fsync(out.fileno())
            partial.rename(folder / file.name)
            done += file.nbytes
        index = laid_out.index_json
        if index is not None:
            side[safetensors_files.INDEX_FILE] = index
        write_side_files(folder, side)
    except BaseException as error:
        for name in laid_out.file_sizes:  # it would prevent a retry
            (folder / f".{name}.partial").unlink(missing_ok=True)
        for name in (*laid_out.file_sizes, *side):
            (folder / name).unlink(missing_ok=True)
        for name in sorted(folders_of(side), reverse=True):
            with suppress(OSError):
                (folder / name).rmdir()
        if not isinstance(error, OSError):
            raise
        raise unwritable(folder, error) from error
    return [*laid_out.file_sizes, *side]


def check_file_name(name: str) -> str:
    """``name``, if it names a file in a version's folder. Raises InvalidArgument if it could lead out of the folder."""
    if not is_file_name(name):
        raise InvalidArgument(f"{shown(name)} is not a valid name of a model file", fix=f"use {ALLOWED}")
    return name


def write_side_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files to an existing folder, and to folders in it.

    Args:
        folder: destination.
        files: content by name; names of files in folders contain slashes.

    Raises:
        InvalidArgument: a name may lead out of the folder.
        OSError: the file system refuses.
    """
    for name, content in files.items():
        path = folder / check_file_name(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def with_dtype(config_json: bytes, dtype: DType) -> bytes:
    """A ``config.json`` with this dtype as the model's; unchanged if it already has it."""
    config = json.loads(config_json)
    # transformers has called it dtype since 4.56, and torch_dtype before
    if config.get("dtype", config.get("torch_dtype")) == dtype.torch_name:
        return config_json
    config["dtype"] = config["torch_dtype"] = dtype.torch_name
    return (json.dumps(config, indent=2) + "\n").encode()


def in_dtype_of(tensors: Iterable[TensorSpec], config_json: bytes) -> bytes:
    """A ``config.json`` with the dtype of most of the weights as the model's, because loaders use it."""
    nbytes: Counter[DType] = Counter()
    for spec in tensors:
        if spec.dtype.is_float:
            nbytes[spec.dtype] += spec.nbytes
    return with_dtype(config_json, nbytes.most_common(1)[0][0]) if nbytes else config_json


def _chunks(tensors: Iterable[tuple[str, torch.Tensor]], specs: Mapping[str, TensorSpec]) -> Iterator[memoryview]:
    """The bytes of each tensor, cast to its spec's dtype, as one chunk per tensor; empty tensors yield none."""
    import torch

    for name, tensor in tensors:
        wanted = tensor.to(specs[name].dtype.torch).contiguous().reshape(-1)
        if wanted.numel():
            yield wanted.view(torch.uint8).numpy().data
