"""Families of models that have a weight map, looked up by ``model_type``. Each family is one file. Other packages can
add families by entry points.

May import: `weighbridge.errors`, and nothing from the service.

- `family`: the base class of families.
- `rules`: rules that relate tensors of Megatron-core and Hugging Face.
- `shapes`: tensor shapes from a model's config.
- `unfilled`: creation of models without values.
- `decoders`: rules of a typical decoder.
- `from_mbridge`: families that use mbridge's tables.
- `dense`: llama, qwen2, qwen3.
- `moe`: mixtral, qwen2_moe, qwen3_moe.
- `deepseek_v3`: deepseek_v3, kimi_k2, deepseek_v32.
- `glm4_moe`: glm4_moe, glm4v_moe.
- `ernie4_5_moe`: ernie4_5_moe.
- `minimax_m2`: minimax_m2.
- `qwen3_next`: qwen3_next.
- `nemotron_h`: nemotron_h.
- `mimo`: mimo.
- `gemma3`: gemma3, gemma3_text.
- `qwen2_5_vl`: qwen2_5_vl.
- `qwen3_vl`: qwen3_vl, qwen3_vl_moe.
- `gpt_oss`: gpt_oss.
- `llama4`: llama4, llama4_text.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from weighbridge.errors import FailedPrecondition, InvalidArgument
from weighbridge_service.families.family import Family
from weighbridge_service.families.rules import Rule

GROUP = "weighbridge.families"
"""Entry points of this group name a `Family` for a ``model_type``."""

_DISTRIBUTION = "weighbridge"
_BUILT_IN = {
    "llama": "dense:Llama",
    "qwen2": "dense:Qwen2",
    "qwen3": "dense:Qwen3",
    "mixtral": "moe:Mixtral",
    "qwen2_moe": "moe:Qwen2Moe",
    "qwen3_moe": "moe:Qwen3Moe",
    "deepseek_v3": "deepseek_v3:DeepseekV3",
    "kimi_k2": "deepseek_v3:DeepseekV3",
    "deepseek_v32": "deepseek_v3:DeepseekV32",
    "glm4_moe": "glm4_moe:Glm4Moe",
    "glm4v_moe": "glm4_moe:Glm4vMoe",
    "ernie4_5_moe": "ernie4_5_moe:Ernie45Moe",
    "minimax_m2": "minimax_m2:MinimaxM2",
    "qwen3_next": "qwen3_next:Qwen3Next",
    "nemotron_h": "nemotron_h:NemotronH",
    "mimo": "mimo:Mimo",
    "gemma3": "gemma3:Gemma3",
    "gemma3_text": "gemma3:Gemma3Text",
    "qwen2_5_vl": "qwen2_5_vl:Qwen25VL",
    "qwen3_vl": "qwen3_vl:Qwen3VL",
    "qwen3_vl_moe": "qwen3_vl:Qwen3VLMoe",
    "gpt_oss": "gpt_oss:GptOss",
    "llama4_text": "llama4:Llama4",
    "llama4": "llama4:Llama4",
}
"""Modules of this package and their classes, by ``model_type``. This is a table because entry points exist only if
Weighbridge is installed.
"""

__all__ = ["GROUP", "Family", "Rule", "family_of", "has_weight_map", "model_types", "no_weight_map"]


@functools.cache
def _registered() -> Mapping[str, metadata.EntryPoint]:
    found = {
        model_type: metadata.EntryPoint(model_type, f"{__name__}.{where}", GROUP)
        for model_type, where in _BUILT_IN.items()
    }
    for entry in metadata.entry_points(group=GROUP):
        if entry.dist is not None and entry.dist.name == _DISTRIBUTION:
            continue  # an installed release in addition to the running code, such as in a source tree
        there = found.setdefault(entry.name, entry)
        if there.value != entry.value:  # an editable installation may be listed twice
            raise FailedPrecondition(
                f"two packages provide a family for the model type {entry.name!r}: {there.value} and {entry.value}",
                fix="uninstall one of them",
            )
    return found


def model_types() -> list[str]:
    """Model types with a weight map, sorted."""
    return sorted(_registered())


def has_weight_map(config: Mapping[str, Any]) -> bool:
    """Whether a family exists for a config's model type. Does not import it."""
    model_type = config.get("model_type")
    return isinstance(model_type, str) and model_type in _registered()


def no_weight_map(model_type: object, problem: str = "", fix: str = "") -> InvalidArgument:
    """The error for a model type without a weight map. It lists the model types with a weight map.

    Args:
        model_type: model type of the config.
        problem: consequence that is appended to the message.
        fix: remedy; by default, to add a weight map.
    """
    return InvalidArgument(
        f"there is no weight map for the model type {str(model_type)[:80]!r}{problem}",
        details=[f"model types that have one: {', '.join(model_types())}"],
        fix=fix
        or "a package can provide one, see docs/families.md; Hugging Face's names need none, see docs/models.md",
    )


def family_of(config: Mapping[str, Any]) -> type[Family]:
    """The family of a config.

    Raises:
        InvalidArgument: no family exists for its model type. The error lists the model types with a family.
        FailedPrecondition: the family cannot be imported or is not a `Family`, or two packages define a family for the
            model type.
    """
    model_type = config.get("model_type")
    entry = _registered().get(model_type) if isinstance(model_type, str) else None
    if entry is None:
        raise no_weight_map(model_type)
    try:
        found = entry.load()
    except Exception as error:
        raise FailedPrecondition(
            f"the family for {model_type}, {entry.value}, cannot be imported: {type(error).__name__}: {error}"[:500],
            fix="fix or uninstall the package that provides it",
        ) from error
    if not (isinstance(found, type) and issubclass(found, Family)):
        raise FailedPrecondition(f"the family for {model_type}, {entry.value}, is not a class derived from Family")
    return found
