"""Checks of peft adapters: of their config, and of their tensors against those of a base. Pure functions.

The config is data: its regular expressions are limited in length and never executed. Names of peft's LoRA tensors are
``base_model.model.<module>.lora_A.weight``. The check looks up a module among the base's tensors by its whole name. If
there is no match, it uses the name from the first numbered layer on, or the last part of the name if the module is not
in a layer, because transformers names the modules around the layers differently in memory and in files.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from weighbridge._core.layouts import TensorSpec
from weighbridge._core.text.counts import counted, first_lines
from weighbridge._core.text.shortening import shown
from weighbridge.errors import InvalidArgument, LayoutError

MAX_TEXT = 16_384
"""Maximum characters of a string in a config, such as a regular expression of target modules."""
_MOST_PATH = 200
"""Maximum characters of a path in a config. Errors show the end of a longer path."""
_PREFIX = "base_model.model."
_LORA: Mapping[str, tuple[int, int]] = {
    "lora_A": (1, 1),
    "lora_B": (0, 0),
    "lora_embedding_A": (1, 0),
    "lora_embedding_B": (0, 1),
}
"""Names of LoRA tensors, each with one of its axes and the axis of the base's weight that has the same size."""
_EXPERTS = "experts"
"""Modules that some releases of transformers stack in memory and store one by one in files."""
_HEAD = "lm_head"
"""Module whose weight is not a tensor of its own in models that tie it to their embedding."""
_FIX = "name the base that the adapter was trained on"


def check_adapter_config(config: Mapping[str, Any]) -> None:
    """Raise InvalidArgument if a config is not a peft config, or contains strings that are too long or numbers that are
    not finite.
    """
    kind = config.get("peft_type")
    if not isinstance(kind, str) or not kind or len(kind) > 64:
        raise InvalidArgument(
            f"adapter_config.json has the peft_type {shown(kind)}",
            fix="pass the folder that peft's save_pretrained wrote",
        )
    for path, text in _scalars(config, ""):
        if isinstance(text, float) and not math.isfinite(text):
            raise InvalidArgument(
                f"{path} in adapter_config.json is {text}", fix="use a finite number; JSON has no others"
            )
        if isinstance(text, str) and len(text) > MAX_TEXT:
            raise InvalidArgument(
                f"{path} in adapter_config.json has {len(text)} characters, more than {MAX_TEXT}",
                fix="list modules by name, or write a shorter expression",
            )


def _scalars(value: Any, path: str) -> Iterator[tuple[str, str | float]]:
    """All strings and numbers in a JSON value, including keys of objects, each with its path.

    The length of a path is limited: a config of 1 MiB may be a thousand objects deep, with a hundred thousand values at
    that depth.
    """
    waiting = [(path, value)]
    while waiting:
        path, value = waiting.pop()
        match value:
            case str() | float():
                yield path or "a text", value
            case list():
                waiting += ((path, each) for each in value)
            case dict():
                for key, each in value.items():
                    yield f"a key in {path or 'the object'}", key
                    waiting.append((f"{path}.{key[:80]}".lstrip(".")[-_MOST_PATH:], each))


def check_fits(
    adapter: Iterable[TensorSpec], base: Mapping[str, TensorSpec], config: Mapping[str, Any], name: str
) -> None:
    """Raise LayoutError if LoRA tensors belong to modules that the base does not contain or whose sizes differ.

    Other tensors, such as those of a module that is saved whole, are not compared. Neither are modules whose weights
    the base stores in another form.

    Args:
        adapter: the adapter's tensors.
        base: the base's tensors, by name.
        config: config of the adapter.
        name: name of the base in errors.

    Raises:
        LayoutError: names the first modules or tensors.
    """
    known = _Modules(base)
    missing: dict[str, None] = {}
    wrong = []
    transposed = bool(config.get("fan_in_fan_out"))
    for spec in adapter:
        module, part = _module_of(spec.name)
        if not part:
            continue
        weight = known.weight(module)
        if weight is None:
            if not known.may_have(module):
                missing[module] = None
            continue
        own, theirs = _LORA[part]
        if len(spec.shape) != 2 or len(weight.shape) != 2 or not weight.dtype.is_float:
            continue
        wanted = weight.shape if transposed else (weight.shape[theirs],)
        if spec.shape[own] not in wanted:
            wrong.append(f"{spec.name} has the shape {list(spec.shape)}, and {weight.name} {list(weight.shape)}")
    if missing:
        raise LayoutError(
            f"{name} lacks {counted(len(missing), 'module')} of the adapter",
            details=first_lines(missing),
            fix=_FIX,
        )
    if wrong:
        raise LayoutError(
            counted(len(wrong), "tensor of the adapter does", "tensors of the adapter do")
            + f" not fit the weights of {name}",
            details=first_lines(wrong),
            fix=_FIX,
        )


def _module_of(name: str) -> tuple[str, str]:
    """The module that a LoRA tensor changes, and the tensor's name in `_LORA`. Both are empty for other tensors."""
    parts = name.removeprefix(_PREFIX).split(".")
    at = next((i for i, part in enumerate(parts) if part in _LORA), None)
    if at is None or not name.startswith(_PREFIX):
        return "", ""
    return ".".join(part for part in parts[:at] if part != "base_layer"), parts[at]


class _Modules:
    """Modules of a base, by the names of its tensors."""

    def __init__(self, base: Mapping[str, TensorSpec]) -> None:
        self._base = base
        self._modules: set[str] = set()
        self._tails: defaultdict[str, list[TensorSpec]] = defaultdict(list)
        for name, spec in base.items():
            *module, kind = name.split(".")
            self._modules.update(".".join(module[:end]) for end in range(1, len(module) + 1))
            if kind == "weight":
                self._tails[_tail(module)].append(spec)
        self._modules.update([_tail(module.split(".")) for module in self._modules])

    def weight(self, module: str) -> TensorSpec | None:
        """The weight of a module; None if no weight or several weights have its name."""
        alike = self._tails.get(_tail(module.split(".")), [])
        return self._base.get(f"{module}.weight") or (alike[0] if len(alike) == 1 else None)

    def may_have(self, module: str) -> bool:
        """Whether the base may contain the module under other tensor names."""
        parts = module.split(".")
        if module in self._modules or _tail(parts) in self._modules or module == _HEAD:
            return True
        layer = _tail(parts).split(".")[:2]
        return _EXPERTS in parts and ".".join(layer) in self._modules


def _tail(parts: Sequence[str]) -> str:
    """A module's name from its first numbered layer on, such as ``layers.0.mlp``. If it is not in a layer, the last
    part of its name, such as ``embed_tokens``.
    """
    at = next((i for i, part in enumerate(parts) if i and part.isdecimal()), len(parts))
    return ".".join(parts[at - 1 :])
