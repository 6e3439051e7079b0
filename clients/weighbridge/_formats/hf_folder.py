"""Hugging Face folders: the files besides the weights, and writing a folder that transformers loads."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weighbridge._core.dtypes import DType
from weighbridge._core.layouts import TensorSpec
from weighbridge._formats import safetensors_files
from weighbridge._formats.naming.weight_files import MERGE_ADAPTER
from weighbridge.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    WeighbridgeError,
)

if TYPE_CHECKING:
    import torch

_SIDE_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".md", ".py")
"""Files of code belong to models that transformers has none for; nothing here runs them."""
MAX_SIDE_FILE_BYTES = 256 << 20
_OWN_FILES = (safetensors_files.INDEX_FILE, "pytorch_model.bin.index.json", "weighbridge.json")


def side_files(folder: Path) -> dict[str, bytes]:
    """The files of an HF folder that belong to the model besides its weights: config, tokenizer, chat template, code.

    Raises:
        NotFound: no such folder, or no ``config.json`` in it.
        InvalidArgument: a file is larger than `MAX_SIDE_FILE_BYTES`.
    """
    if not folder.is_dir():
        raise NotFound(
            f"there is no folder {folder}", fix="name one that model.save_pretrained() has written"
        )
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise NotFound(f"{folder} is an adapter of peft, and no model", fix=MERGE_ADAPTER)
        raise NotFound(
            f"there is no config.json in {folder}",
            fix="name a folder that model.save_pretrained() has written",
        )
    found = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in _SIDE_SUFFIXES and path.name not in _OWN_FILES:
            if path.stat().st_size > MAX_SIDE_FILE_BYTES:
                raise InvalidArgument(
                    f"{path} has {path.stat().st_size} bytes, more than a tokenizer's {MAX_SIDE_FILE_BYTES}",
                    fix="move it out of the folder if it does not belong to the model",
                )
            found[path.name] = path.read_bytes()
    return found


def has_tokenizer(files: Iterable[str]) -> bool:
    """Whether files with these names are, or make, a tokenizer."""
    return any(
        name.startswith(("tokeniz", "vocab", "merges", "tekken")) or name.endswith((".model", ".tiktoken"))
        for name in files
    )


def unwritable(path: Path, error: OSError) -> WeighbridgeError:
    """What to raise where the operating system refuses to write."""
    text = f"{path} cannot be written: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceExhausted(text, fix="make room and try again")
    return FailedPrecondition(text, fix="check that the folder can be written")


def check_free(folder: Path, *, fix: str = "name a new folder") -> None:
    """Refuse a folder that has something in it; the error says ``fix``.

    Raises:
        InvalidArgument: it exists and is not an empty folder.
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

    Each file is written under another name and moved to its place when it is complete, the index last; if anything
    fails, the folder is left empty. Needs memory for one tensor at a time.

    Args:
        folder: is made if it does not exist; must be empty.
        specs: all tensors as they are written, whole, in the order of the state dict.
        tensors: gives the tensors, as torch tensors, in the order of the specs it is called with; those of another dtype
            are cast.
        files: content of the other files by name.
        dtype: what ``config.json`` is to name as the model's; None leaves what it names.
        max_shard_bytes: largest file.
        on_progress: is called with bytes written so far and in all.

    Returns:
        Names of the files written.

    Raises:
        InvalidArgument: the folder is not empty, or a file's name is none.
        ResourceExhausted: the disk is full.
        FailedPrecondition: the folder cannot be written.
    """
    check_free(folder)
    for name in files:
        if Path(name).name != name or name.startswith("."):
            raise InvalidArgument(f"{name[:80]!r} is no name for a file of a model")
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
        for name, content in side.items():
            (folder / name).write_bytes(content)
    except BaseException as error:
        for name in (*laid_out.file_sizes, *side):  # it would be in the way of another try
            (folder / f".{name}.partial").unlink(missing_ok=True)
            (folder / name).unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise unwritable(folder, error) from error
    return [*laid_out.file_sizes, *side]


def with_dtype(config_json: bytes, dtype: DType) -> bytes:
    """A ``config.json`` that names a dtype as the model's; unchanged if it does already."""
    config = json.loads(config_json)
    # transformers has called it dtype since 4.56, and torch_dtype before
    if config.get("dtype", config.get("torch_dtype")) == dtype.torch_name:
        return config_json
    config["dtype"] = config["torch_dtype"] = dtype.torch_name
    return (json.dumps(config, indent=2) + "\n").encode()


def _chunks(
    tensors: Iterable[tuple[str, torch.Tensor]], specs: Mapping[str, TensorSpec]
) -> Iterator[memoryview]:
    """The bytes of each tensor, cast to its spec's dtype, as one chunk a tensor; empty tensors give none."""
    import torch

    for name, tensor in tensors:
        wanted = tensor.to(specs[name].dtype.torch).contiguous().reshape(-1)
        if wanted.numel():
            yield wanted.view(torch.uint8).numpy().data
