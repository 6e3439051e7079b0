"""Which tensors transformers' model of a config has: found by making it without memory."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from weighbridge.errors import InvalidArgument

_LARGEST = {
    # far above any model there is: what is larger would only eat the service's memory
    "num_hidden_layers": 1 << 9,
    "num_layers": 1 << 10,
    "depth": 1 << 10,
    "num_nextn_predict_layers": 1 << 6,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "intermediate_size_mlp": 1 << 22,
    "moe_intermediate_size": 1 << 22,
    "shared_expert_intermediate_size": 1 << 22,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
    "vocab_size": 1 << 24,
    "num_local_experts": 1 << 14,
    "num_experts": 1 << 14,
    "n_routed_experts": 1 << 14,
    "n_shared_experts": 1 << 10,
}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_MOST_EXPERTS_IN_ALL = 50_000
"""Over all layers; the largest model there is has 23,000, and each means three tensors or more."""
_MAY_BE_ZERO = ("num_nextn_predict_layers", "n_shared_experts")
_FURTHER_FIELDS = ("head_dim", "tie_word_embeddings", "vision_use_head")
"""Fields that have a say in which tensors there are and that transformers reads without naming them."""
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_SIZES = ("_dim", "_size", "_rank", "_heads", "_layers", "_experts", "_groups")
_MOST_LABELS = 1 << 16
_HEADS = ("ForTokenClassification", "ForSequenceClassification")
"""What the names of architectures with a value or reward head end with."""


def transformers_config(model_type: str, config: Mapping[str, Any]) -> Any:
    """A transformers config with nothing but the family's own fields.

    Others name code to run (``auto_map``, ``attn_implementation``), replace methods, or make transformers fill memory, and
    none of them has a say in the weights.

    Raises:
        InvalidArgument: names the field that is out of bounds.
    """
    import transformers

    made = transformers.CONFIG_MAPPING[model_type](
        **_own_fields(transformers.CONFIG_MAPPING[model_type], config)
    )
    _check_experts(getattr(made, "text_config", made), config.get("num_nextn_predict_layers") or 0)
    return made


def _own_fields(cls: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    _check_sizes(config)
    parameters = inspect.signature(cls.__init__).parameters.values()
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"]
    fields = {name: config[name] for name in [*names, *_FURTHER_FIELDS] if name in config}
    for name, nested in cls.sub_configs.items():
        if isinstance(fields.get(name), Mapping):
            fields[name] = _own_fields(nested, fields[name])
    return fields


def _check_sizes(config: Mapping[str, Any]) -> None:
    """Refuse sizes that no model has, before anything is made of them."""
    for name, value in config.items():
        if name.endswith(_SIZES) and type(value) is int and value < 0:
            raise InvalidArgument(f"config.json has {name} = {value}, which is negative")
    for name, largest in _LARGEST.items():
        value = config.get(name)
        smallest = 0 if name in _MAY_BE_ZERO else 1
        if value is not None and (type(value) is not int or not smallest <= value <= largest):
            raise InvalidArgument(
                f"config.json has {name} = {repr(value)[:40]}, not an integer from {smallest} to {largest}"
            )


def _check_experts(text_config: Any, further_layers: int) -> None:
    """Refuse more experts than fit into memory as names."""
    layers = getattr(text_config, "num_hidden_layers", 0) + further_layers
    for name in _EXPERTS:
        experts = getattr(text_config, name, None) or 0
        if layers * experts > _MOST_EXPERTS_IN_ALL:
            raise InvalidArgument(
                f"config.json has {layers} layers with {experts} experts each, more than {_MOST_EXPERTS_IN_ALL} in all"
            )


def label_count(config: Mapping[str, Any]) -> int | None:
    """Outputs of the model's value or reward head; None if it is a language model."""
    architectures = config.get("architectures") or [""]
    if not str(architectures[0]).endswith(_HEADS):
        return None
    labels = config.get("id2label")
    return len(labels) if isinstance(labels, Mapping) else int(config.get("num_labels", 2))


def meta_model(transformers_config: Any, config: Mapping[str, Any]) -> Any:
    """The model that ``architectures`` names, or else the one that generates text, without memory for its weights."""
    import torch
    import transformers

    made = copy.deepcopy(transformers_config)
    labels = label_count(config)
    if labels is not None:
        if not 1 <= labels <= _MOST_LABELS:
            raise InvalidArgument(f"config.json asks for {labels} labels")
        made.num_labels = labels
        kind = next(head for head in _HEADS if str(config["architectures"][0]).endswith(head))
        auto = getattr(transformers, f"AutoModel{kind}")
    elif type(made) in transformers.AutoModelForImageTextToText._model_mapping:
        auto = transformers.AutoModelForImageTextToText
    else:
        auto = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(made)


def shapes_of(model: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of a model's tensors by the names they have in files, in the order of the state dict, tied ones once."""
    seen: set[int] = set()
    shapes = {}
    on_disk = names_on_disk(model)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            shapes[on_disk(name)] = tuple(tensor.shape)
    return shapes


def names_on_disk(model: Any) -> Callable[[str], str]:
    """From names in a model to names in files: transformers renames tensors of some models when it loads and saves them."""
    renamed = [
        (re.compile(re.sub(r"\(.*\)", "", new.lstrip("^"))), re.sub(r"\(.*\)", "", old.lstrip("^")))
        for old, new in (getattr(model, "_checkpoint_conversion_mapping", None) or {}).items()
    ]

    def back(name: str) -> str:
        for pattern, old in renamed:
            found = pattern.match(name)
            if found:
                return old + name[found.end() :]
        return name

    return back


def with_all_experts(
    two: Mapping[str, tuple[int, ...]], three: Mapping[str, tuple[int, ...]], experts: int
) -> dict[str, tuple[int, ...]]:
    """The tensors of a model with many experts, from those of the same model with two and with three.

    Making thousands of modules takes transformers half a minute; one more expert shows what is counted by them.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    waiting: list[tuple[str, tuple[int, ...]]] = []
    for name, shape in two.items():
        found = _EXPERT.search(name)
        if found is None or found[1] != "0":
            shapes |= _of_all(waiting, experts)
            waiting = []
        if found is None:
            shapes[name] = tuple(
                experts if (a, b) == (2, 3) else a for a, b in zip(shape, three[name], strict=True)
            )
        elif found[1] == "0":
            waiting.append((name, shape))
    return shapes | dict(_of_all(waiting, experts))


def _of_all(first: list[tuple[str, tuple[int, ...]]], experts: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for expert in range(experts if first else 0):
        for name, shape in first:
            yield _EXPERT.sub(f".experts.{expert}.", name, count=1), shape
