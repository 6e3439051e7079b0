"""Tensors of a registered model and their dtypes, from its config, corrected by the tensors in its files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weighbridge._core import dtypes
from weighbridge._core.block_scales import (
    DEFAULT_BLOCK,
    QUANTIZED,
    QUANTIZED_WITH_SCALES,
    SCALE_SUFFIX,
    block_of,
    is_quantized,
    quantization_of,
    scale_shape,
)
from weighbridge._core.dtypes import DType
from weighbridge._core.layouts import TensorSpec
from weighbridge._core.text.counts import counted, first_lines
from weighbridge.errors import InvalidArgument
from weighbridge_service.models.bridges import Bridge, kind_of

_DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class ModelTensors:
    """Properties of a model's tensors that its config does not determine; small, and stored with the registration.

    Attributes:
        dtype: dtype of most of the weights.
        exceptions: dtypes of the other tensors, by names with ``*`` in place of numbers, or by whole names if tensors
            of one kind differ.
        absent: optional parts that the model lacks.
        block: rows and columns of a quantised weight that share a scale.
        listed: digest of the list of its tensors, if no weight map exists to derive them from the config; empty
            otherwise.
    """

    dtype: DType
    exceptions: Mapping[str, DType] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    block: tuple[int, int] = DEFAULT_BLOCK
    listed: str = ""

    def to_json(self) -> dict[str, Any]:
        """JSON for the registration."""
        return {
            "dtype": self.dtype.name,
            "dtypes": {name: dtype.name for name, dtype in self.exceptions.items()},
            "absent": list(self.absent),
            "block": list(self.block),
            **({"listed": self.listed} if self.listed else {}),
        }

    @staticmethod
    def from_json(kept: Mapping[str, Any]) -> ModelTensors:
        """Parse the JSON of a registration. Raises KeyError, TypeError or ValueError if it is damaged."""
        exceptions = {str(name): dtypes.from_safetensors(dtype) for name, dtype in kept["dtypes"].items()}
        rows, columns = kept["block"]
        listed = kept.get("listed", "")
        if not isinstance(listed, str) or (listed and not _DIGEST.fullmatch(listed)):
            raise ValueError(f"{repr(listed)[:80]} is not the digest of a list of tensors")
        return ModelTensors(
            dtypes.from_safetensors(kept["dtype"]),
            exceptions,
            tuple(map(str, kept["absent"])),
            (int(rows), int(columns)),
            listed,
        )

    def specs(self, bridge: Bridge) -> dict[str, TensorSpec]:
        """Tensors of the model in the order of its files; each block scale follows its weight."""
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


def tensors_found(bridge: Bridge, config: Mapping[str, Any], found: Sequence[TensorSpec]) -> ModelTensors:
    """Properties of a model's tensors, from the tensors in its files.

    Args:
        bridge: bridge of the model with all optional parts.
        config: its config.
        found: the tensors in its files.

    Raises:
        InvalidArgument: tensors are missing or unknown, or their shapes differ from those that the config defines. The
            error names each.
    """
    there = {spec.name: spec for spec in found}
    parts = {
        part: ([n for n in names if n in there], [n for n in names if n not in there])
        for part, names in bridge.parts.items()
    }
    absent = tuple(sorted(part for part, (have, lack) in parts.items() if lack and not have))
    left_out = {name for part in absent for name in bridge.parts[part]}
    shapes = {name: shape for name, shape in bridge.hugging_face.items() if name not in left_out}
    block = block_of(config)
    problems = [f"{name} is missing" for name in shapes if name not in there]
    for name, spec in there.items():
        weight = name.removesuffix(SCALE_SUFFIX)
        if name in shapes:
            expected = shapes[name]
        elif name != weight and weight in shapes and len(shapes[weight]) == len(block):
            expected = scale_shape(shapes[weight], block)
        else:
            tied = name == "lm_head.weight" and config.get("tie_word_embeddings", False)
            why = ": config.json ties it to the embedding, so it must be left out of the files" if tied else ""
            problems.append(f"{spec} is not a tensor of this {bridge.model_type} model{why}")
            continue
        if spec.shape != expected:
            problems.append(f"{spec} has the wrong shape: config.json says {list(expected)}")
        if spec.dtype.name == QUANTIZED and name + SCALE_SUFFIX not in there and is_quantized(config):
            problems.append(f"{name + SCALE_SUFFIX} is missing: {name} is quantised")
    if problems:
        method = quantization_of(config)
        if method not in ("", QUANTIZED_WITH_SCALES):
            raise InvalidArgument(
                f"the weights are quantised ({method}), and the weight map of {bridge.model_type} is for plain weights",
                details=first_lines(problems),
                fix="dequantise them first (of MXFP4 transformers' from_pretrained makes bf16 with "
                "Mxfp4Config(dequantize=True); save that); or register the model unchanged, without a weight map: "
                "weight_map=False, or --no-weight-map",
            )
        raise InvalidArgument(
            counted(len(problems), "tensor of the files is", "tensors of the files are")
            + " not what config.json describes",
            details=first_lines(problems),
            fix="use the config.json that belongs to the weights; of an optional part such as layers for multi-token "
            "prediction all tensors must be there, or none; or register the model without a weight map: "
            "weight_map=False, or --no-weight-map",
        )
    usual = usual_dtype(found)
    return ModelTensors(usual, _exceptions(bridge, found, usual), absent, block)


def usual_dtype(found: Iterable[TensorSpec]) -> DType:
    """The dtype of most of the bytes of these tensors."""
    counted: Counter[DType] = Counter()
    for spec in found:
        counted[spec.dtype] += spec.nbytes
    return counted.most_common(1)[0][0]


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
