"""Weights of a Hugging Face folder, as a stream to be pushed from where they lie."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from weighbridge._core import dtypes
from weighbridge._core.dtypes import DType
from weighbridge._core.layouts import Layout, Placement, TensorSpec
from weighbridge._core.text.counts import counted
from weighbridge._core.text.shortening import readable
from weighbridge._formats import safetensors_files
from weighbridge._formats.dequantizing import Dequantized
from weighbridge._formats.naming.parameter_names import check_merged, has_own_adapters
from weighbridge._formats.naming.weight_files import MERGE_ADAPTER
from weighbridge._formats.push_sources import CastingSource, MappedSource, OpenSource, cast_dtypes
from weighbridge.errors import InvalidArgument

if TYPE_CHECKING:
    import torch


_NAMED = 20


@dataclass(frozen=True)
class FolderWeights:
    """The weights in a folder.

    Attributes:
        layout: the weights as one stream, in the order of the files.
        open_source: gives the bytes of some of its shards.
        config_json: the config that belongs to them.
        tensors: gives names and tensors, mapped as they lie in the files. They must not be written to.
        cast_from: safetensors' names of the dtypes in the files that are cast, or dequantised, as they are read.
        remarks: what in the folder is not as it is pushed, for a log.
    """

    layout: Layout
    open_source: OpenSource = field(repr=False)
    config_json: bytes = field(repr=False)
    tensors: Callable[[], Iterator[tuple[str, torch.Tensor]]] = field(repr=False)
    cast_from: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @staticmethod
    def read(folder: Path, config_json: bytes, *, dequantize: DType | None = None) -> FolderWeights:
        """Find out what is in a folder, and whether it is whole. Of weights, only what has to be compared is read.

        A second copy of a tensor that the config ties to another one is left out, and so is what wrappers have added to names.

        Args:
            folder: the folder.
            config_json: its ``config.json``.
            dequantize: what block-quantised fp8 weights are turned into as they are read; None keeps them.

        Raises:
            NotFound: there is no folder, no safetensors file in it, or one is missing.
            DataLoss: a file is damaged, or lacks a tensor that the index lists.
            InvalidArgument: files are not those of one model, tied tensors are not the same, or the weights cannot be dequantised.
            LayoutError: there are LoRA adapters that are not merged, or two tensors of one name.
        """
        found = safetensors_files.read_folder(folder)
        if not has_own_adapters(config_json):
            check_merged(found.layout.tensors, MERGE_ADAPTER)
        buffers, remarks = found.buffers, _remarks(folder, found)
        files = _without_copies(found.layout, buffers, config_json)
        if dequantize is not None:
            weights = Dequantized(files, buffers, config_json, dequantize)
            now = weights.layout.tensors
            cast = {
                spec.dtype.name
                for name, spec in files.tensors.items()
                if name in now and now[name].dtype != spec.dtype
            }
            return FolderWeights(
                weights.layout,
                weights.open_source,
                weights.config_json,
                lambda: iter(()),
                tuple(sorted(cast)),
                remarks,
            )
        layout = Layout.stream(files.tensors.values(), [p.shard for p in files.placements])
        return FolderWeights(
            layout,
            MappedSource.opener(files.placements, buffers),
            config_json,
            lambda: _mapped_tensors(files, buffers),
            remarks=remarks,
        )

    def castable_to(self, dtype: str | torch.dtype) -> DType:
        """A dtype that the floating-point weights can be cast to.

        Raises:
            InvalidArgument: they cannot be cast to it, or a tensor cannot be cast: one in fp8 means nothing without its scales.
        """
        target = dtypes.parse(dtype)
        if not target.is_float:
            raise InvalidArgument(f"weights cannot be cast to {target}", fix="use bf16, fp16 or fp32")
        for spec in self.layout.tensors.values():
            if spec.dtype.name.startswith("F8_"):
                raise InvalidArgument(
                    f"{spec} cannot be cast to {target}: its values are without their scales",
                    fix="dequantise the weights: --dequantize DTYPE (dequantize=...)",
                )
        return target

    def as_model_has_them(self, model: Mapping[str, TensorSpec], cast: str) -> FolderWeights:
        """The weights in the model's dtypes: themselves, if they are as it has them; else cast as they are read. What is wrong is refused before a version is opened.

        Args:
            model: its tensors, by name.
            cast: as for `torch_shards`.

        Raises:
            InvalidArgument: there is no such ``cast``.
            LayoutError: names or shapes contradict the model, or a tensor is not cast; names each.
        """
        from weighbridge._formats.torch_state import check_cast, torch_shards

        check_cast(cast)
        if dict(self.layout.tensors) == dict(model):
            return self
        found = torch_shards(self.tensors(), model, cast=cast, whole=True)
        return replace(
            self,
            layout=found.layout,
            open_source=CastingSource.opener(found.tensors),
            cast_from=tuple(cast_dtypes(found.layout, found.tensors)),
        )


def _remarks(folder: Path, found: safetensors_files.FolderFiles) -> tuple[str, ...]:
    """What a folder's weights do not have of it."""
    remarks = []
    if found.left_out:
        names = ", ".join(map(readable, found.left_out[:_NAMED]))
        remarks.append(f"{names} in {folder}: not of the model's set of files, left out")
    if found.wrapped:
        remarks.append(
            f"{counted(found.wrapped, 'name')} in {folder}: without what torch.compile, FSDP or DDP have put into them"
        )
    return tuple(remarks)


def _mapped_tensors(
    files: Layout, buffers: Mapping[str, NDArray[np.uint8]]
) -> Iterator[tuple[str, torch.Tensor]]:
    for place in files.placements:
        spec = files.tensors[place.shard.tensor]
        yield spec.name, mapped_tensor(spec.dtype, spec.shape, place, buffers)


def mapped_tensor(
    dtype: DType, shape: Sequence[int], place: Placement, files: Mapping[str, NDArray[np.uint8]]
) -> torch.Tensor:
    """The tensor whose elements lie in a place of mapped files, in row-major order. It must not be written to."""
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nor is it written to
        data = torch.from_numpy(files[place.buffer][place.offset : place.offset + place.nbytes])
    if place.offset % dtype.itemsize:
        data = data.clone()  # torch wants elements at multiples of their size
    return data.view(dtype.torch).reshape(tuple(shape))


def tied_copies(config_json: bytes, tensors: Mapping[str, TensorSpec]) -> dict[str, str]:
    """Tensors that a config ties to another one and that are there all the same, each with that one.

    Published folders have such copies: transformers leaves them out when it writes, and ignores them when it reads.
    """
    try:
        config = json.loads(config_json)
        text = config.get("text_config") or {}
        tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings")) is True
    except (ValueError, AttributeError, RecursionError):
        return {}  # whoever reads the config for its own sake says what is wrong with it
    heads = [name for name in tensors if name == "lm_head.weight" or name.endswith(".lm_head.weight")]
    embeddings = [name for name in tensors if name.endswith("embed_tokens.weight") and ".layers." not in name]
    if not tied or len(heads) != 1 or len(embeddings) != 1:
        return {}
    copy, original = tensors[heads[0]], tensors[embeddings[0]]
    return {copy.name: original.name} if (copy.dtype, copy.shape) == (original.dtype, original.shape) else {}


def _without_copies(files: Layout, buffers: Mapping[str, NDArray[np.uint8]], config_json: bytes) -> Layout:
    copies = tied_copies(config_json, files.tensors)
    if not copies:
        return files
    placed = {p.shard.tensor: p for p in files.placements}

    def content(place: Placement) -> NDArray[np.uint8]:
        return buffers[place.buffer][place.offset : place.offset + place.nbytes]

    for copy, original in copies.items():
        if not np.array_equal(content(placed[copy]), content(placed[original])):
            raise InvalidArgument(
                f"{copy} is not the same as {original}, and config.json ties them",
                fix="set tie_word_embeddings to false in config.json, or leave one of them out",
            )
    return Layout(
        {name: spec for name, spec in files.tensors.items() if name not in copies},
        tuple(p for p in files.placements if p.shard.tensor not in copies),
    )
