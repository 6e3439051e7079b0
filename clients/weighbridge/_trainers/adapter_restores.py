"""Restores of adapters into models in training: checks that a version fits a model, and the shards that the rank
holds.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weighbridge._core.file_names import ADAPTER_CONFIG
from weighbridge._core.layouts import Layout, TensorSpec
from weighbridge._core.text.counts import counted, first_lines
from weighbridge._trainers.peft_adapters import PREFIX, LoraModule
from weighbridge.errors import InvalidArgument, LayoutError

if TYPE_CHECKING:
    import torch

_PLAIN = re.compile(r"[\w.]+")


@dataclass(frozen=True)
class StoredAdapter:
    """A version of an adapter, as it is known before its bytes have been transferred.

    Attributes:
        name: ``namespace/name@version``.
        config: the adapter's ``adapter_config.json``.
        tensors: the whole tensors by name.
    """

    name: str
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorSpec]

    @staticmethod
    def of(name: str, files: Mapping[str, bytes], tensors: Mapping[str, TensorSpec]) -> StoredAdapter:
        """Return the adapter with these files. Raises InvalidArgument for a whole model."""
        config = files.get(ADAPTER_CONFIG)
        if config is None:
            raise InvalidArgument(
                f"{name} is not an adapter", fix="restore a whole model with restore or restore_state_dict"
            )
        return StoredAdapter(name, json.loads(config), tensors)

    def check_tensors(self, held: Mapping[str, TensorSpec]) -> None:
        """Refuse tensors that differ from the adapter's in anything other than their dtypes.

        Raises LayoutError, which names them.
        """
        wrong = [f"{name} is missing in the model" for name in self.tensors if name not in held]
        for name, spec in held.items():
            there = self.tensors.get(name)
            if there is None:
                wrong.append(f"{spec}: {self.name} has no such tensor")
            elif there.shape != spec.shape:
                wrong.append(f"{spec}: {self.name} has {there}")
        if wrong:
            raise LayoutError(
                f"the model's adapter differs from {self.name} in {counted(len(wrong), 'tensor')}",
                details=first_lines(wrong),
                fix="give it the rank and the target modules of the version",
            )

    def check_scales(self, modules: Mapping[str, LoraModule]) -> None:
        """Refuse layers that scale their adapters differently from the version.

        Raises LayoutError, which names them.
        """
        kept = {"use_dora": False, "fan_in_fan_out": False, "bias": "none", "lora_bias": False}
        other = [field for field, usual in kept.items() if (self.config.get(field) or usual) != usual]
        if other or self.config.get("peft_type") != "LORA":
            raise LayoutError(
                f"{self.name} is not a plain LoRA, and Megatron-core supports only plain LoRA", details=other
            )
        pattern = self.config.get("alpha_pattern") or {}
        if any(not _PLAIN.fullmatch(each) for each in pattern):
            raise LayoutError(
                f"{self.name} has an alpha_pattern of expressions, which are not executed here",
                fix="train and push it with names of layers in alpha_pattern",
            )
        wrong = []
        for name, module in modules.items():
            rank = self.tensors[f"{PREFIX}{name}.lora_A.weight"].shape[0]
            alpha: float = next(
                (value for each, value in pattern.items() if f".{name}".endswith(f".{each}")),
                self.config["lora_alpha"],
            )
            scale = alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)
            if not math.isclose(scale, module.alpha / module.rank, rel_tol=1e-6):
                wrong.append(f"{name}: {scale:g}, and the model has {module.alpha / module.rank:g}")
        if wrong:
            raise LayoutError(
                f"{self.name} differs in scale from the model's adapter in {counted(len(wrong), 'layer')}",
                details=first_lines(wrong),
                fix="give the model's adapter the version's lora_alpha",
            )


def apart(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors of the same shapes that do not share memory."""
    import torch

    return [torch.empty(each.shape, dtype=each.dtype) for each in tensors]


def fill_shared(layout: Layout, tensors: Sequence[torch.Tensor], filled: Sequence[torch.Tensor]) -> None:
    """Copy transferred tensors to their places. Several shards may have the same place.

    Raises:
        LayoutError: two shards with the same place have different elements (names them). Nothing is changed in this
            case.
    """
    import torch

    first: dict[tuple[object, ...], int] = {}
    unlike: defaultdict[str, list[str]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        place = tensor.data_ptr(), tuple(tensor.shape), tensor.stride()
        before = first.setdefault(place, index)
        if not torch.equal(filled[before], filled[index]):
            name, other = (layout.placements[each].shard.tensor for each in (before, index))
            unlike[name].append(other)
    if unlike:
        raise LayoutError(
            "layers that the model fuses have different adapters in the version, but share one in the model",
            details=first_lines(f"{name} and {', '.join(sorted(set(others)))}" for name, others in unlike.items()),
            fix="restore it into a model with CanonicalLoRA, which has one adapter for each of them",
        )
    with torch.no_grad():
        for index in first.values():
            tensors[index].copy_(filled[index])
