"""Which tensors a registered model has, and of which dtype: what its config says, corrected by what its files hold."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weighbridge import dtypes
from weighbridge.dtypes import DType
from weighbridge.errors import InvalidArgument
from weighbridge.layouts import TensorSpec
from weighbridge_service.bridges import Bridge, kind_of
from weighbridge_service.families.rules import Shape

SCALE_SUFFIX = "_scale_inv"
"""What the name of a tensor of block scales has more than that of the quantised one."""
_BLOCK = (128, 128)
_FP8 = "F8_E4M3"
_NAMED = 20


@dataclass(frozen=True)
class ModelTensors:
    """What a config leaves open about a model's tensors; small, and kept with the registration.

    Attributes:
        dtype: of most of the weights.
        exceptions: the dtypes of others, by the names of tensors with ``*`` in the place of numbers, or by whole names
            where tensors of one kind differ.
        absent: optional parts that the model lacks.
        block: rows and columns to which one scale belongs, in quantised weights.
    """

    dtype: DType
    exceptions: Mapping[str, DType] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    block: tuple[int, int] = _BLOCK

    def to_json(self) -> dict[str, Any]:
        """As kept with the registration."""
        return {
            "dtype": self.dtype.name,
            "dtypes": {name: dtype.name for name, dtype in self.exceptions.items()},
            "absent": list(self.absent),
            "block": list(self.block),
        }

    @staticmethod
    def from_json(kept: Mapping[str, Any]) -> ModelTensors:
        """From the registration. Raises KeyError, TypeError or ValueError if it is damaged."""
        exceptions = {
            str(name): dtypes.from_safetensors(dtype) for name, dtype in kept.get("dtypes", {}).items()
        }
        rows, columns = kept.get("block", _BLOCK)
        return ModelTensors(
            dtypes.from_safetensors(kept["dtype"]),
            exceptions,
            tuple(map(str, kept.get("absent", ()))),
            (int(rows), int(columns)),
        )

    def specs(self, bridge: Bridge) -> dict[str, TensorSpec]:
        """The model's tensors in the order of its files; block scales behind the weights they belong to."""
        scaled = {kind for kind in self.exceptions if kind.endswith(SCALE_SUFFIX)}
        specs = {}
        for name, shape in bridge.hugging_face.items():
            specs[name] = TensorSpec(name, self._dtype(name, bridge), shape)
            if scaled and (kind_of(name) + SCALE_SUFFIX in scaled or name + SCALE_SUFFIX in scaled):
                scale = name + SCALE_SUFFIX
                specs[scale] = TensorSpec(scale, self._dtype(scale, bridge), scale_shape(shape, self.block))
        return specs

    def _dtype(self, name: str, bridge: Bridge) -> DType:
        if self.exceptions:
            found = self.exceptions.get(name) or self.exceptions.get(kind_of(name))
            if found is not None:
                return found
        if name.endswith(bridge.keep_in_fp32) and bridge.keep_in_fp32:
            return dtypes.parse("fp32")
        return self.dtype


def scale_shape(shape: Shape, block: tuple[int, int]) -> Shape:
    """The shape of the scales of a quantised matrix."""
    if len(shape) != len(block):
        raise InvalidArgument(
            f"a tensor of shape {list(shape)} cannot have scales for blocks of {list(block)}"
        )
    return tuple(math.ceil(n / b) for n, b in zip(shape, block, strict=True))


def tensors_found(bridge: Bridge, config: Mapping[str, Any], found: Sequence[TensorSpec]) -> ModelTensors:
    """What the tensors of a model's files say about it.

    Args:
        bridge: the model with all optional parts.
        config: its config.
        found: the tensors of its files.

    Raises:
        InvalidArgument: a tensor is missing, unknown, or of another shape than the config says; names each.
    """
    there = {spec.name: spec for spec in found}
    parts = {
        part: ([n for n in names if n in there], [n for n in names if n not in there])
        for part, names in bridge.parts.items()
    }
    absent = tuple(sorted(part for part, (have, lack) in parts.items() if lack and not have))
    left_out = {name for part in absent for name in bridge.parts[part]}
    shapes = {name: shape for name, shape in bridge.hugging_face.items() if name not in left_out}
    block = _block_of(config)
    problems = [f"{name} is missing" for name in shapes if name not in there]
    for name, spec in there.items():
        weight = name.removesuffix(SCALE_SUFFIX)
        if name in shapes:
            expected = shapes[name]
        elif name != weight and weight in shapes and len(shapes[weight]) == len(block):
            expected = scale_shape(shapes[weight], block)
        else:
            tied = name == "lm_head.weight" and config.get("tie_word_embeddings", False)
            why = (
                ": config.json ties it to the embedding, so it must be left out of the files" if tied else ""
            )
            problems.append(f"{spec} is no tensor of this {bridge.model_type} model{why}")
            continue
        if spec.shape != expected:
            problems.append(f"{spec} has the wrong shape: config.json says {list(expected)}")
        if spec.dtype.name == _FP8 and name + SCALE_SUFFIX not in there and _quantised(config):
            problems.append(f"{name + SCALE_SUFFIX} is missing: {name} is quantised")
    if problems:
        raise InvalidArgument(
            f"{len(problems)} tensors of the files are not what config.json describes",
            details=problems[:_NAMED],
            fix="use the config.json that belongs to the weights; of an optional part such as layers for multi-token "
            "prediction all tensors must be there, or none",
        )
    counted: Counter[str] = Counter()
    for spec in found:
        counted[spec.dtype.name] += spec.nbytes
    usual = dtypes.from_safetensors(counted.most_common(1)[0][0])
    return ModelTensors(usual, _exceptions(bridge, found, usual), absent, block)


def _exceptions(bridge: Bridge, found: Sequence[TensorSpec], usual: DType) -> dict[str, DType]:
    by_kind: dict[str, set[DType]] = {}
    for spec in found:
        by_kind.setdefault(kind_of(spec.name), set()).add(spec.dtype)
    exceptions = {}
    for spec in found:
        kind = kind_of(spec.name)
        if len(by_kind[kind]) > 1:
            exceptions[spec.name] = spec.dtype
        elif spec.dtype != usual or kind.endswith((SCALE_SUFFIX, *bridge.keep_in_fp32)):
            exceptions[kind] = spec.dtype
    return exceptions


def _quantised(config: Mapping[str, Any]) -> bool:
    quantisation = config.get("quantization_config")
    return isinstance(quantisation, Mapping) and quantisation.get("quant_method") == "fp8"


def _block_of(config: Mapping[str, Any]) -> tuple[int, int]:
    quantisation = config.get("quantization_config")
    size = quantisation.get("weight_block_size") if isinstance(quantisation, Mapping) else None
    if size is None:
        return _BLOCK
    if not isinstance(size, list) or len(size) != 2 or any(type(n) is not int or n < 1 for n in size):
        raise InvalidArgument(
            f"config.json has weight_block_size = {str(size)[:40]}, not two positive integers"
        )
    return size[0], size[1]
