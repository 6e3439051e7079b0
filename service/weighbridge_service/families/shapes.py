"""Shapes of the tensors of transformers' model for a config. The model is created without memory for weights.

transformers 5 stacks the experts of a layer and renames some modules, but only in memory: its files use the names of
transformers 4. So this module uses the names and the order of files with either release.
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
    # far above any existing model; larger values would only exhaust the service's memory
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
"""Maximum number of experts in all layers.

The largest known model has 23,000, and each expert has three tensors or more.
"""
_MAY_BE_ZERO = ("num_nextn_predict_layers", "n_shared_experts", "moe_num_shared_experts")
_FURTHER_FIELDS = ("head_dim", "tie_word_embeddings", "vision_use_head", "full_attention_interval")
"""Fields that determine tensors and that transformers reads although they are not parameters of its config classes."""
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_OF_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(\w+)\.\w+$")
_ORDER = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Order of an expert's projections in files."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_STYLES = {"colwise_gather_output": "colwise", "packed_colwise": "colwise"}
"""Styles of transformers 5 that split weights like an older style.

They differ in the handling of activations, or in stacked projections.
"""
_SIZES = ("_dim", "_size", "_rank", "_heads", "_layers", "_experts", "_groups")
_MOST_LABELS = 1 << 16
_HEADS = ("ForTokenClassification", "ForSequenceClassification")
"""Suffixes of the names of architectures with a value or reward head."""


def transformers_config(model_type: str, config: Mapping[str, Any], *, any_parts: bool = False) -> Any:
    """A transformers config with only the fields of its class.

    Other fields name code to execute (``auto_map``, ``attn_implementation``), replace methods, or make transformers
    allocate memory. None of them affects the weights.

    Args:
        model_type: model type of the config class.
        config: content of ``config.json``.
        any_parts: whether nested configs get the types that they name, if the config class accepts any type. By default
            they get the default types of the config class.

    Raises:
        InvalidArgument: a field is out of range. The error names it.
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
            if not _field_names(nested):  # the class accepts any config
                model_type = fields[name].get("model_type")
                if any_parts and model_type in transformers.CONFIG_MAPPING:
                    nested, named = transformers.CONFIG_MAPPING[model_type], {"model_type": model_type}
                else:  # the default type, regardless of the type in the file
                    default = default or cls()
                    nested = type(getattr(default, name))
            fields[name] = {**_own_fields(nested, fields[name], any_parts), **named}
    return fields


def _field_names(cls: Any) -> list[str]:
    """Names of the fields that a config class adds to those of all models."""
    fields = getattr(cls, "__dataclass_fields__", None)
    if fields is None:  # transformers 4
        parameters = inspect.signature(cls.__init__).parameters.values()
        return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"]
    import transformers

    of_all = transformers.PreTrainedConfig.__dataclass_fields__
    return [*(name for name in fields if name not in of_all), *cls.attribute_map, *cls.attribute_map.values()]


def _check_sizes(config: Mapping[str, Any]) -> None:
    """Raise InvalidArgument for sizes larger than any model's, before memory is allocated for them."""
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
    """Reject more experts than `_MOST_EXPERTS_IN_ALL`, whose names alone would fill the memory.

    Raises:
        InvalidArgument: all layers together have too many experts.
    """
    if layers * experts > _MOST_EXPERTS_IN_ALL:
        raise InvalidArgument(
            f"config.json has {layers} layers with {experts} experts each, more than {_MOST_EXPERTS_IN_ALL} in all"
        )


def label_count(config: Mapping[str, Any]) -> int | None:
    """Number of outputs of the model's value or reward head; None if the model has neither."""
    architectures = config.get("architectures") or [""]
    if not str(architectures[0]).endswith(_HEADS):
        return None
    labels = config.get("id2label")
    return len(labels) if isinstance(labels, Mapping) else int(config.get("num_labels", 2))


def meta_model(transformers_config: Any, config: Mapping[str, Any]) -> Any:
    """Create the model without memory for its weights.

    It gets the head that ``architectures`` names, or else the head that generates text.

    Raises:
        InvalidArgument: the number of labels is out of range.
    """
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
    """Shapes of a model's tensors by their names in files, in the order of the state dict. Tied tensors appear once."""
    in_files = [item for of_tensor in file_names(model).values() for item in of_tensor.items()]
    shapes: dict[str, tuple[int, ...]] = {}
    for _, run in itertools.groupby(in_files, lambda item: _expert(item[0])[0]):
        shapes |= sorted(run, key=lambda item: _expert(item[0]))
    return shapes


def _expert(name: str) -> tuple[str, int, int]:
    """Sort key of an expert's tensor: the module of the experts, the expert's number, and the order of its projections;
    empty for other tensors.
    """
    found = _OF_EXPERT.match(name)
    if found is None or found[3] not in _ORDER:
        return "", 0, 0
    return found[1], int(found[2]), _ORDER.index(found[3])


def parallel_plan_of(model: Any) -> dict[str, str]:
    """transformers' tensor-parallel plan of a model: names of modules in files, with ``*`` for numbers, to ``colwise``,
    ``rowwise`` and others.
    """
    plan = {**model.tp_plan, **(type(model)._tp_plan or {})}
    patterns = [
        (re.compile(re.escape(module).replace(r"\*", r"\d+")), style) for module, style in reversed(plan.items())
    ]

    def style_of(name: str) -> str | None:
        return next((style for pattern, style in patterns if pattern.fullmatch(name)), None)

    found: dict[str, str] = {}
    for name, in_files in file_names(model).items():
        # plans list stacked tensors under their own names, like modules
        stacked = None if name in in_files else style_of(name)
        style = stacked or style_of(name.rpartition(".")[0])
        if style is not None:
            found |= dict.fromkeys((_module_kind(name) for name in in_files), _STYLES.get(style, style))
    return found


def _module_kind(name: str) -> str:
    return _NUMBER.sub("*", name).rpartition(".")[0]


def file_names(model: Any) -> dict[str, dict[str, tuple[int, ...]]]:
    """Names and shapes in files of each tensor of a model, by its name in memory.

    Only the first of several tied tensors is included.
    """
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
    """A function from names in a model to names in files. transformers renames tensors of some models when it loads and
    saves them.
    """
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
    """Shapes of a model with many experts, from the shapes of the same model with two and with three experts.

    Creating thousands of modules takes transformers half a minute. The difference between two and three experts shows
    the sizes that depend on their number.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    waiting: list[tuple[str, tuple[int, ...]]] = []
    for name, shape in two.items():
        found = _EXPERT.search(name)
        if found is None or found[1] != "0":
            shapes |= _of_all(waiting, experts)
            waiting = []
        if found is None:
            shapes[name] = tuple(experts if (a, b) == (2, 3) else a for a, b in zip(shape, three[name], strict=True))
        elif found[1] == "0":
            waiting.append((name, shape))
    return shapes | dict(_of_all(waiting, experts))


def _of_all(first: list[tuple[str, tuple[int, ...]]], experts: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for expert in range(experts if first else 0):
        for name, shape in first:
            yield _EXPERT.sub(f".experts.{expert}.", name, count=1), shape
