"""Comparison of a model's tensors with the model that transformers creates from its config, for model types without a
weight map.

The model is created on the meta device from the config's own fields and does not run remote code. If the library's
loader would initialize a tensor anew, the tensor counts as missing, which is an error. If the loader would not load a
tensor, such as one of a layer for multi-token prediction, the tensor is unknown, which is not an error. Models that
transformers does not know, or cannot create within the limits below, are not compared.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from weighbridge._core.block_scales import says_quantized
from weighbridge._core.dtypes import parse
from weighbridge._core.layouts import TensorSpec
from weighbridge._core.text.counts import counted, first_lines
from weighbridge._formats.memory_forms import TensorForms
from weighbridge._formats.naming.parameter_names import head_and_embedding
from weighbridge._formats.torch_state import model_form
from weighbridge.errors import InvalidArgument, WeighbridgeError
from weighbridge_service.families.rules import Shape
from weighbridge_service.families.shapes import file_names, label_count, transformers_config
from weighbridge_service.models.bridges import parse_config

log = logging.getLogger(__name__)

_MOST_MODULES = 50_000
"""Maximum number of modules of a compared model; each takes about 0.1 ms.

The largest models without experts have 5,000.
"""
_MOST_COUNT = 1 << 10
"""Maximum number of layers, blocks and similar units of a compared model."""
_COUNTS = re.compile(r"(^|_)(n_)?(layers?|blocks?|depths?|stages?)$")
_LABELS, _MOST_LABELS = ("num_labels", "num_classes"), 1 << 16
"""Fields from which configs make lists of labels, and the maximum number of labels."""
_BASE_FIELDS = ("is_decoder", "is_encoder_decoder", "add_cross_attention")
"""Fields of all models that affect which tensors exist."""
_RENAMED = (
    (re.compile(r"LayerNorm\.gamma$"), "LayerNorm.weight"),
    (re.compile(r"LayerNorm\.beta$"), "LayerNorm.bias"),
    (re.compile(r"(?<=\.)weight_g$"), "parametrizations.weight.original0"),
    (re.compile(r"(?<=\.)weight_v$"), "parametrizations.weight.original1"),
)
"""Names that transformers changes when it loads the files of any model, each with its new name."""
_FIX = (
    "use the config.json that belongs to the weights, and all of their files; or register the "
    "model by its tensors alone: "
    "weight_map=False, or --no-weight-map"
)
_NAMED = 20
_ANY = parse("bf16")


@dataclass(frozen=True)
class LoaderComparison:
    """Result of the comparison with what transformers' own loader expects.

    Attributes:
        model_class: name of the class of transformers.
        missing: tensors that the loader would initialize anew.
        misshapen: messages about tensors whose shape differs from the model's.
        unknown: tensors that the loader would not load.
        tied: for each tensor that occurs under several names, the group of its names.
    """

    model_class: str
    missing: tuple[str, ...] = ()
    misshapen: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()


Compare = Callable[[bytes, Mapping[str, Shape]], "LoaderComparison | None"]
_comparing: list[Compare] = []
"""Functions that compare; the last one is called. If the list is empty, nothing is compared."""


@contextmanager
def compared_by(compare: Compare) -> Iterator[None]:
    """Let `check_library_model` call a function such as `compare_with_library` while the block runs. Without such a
    function it accepts all tensors.
    """
    _comparing.append(compare)
    try:
        yield
    finally:
        _comparing.remove(compare)


def check_library_model(config_json: bytes, specs: Iterable[TensorSpec], fix: str = _FIX) -> frozenset[str]:
    """Raise InvalidArgument if the tensors do not complete the model that transformers creates from the config. A
    warning in the log names the tensors that transformers would not load.

    Args:
        config_json: the model's ``config.json``.
        specs: all of its tensors.
        fix: the fix in the error.

    Returns:
        The output head, if the tensors contain it in addition to the embedding that the class ties it to. The model
        then does not contain such a tensor, and a pushed one is compared with the embedding.

    Raises:
        InvalidArgument: tensors are missing, or have another shape. The error names each.
    """
    shapes = {spec.name: spec.shape for spec in specs}
    found = _comparing[-1](config_json, shapes) if _comparing else None
    if found is None:
        return frozenset()
    problems = [*(f"{name} is missing" for name in found.missing), *found.misshapen]
    if problems:
        raise InvalidArgument(
            (
                f"the tensors are not those of a {found.model_class}, which config.json describes, "
                f"in {counted(len(problems), 'tensor')}"
            ),
            details=first_lines(problems),
            fix=fix,
        )
    if found.unknown:
        log.warning(
            "kept, although a %s of transformers does not have %s: %s",
            found.model_class,
            counted(len(found.unknown), "tensor"),
            ", ".join(found.unknown[:_NAMED]),
        )
    pair = head_and_embedding(shapes)
    ties = pair is not None and any(set(pair) <= set(each) for each in found.tied)
    return frozenset(pair[:1] if pair is not None and ties else ())


def compare_with_library(config_json: bytes, shapes: Mapping[str, Shape]) -> LoaderComparison | None:
    """Compare tensors with transformers' model of a config. Returns None if transformers has no model for it, or if the
    model cannot be compared.

    The first call in a process takes seconds, because it imports transformers.

    Args:
        config_json: the config.
        shapes: shapes of the tensors, by name.
    """
    config = parse_config(config_json)
    try:
        if says_quantized(config) or not _within_bounds(config):
            return None
        model = _library_model(config)
        return None if model is None else _compared(model, shapes)
    except WeighbridgeError as error:
        log.info("not compared with transformers' model: %s", error)
    except Exception as error:  # transformers may raise any error for a value
        log.info("not compared with transformers' model: %s: %s", type(error).__name__, error)
    return None


def _within_bounds(config: Any) -> bool:
    """Whether the counts of layers and labels, from which configs make lists, are small."""
    if isinstance(config, Mapping):
        return all(_within_bounds(value) and _sum(value) <= _most_of(str(name)) for name, value in config.items())
    return not isinstance(config, list) or all(_within_bounds(each) for each in config)


def _most_of(field: str) -> float:
    """Largest sum of counts that a field of a config may have; infinite if the field is not a count."""
    if field in _LABELS:
        return _MOST_LABELS
    return _MOST_COUNT if _COUNTS.search(field) else math.inf


def _sum(value: Any) -> int:
    """A count, or the sum of a list of counts, such as one per stage of a model; 0 for other values."""
    if isinstance(value, list):
        return sum(map(_sum, value))
    return value if type(value) is int and value > 0 else 0


def _library_model(config: Mapping[str, Any]) -> Any:
    """transformers' model without memory for its weights; None if transformers has no class for the config. Raises an
    error if it has too many modules.
    """
    import torch
    import transformers

    from weighbridge_service.families.unfilled import Unfilled

    model_type, architectures = config.get("model_type"), config.get("architectures")
    found: Any = None
    if not isinstance(model_type, str) or model_type not in transformers.CONFIG_MAPPING:
        return None
    made = transformers_config(model_type, config, any_parts=True)
    if architectures:
        found = getattr(transformers, str(architectures[0]), None)
    else:  # the base model; all classes of the type contain its tensors
        found = transformers.MODEL_MAPPING.get(type(made), None)
    if not _is_model_class(found) or not isinstance(made, found.config_class or ()):
        return None
    for name in _BASE_FIELDS:
        if isinstance(config.get(name), bool):
            setattr(made, name, config[name])
    labels = label_count(config) or len(config.get("id2label") or ())
    if labels:
        made.num_labels = labels
    with torch.device("meta"), Unfilled(), _few_modules():
        return found._from_config(made)


def _is_model_class(found: Any) -> bool:
    import transformers

    return isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)


class _TooManyModules(Exception):
    """Raised if a model has more than `_MOST_MODULES` modules."""


@contextmanager
def _few_modules() -> Iterator[None]:
    from torch.nn.modules.module import register_module_module_registration_hook

    left = iter(range(_MOST_MODULES))

    def count(*_: Any) -> None:
        if next(left, None) is None:
            raise _TooManyModules(f"more than {_MOST_MODULES} modules")

    handle = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def _compared(model: Any, shapes: Mapping[str, Shape]) -> LoaderComparison:
    in_files, tensors = file_names(model), model.state_dict(keep_vars=True)
    firsts: dict[int, str] = {}
    also: dict[str, tuple[str, ...]] = {}
    for name, tensor in tensors.items():  # a tied tensor has several names, in memory and in files
        first = firsts.setdefault(id(tensor), name)
        also[name] = tuple(in_files[first])
    known = TensorForms({name: TensorSpec(name, _ANY, shape) for of in in_files.values() for name, shape in of.items()})
    own, covered = _own_names(model, tensors, shapes), set[str]()
    unknown, misshapen = [], []
    for name, candidates in own.items():
        form = next((form for each in candidates if (form := model_form(each, known)) is not None), None)
        if form is not None:
            covered.update(form.tensors)
            if shapes[name] != form.shape and not form.is_swapped(shapes[name]):
                misshapen.append(f"{name} has the shape {list(shapes[name])}: the model has {list(form.shape)}")
        elif (alias := next((each for each in candidates if each in also), None)) is not None:
            covered.update(also[alias])
        else:
            unknown.append(name)
    by_memory: dict[str, list[str]] = {}
    for name, candidates in own.items():
        here = next((each for each in candidates if each in also), None)
        if here is not None:
            by_memory.setdefault(firsts[id(tensors[here])], []).append(name)
    tied = tuple(tuple(names) for names in by_memory.values() if len(names) > 1)
    patterns = [re.compile(each) for each in model._keys_to_ignore_on_load_missing or ()]
    missing = [
        name
        for first, names in in_files.items()
        if tensors[first].dtype.is_floating_point and not any(pattern.search(first) for pattern in patterns)
        for name in names
        if name not in covered
    ]
    return LoaderComparison(type(model).__name__, tuple(missing), tuple(misshapen), tuple(unknown), tied)


def _own_names(model: Any, tensors: Iterable[str], given: Iterable[str]) -> Mapping[str, Sequence[str]]:
    """Names under which the model may contain each tensor. transformers renames some tensors, and loads models with a
    head from files without one, and vice versa.
    """
    prefix = f"{model.base_model_prefix}."
    given = list(given)
    has = any(name.startswith(prefix) for name in given)
    wants = any(name.startswith(prefix) for name in tensors)
    mapping = [
        (re.compile(there), here)
        for there, here in (getattr(model, "_checkpoint_conversion_mapping", None) or {}).items()
    ]
    found: dict[str, list[str]] = {}
    for name in given:
        names = [name]
        for pattern, here in (*_RENAMED, *mapping):
            names += [pattern.sub(here, each) for each in names if pattern.search(each)]
        if wants and not has:
            names += [prefix + each for each in names]
        elif has and not wants:
            names += [each.removeprefix(prefix) for each in names if each.startswith(prefix)]
        found[name] = names
    return found
