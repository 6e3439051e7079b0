"""Shapes of the tensors of transformers' model of a config, which is made without memory.

transformers 5 stacks the experts of a layer, and names some modules otherwise, in memory alone: what it saves has the names of
transformers 4. So names and their order are here those of files, whichever of the two is installed.
"""

from __future__ import annotations

import copy
import inspect
import itertools
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
    "mamba_num_heads": 1 << 14,
    "mamba_head_dim": 1 << 14,
    "n_groups": 1 << 14,
    "ssm_state_size": 1 << 14,
    "conv_kernel": 1 << 10,
    "moe_shared_expert_intermediate_size": 1 << 22,
    "moe_latent_size": 1 << 20,
    "linear_num_key_heads": 1 << 14,
    "linear_num_value_heads": 1 << 14,
    "linear_key_head_dim": 1 << 14,
    "linear_value_head_dim": 1 << 14,
    "linear_conv_kernel_dim": 1 << 10,
    "index_n_heads": 1 << 14,
    "index_head_dim": 1 << 14,
    "vocab_size": 1 << 24,
    "num_local_experts": 1 << 14,
    "num_experts": 1 << 14,
    "n_routed_experts": 1 << 14,
    "moe_num_experts": 1 << 14,
    "n_shared_experts": 1 << 10,
    "moe_num_shared_experts": 1 << 10,
}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_MOST_EXPERTS_IN_ALL = 50_000
"""Over all layers; the largest model there is has 23,000, and each means three tensors or more."""
_MAY_BE_ZERO = ("num_nextn_predict_layers", "n_shared_experts", "moe_num_shared_experts")
_FURTHER_FIELDS = ("head_dim", "tie_word_embeddings", "vision_use_head", "full_attention_interval")
"""Fields that have a say in which tensors there are and that transformers reads without naming them."""
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_OF_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(\w+)\.\w+$")
_ORDER = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Of an expert's projections in files."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_STYLES = {"colwise_gather_output": "colwise", "packed_colwise": "colwise"}
"""Words of transformers 5 for cuts of one projection; they add what becomes of activations, or that two of them are stacked."""
_SIZES = ("_dim", "_size", "_rank", "_heads", "_layers", "_experts", "_groups")
_MOST_LABELS = 1 << 16
_HEADS = ("ForTokenClassification", "ForSequenceClassification")
"""What the names of architectures with a value or reward head end with."""


def transformers_config(model_type: str, config: Mapping[str, Any], *, any_parts: bool = False) -> Any:
    """A transformers config with nothing but the family's own fields.

    Others name code to run (``auto_map``, ``attn_implementation``), replace methods, or make transformers fill memory, and
    none of them has a say in the weights.

    Args:
        model_type: which config.
        config: content of ``config.json``.
        any_parts: whether configs within it are of the types that they name, where a family takes any; by default they are those that
            the family has unless it is told otherwise.

    Raises:
        InvalidArgument: names the field that is out of bounds.
    """
    import transformers

    made = transformers.CONFIG_MAPPING[model_type](
        **_own_fields(transformers.CONFIG_MAPPING[model_type], config, any_parts)
    )
    _check_experts_of(getattr(made, "text_config", made), config.get("num_nextn_predict_layers") or 0)
    return made


def _own_fields(cls: Any, config: Mapping[str, Any], any_parts: bool) -> dict[str, Any]:
    import transformers

    _check_sizes(config)
    fields = {name: config[name] for name in [*_field_names(cls), *_FURTHER_FIELDS] if name in config}
    default = None
    for name, nested in cls.sub_configs.items():
        if isinstance(fields.get(name), Mapping):
            named: dict[str, Any] = {}
            if not _field_names(nested):  # any config
                model_type = fields[name].get("model_type")
                if any_parts and model_type in transformers.CONFIG_MAPPING:
                    nested, named = transformers.CONFIG_MAPPING[model_type], {"model_type": model_type}
                else:  # the family's own, whatever a file asks for
                    default = default or cls()
                    nested = type(getattr(default, name))
            fields[name] = {**_own_fields(nested, fields[name], any_parts), **named}
    return fields


def _field_names(cls: Any) -> list[str]:
    """What a class of configs adds to those of all models."""
    fields = getattr(cls, "__dataclass_fields__", None)
    if fields is None:  # transformers 4
        parameters = inspect.signature(cls.__init__).parameters.values()
        return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"]
    import transformers

    of_all = transformers.PreTrainedConfig.__dataclass_fields__
    return [*(name for name in fields if name not in of_all), *cls.attribute_map, *cls.attribute_map.values()]


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


def _check_experts_of(text_config: Any, further_layers: int) -> None:
    layers = getattr(text_config, "num_hidden_layers", 0) + further_layers
    for name in _EXPERTS:
        check_experts(layers, getattr(text_config, name, None) or 0)


def check_experts(layers: int, experts: int) -> None:
    """Refuse more experts than fit into memory as names.

    Raises:
        InvalidArgument: so many layers would have so many experts each.
    """
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

    from weighbridge_service.families.unfilled import Unfilled

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
    with torch.device("meta"), Unfilled():
        return auto.from_config(made)


def shapes_of(model: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of a model's tensors by the names they have in files, in the order of the state dict, tied ones once."""
    in_files = [item for of_tensor in file_names(model).values() for item in of_tensor.items()]
    shapes: dict[str, tuple[int, ...]] = {}
    for _, run in itertools.groupby(in_files, lambda item: _expert(item[0])[0]):
        shapes |= sorted(run, key=lambda item: _expert(item[0]))
    return shapes


def _expert(name: str) -> tuple[str, int, int]:
    """Where a tensor's experts are, which of them it belongs to, and its place in that one; empty if it belongs to none."""
    found = _OF_EXPERT.match(name)
    if found is None or found[3] not in _ORDER:
        return "", 0, 0
    return found[1], int(found[2]), _ORDER.index(found[3])


def parallel_plan_of(model: Any) -> dict[str, str]:
    """transformers' plan for a model: modules by their names in files, with ``*`` for numbers, to ``colwise``, ``rowwise`` and others."""
    plan = {**model.tp_plan, **(type(model)._tp_plan or {})}
    patterns = [
        (re.compile(re.escape(module).replace(r"\*", r"\d+")), style)
        for module, style in reversed(plan.items())
    ]

    def style_of(name: str) -> str | None:
        return next((style for pattern, style in patterns if pattern.fullmatch(name)), None)

    found: dict[str, str] = {}
    for name, in_files in file_names(model).items():
        # what is stacked is spoken of as a module would be
        stacked = None if name in in_files else style_of(name)
        style = stacked or style_of(name.rpartition(".")[0])
        if style is not None:
            found |= dict.fromkeys((_module_kind(name) for name in in_files), _STYLES.get(style, style))
    return found


def _module_kind(name: str) -> str:
    return _NUMBER.sub("*", name).rpartition(".")[0]


def file_names(model: Any) -> dict[str, dict[str, tuple[int, ...]]]:
    """The tensors of a model by their names in memory, each with what it is in files: names and shapes. Of tied tensors the first is there."""
    seen: set[int] = set()
    tensors = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ModuleNotFoundError:  # transformers 4
        on_disk = names_on_disk(model)
        return {name: {on_disk(name): tuple(tensor.shape)} for name, tensor in tensors.items()}

    by_kind: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        by_kind.setdefault(_NUMBER.sub("*", name), {})[name] = tensor
    found: dict[str, dict[str, tuple[int, ...]]] = {name: {} for name in tensors}
    for kind, of_kind in by_kind.items():
        numbers = {tuple(_NUMBER.findall(name)): name for name in of_kind}
        depth = kind.count("*")
        for name, tensor in revert_weight_conversion(model, of_kind).items():
            origin = numbers[tuple(_NUMBER.findall(name))[:depth]]
            found[origin][name] = tuple(tensor.shape)
    return found


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
