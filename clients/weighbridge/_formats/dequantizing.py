"""Block-quantised fp8 weights as floating-point ones, computed piece by piece while they are being pushed.

The format is that of `block_scales`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from weighbridge._core.block_scales import QUANTIZED, SCALE_SUFFIX, block_of, scale_shape
from weighbridge._core.dtypes import DType
from weighbridge._core.layouts import Layout, Placement, Shard, TensorSpec
from weighbridge._core.text.counts import counted, first_lines
from weighbridge._formats.push_sources import HeldShards, MappedSource, StreamSource
from weighbridge._memory.file_reads import OpenFile
from weighbridge._transport.pieces import Buffer
from weighbridge.errors import InvalidArgument

if TYPE_CHECKING:
    import torch

Bytes = NDArray[np.uint8]


class Dequantized(HeldShards):
    """The tensors of a folder with its fp8 matrices converted to another dtype, and without their scales.

    Args:
        files: the folder's tensors and their positions.
        buffers: its files.
        config_json: its ``config.json``.
        dtype: target dtype of tensors that are fp8 in the files.

    Attributes:
        layout: the tensors as one stream, in the order of the files.
        config_json: the config of the result: without ``quantization_config``.

    Raises:
        InvalidArgument: the folder has nothing to dequantise, a scale is missing or does not fit, or the config names
            another quantisation method.
    """

    def __init__(self, files: Layout, buffers: Mapping[str, OpenFile], config_json: bytes, dtype: DType) -> None:
        self._buffers = buffers
        self._dtype = dtype
        self.config_json, self._block = _config(config_json, dtype)
        self._places = {p.shard.tensor: p for p in files.placements}
        self._specs = files.tensors
        quantised = {name for name, spec in files.tensors.items() if spec.dtype.name == QUANTIZED}
        if not quantised:
            raise InvalidArgument(
                f"no weight of the folder is in {QUANTIZED}, the only kind of fp8 that has scales",
                fix="import it without dequantising",
            )
        problems = [problem for name in sorted(quantised) if (problem := self._problem(name))]
        if problems:
            raise InvalidArgument(
                counted(len(problems), "fp8 tensor has", "fp8 tensors have") + " no scales that fit",
                details=first_lines(problems),
            )
        left_out = {name + SCALE_SUFFIX for name in quantised}
        kept = [p for p in files.placements if p.shard.tensor not in left_out]
        specs = [files.tensors[p.shard.tensor] for p in kept]
        self.layout = Layout.stream(
            [replace(spec, dtype=dtype) if spec.name in quantised else spec for spec in specs],
            [Shard(p.shard.tensor, p.shard.box) for p in kept],
        )

    def _problem(self, name: str) -> str | None:
        spec, scale = self._specs[name], self._specs.get(name + SCALE_SUFFIX)
        if scale is None:
            return f"{spec} has no {name + SCALE_SUFFIX}"
        if len(spec.shape) != 2 or scale.shape != scale_shape(spec.shape, self._block):
            return f"{scale} is not one scale for each block of {list(self._block)} of {spec}"
        if not scale.dtype.is_float:
            return f"{scale} does not have a floating-point dtype"
        if not self._rows_of(scale.name, 0, scale.shape[0]).isfinite().all():
            return f"{scale} has values that are not finite"
        return None

    def select(self, indexes: Sequence[int], stream: Layout) -> _DequantizedSource:
        """See `HeldShards.select`."""
        places = [self._places[p.shard.tensor] for p in stream.placements]
        return _DequantizedSource(stream, places, self)

    def rows(self, name: str, first: int, last: int) -> Bytes:
        """Rows ``first`` to ``last`` of a matrix, dequantised, as bytes; ``first`` is the first row of a block."""
        import torch

        weight, scale = self._rows_of(name, first, last), name + SCALE_SUFFIX
        block_rows, block_columns = self._block
        scales = self._rows_of(scale, first // block_rows, math.ceil(last / block_rows)).float()
        # a block may be larger than the matrix
        factors = scales.repeat_interleave(min(block_rows, last - first), 0)[: last - first]
        factors = factors.repeat_interleave(min(block_columns, weight.shape[1]), 1)[:, : weight.shape[1]]
        made = (weight.float() * factors).to(self._dtype.torch)
        found: Bytes = made.view(torch.uint8).reshape(-1).numpy()
        return found

    def _rows_of(self, name: str, first: int, last: int) -> torch.Tensor:
        import torch

        spec, place = self._specs[name], self._places[name]
        row = spec.nbytes // spec.shape[0]
        data = self._buffers[place.buffer][place.offset + first * row : place.offset + last * row]
        return torch.from_numpy(data).view(spec.dtype.torch).reshape(last - first, *spec.shape[1:])

    @property
    def block_rows(self) -> int:
        """Rows that share scales."""
        return self._block[0]

    def quantised(self, name: str) -> TensorSpec | None:
        """The spec of a tensor in the files if it is fp8."""
        spec = self._specs[name]
        return spec if spec.dtype.name == QUANTIZED else None

    @property
    def buffers(self) -> Mapping[str, OpenFile]:
        """The files."""
        return self._buffers


class _DequantizedSource(StreamSource):
    """A stream whose fp8 matrices are dequantised as they are read; holds one row of blocks in memory."""

    def __init__(self, stream: Layout, places: Sequence[Placement], weights: Dequantized) -> None:
        super().__init__(stream)
        self._weights = weights
        self._plain = MappedSource(stream, places, weights.buffers)
        filled = [p for p in stream.placements if p.nbytes]
        self._placements = filled
        self._starts = np.array([p.offset for p in filled], np.int64)
        self._last: tuple[str, int, Bytes] = ("", -1, np.empty(0, np.uint8))

    def read(self, start: int, stop: int) -> Buffer:
        """Bytes ``start`` to ``stop`` of the stream."""
        parts: list[Buffer] = []
        while start < stop:
            index = int(np.searchsorted(self._starts, start, side="right")) - 1
            placement = self._placements[index]
            end = min(stop, placement.offset + placement.nbytes)
            spec = self._weights.quantised(placement.shard.tensor)
            if spec is None:
                parts.append(self._plain.read(start, end))
            else:
                piece = self._dequantised(spec, placement, start - placement.offset, end - placement.offset)
                parts.append(piece)
                end = start + len(piece)
            start = end
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _dequantised(self, spec: TensorSpec, placement: Placement, start: int, stop: int) -> memoryview:
        """The part of a range that lies in its first row of blocks."""
        rows = self._weights.block_rows
        band_bytes = placement.nbytes // spec.shape[0] * rows
        band = start // band_bytes
        name, number, data = self._last
        if (name, number) != (spec.name, band):
            data = self._weights.rows(spec.name, band * rows, min((band + 1) * rows, spec.shape[0]))
            self._last = (spec.name, band, data)
        into = start - band * band_bytes
        return data[into : min(stop - band * band_bytes, len(data))].data

    def release(self) -> None:
        """Does nothing: only one row of blocks is held."""
        self._last = ("", -1, np.empty(0, np.uint8))


def _config(config_json: bytes, dtype: DType) -> tuple[bytes, tuple[int, int]]:
    """The config without its quantisation, and the size of a block."""
    try:
        config = json.loads(config_json)
        block = block_of(config)
        quantization = config.pop("quantization_config", None) or {}
        if quantization.get("quant_method", "fp8") != "fp8":
            raise InvalidArgument(
                f"quantization_config of config.json does not describe block-wise fp8 weights: {quantization}"[:300]
            )
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidArgument(f"config.json cannot be read: {error}"[:300]) from error
    config["dtype"] = config["torch_dtype"] = dtype.torch_name
    return (json.dumps(config, indent=2) + "\n").encode(), block
