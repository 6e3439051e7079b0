"""Bridge of a model: its tensors on both sides, as its family defines them, and the links between their elements."""

from __future__ import annotations

import functools
import json
import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from weighbridge._core.boxes import Box, Link
from weighbridge._core.text.counts import counted
from weighbridge.errors import InvalidArgument, LayoutError, WeighbridgeError
from weighbridge_service.families import Family, Rule, family_of
from weighbridge_service.families.rules import WHOLE, Shape

_FIELD = re.compile(r"\{(layer|expert)(?:\+(\d+))?\}")
_INDEXED = re.compile(r"^(.+)\[(.+)\]$")
_LONGEST_AXIS = 1 << 24
_MOST_ELEMENTS, _MOST_IN_HALVES = 1 << 30, 1 << 32
"""Maximum number of elements of a tensor that a conversion rearranges, and of a tensor that it only splits in halves or
that belongs to the vocabulary. Tracing uses 4 bytes for each element that is rearranged. The largest known tensors are
those of Llama 3.1 405B: its projections have 3 * 10^8 elements, its MLP 2 * 10^9.
"""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_SAME_NORM = (
    # the norm before the MLP: the Transformer Engine spec fuses it into dense layers only; the local spec uses this
    # name in layers with experts as well
    (".mlp.linear_fc1.layer_norm_weight", ".pre_mlp_layernorm.weight"),
    (".self_attention.q_layernorm.weight", ".self_attention.linear_q_up_proj.layer_norm_weight"),
    (".self_attention.kv_layernorm.weight", ".self_attention.linear_kv_up_proj.layer_norm_weight"),
    (".self_attention.linear_qkv.layer_norm_weight", ".input_layernorm.weight"),
    (".self_attention.in_proj.layer_norm_weight", ".input_layernorm.weight"),
    (".mixer.in_proj.layer_norm_weight", ".norm.weight"),
    (".final_norm.weight", ".final_layernorm.weight"),
)
"""Names that different layer specs of Megatron-core give to one tensor."""
_MOST_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Target:
    """Hugging Face tensor, or one index of its first axis.

    Attributes:
        name: name of the tensor.
        leading: the index; empty for the whole tensor.
    """

    name: str
    leading: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MegatronTensor:
    """Megatron-core tensor of one layer and expert.

    Attributes:
        name: its name in the Transformer Engine layer spec.
        rule: the family's rule for its kind of tensor.
        targets: the Hugging Face tensors that it becomes.
        shape: its shape, without padding.
    """

    name: str
    rule: Rule
    targets: tuple[Target, ...]
    shape: Shape

    def declared(self) -> Sequence[tuple[str, Box]]:
        """Names of the tensors that trainers declare for it, each with its part of this tensor: the whole tensor, or
        one of its sections.
        """
        if not self.rule.sections:
            return [(self.name, Box.whole(self.shape))]
        rest, first = self.shape[1:], 0
        found = []
        for section in self.rule.sections:
            box = Box((first, *(0 for _ in rest)), (section.rows, *rest))
            found.append((f"{self.name}.{section.name}", box))
            first += section.rows
        return found


class Bridge:
    """Description of a model by its family, without weights.

    Args:
        family: the family, with the model's config.
        absent: optional parts that the model lacks.

    Attributes:
        model_type: model type in the config.
        hugging_face: shapes of the model's tensors in the order of their files; tied tensors appear once.
        megatron: Megatron-core's tensors, by their names with a key for each layer and expert.
        num_layers: number of decoder layers.
        vocab_size: rows of the embedding, without padding.
        experts: routed experts in a layer; 0 if there are none.
        parts: Hugging Face tensors of each optional part that the family defines for this config.
        one_key_for_all_layers: whether trainers use one key for all layers of a kind.
        shifts: whether a constant is added to elements of some tensors.
        keep_in_fp32: suffixes of the names of Hugging Face tensors that are float32 regardless of the model's dtype.

    Raises:
        InvalidArgument: the family's rules do not cover every tensor.
    """

    def __init__(self, family: Family, absent: Sequence[str] = ()) -> None:
        self._family: Family | None = family
        self._plan: dict[str, str] | None = None
        self._plan_error = ""
        self._head_counts = family.head_counts()
        self.model_type: str = family.config["model_type"]
        self.num_layers = family.num_layers
        self.vocab_size = family.vocab_size
        self.experts = family.experts
        self.keep_in_fp32 = family.keep_in_fp32
        self.one_key_for_all_layers = family.one_key_for_all_layers
        self.hugging_face: dict[str, Shape] = dict(family.hugging_face_shapes())
        for name, shape in self.hugging_face.items():
            if not all(1 <= n <= _LONGEST_AXIS for n in shape):
                raise InvalidArgument(
                    (
                        f"by config.json {name} would have the shape {list(shape)}: axes have 1 to "
                        f"{_LONGEST_AXIS} elements"
                    ),
                    fix="check the sizes in config.json; register a model that lacks such a part by its tensors alone: "
                    "weight_map=False, or --no-weight-map",
                )
        self._links: dict[tuple[str, Shape], list[Link]] = {}
        self.megatron: dict[str, MegatronTensor] = {}
        self.parts: dict[str, list[str]] = {}
        for entry in _entries(family.all_rules(), self.hugging_face):
            rule = entry.rule
            if rule.part:
                self.parts.setdefault(rule.part, []).extend(target.name for target in entry.targets)
            if rule.copies and rule.part_of_copies:
                self.parts.setdefault(rule.part_of_copies, []).extend(rule.copies)
            if rule.copies and rule.part_of_copies in absent:
                entry = replace(entry, rule=replace(rule, copies=()))
            if not rule.part or rule.part not in absent:
                self.megatron[entry.name] = entry
        by_te_spec = [replace(entry, name=self._by_te_spec(entry)) for entry in self.megatron.values()]
        self.megatron = {entry.name: entry for entry in by_te_spec}
        for name in (name for part in absent for name in self.parts.get(part, ())):
            del self.hugging_face[name]
        reached = {target.name for entry in self.megatron.values() for target in entry.targets}
        reached |= {copy for entry in self.megatron.values() for copy in entry.rule.copies}
        self.shifts = any(entry.rule.shift for entry in self.megatron.values())
        missing = [name for name in self.hugging_face if name not in reached]
        if missing:
            raise InvalidArgument(
                f"the weight map of {self.model_type} does not know {counted(len(missing), 'tensor')} of this config",
                details=missing[:10],
                fix="check config.json for options that the family does not have in Megatron-core",
            )

    def _by_te_spec(self, entry: MegatronTensor) -> str:
        """Name of the tensor in the Transformer Engine layer spec; families may name the norm of the MLP
        differently.
        """
        dense, moe = _SAME_NORM[0]
        for suffix in (dense, moe):
            if entry.name.endswith(suffix):
                layer = entry.name.removesuffix(suffix)
                return layer + (moe if f"{layer}.mlp.router.weight" in self.megatron else dense)
        return entry.name

    def find(self, name: str) -> MegatronTensor | None:
        """The tensor with this name in any layer spec; None if the model does not contain it."""
        found = self.megatron.get(name)
        if found is None:
            for one, other in _SAME_NORM:
                for mine, theirs in ((one, other), (other, one)):
                    if name.endswith(mine):
                        found = found or self.megatron.get(name.removesuffix(mine) + theirs)
        return found

    def links(self, entry: MegatronTensor) -> list[Link]:
        """Links from the elements of a tensor to its targets; the targets are indexes into ``entry.targets``. Tensors
        of one kind share their links.
        """
        key = (entry.rule.megatron, entry.shape)
        found = self._links.get(key)
        if found is None:
            conversion = entry.rule.conversion
            limit = _MOST_IN_HALVES if entry.rule.halves or entry.rule.vocabulary else _MOST_ELEMENTS
            if math.prod(entry.shape) > limit and conversion is not WHOLE:
                raise InvalidArgument(
                    f"by config.json {entry.name} would have {math.prod(entry.shape)} elements, more than {limit}"
                )
            from weighbridge_service.models.tracing import (
                trace,  # imports torch, which a service must not do before it answers calls
            )

            found = trace(
                entry.name,
                entry.shape,
                lambda tensor: [(str(i), part) for i, part in enumerate(conversion.split(tensor))],
            )
            for link in found:
                target = entry.targets[int(link.target)]
                shape = entry.rule.seen(self.hugging_face[target.name][len(target.leading) :])
                if any(end > size for end, size in zip(link.target_box.end, shape, strict=True)):
                    raise LayoutError(f"{entry.name} does not fit into {target.name}{list(shape)}")
            self._links[key] = found
        return found

    def parallel_plan(self) -> Mapping[str, str]:
        """Tensor-parallel cut of each Hugging Face tensor, ``colwise`` or ``rowwise``.

        Tensors without an entry are not cut.

        Raises:
            InvalidArgument: the family's own code failed to return its plan.
        """
        if self._plan_error:
            raise InvalidArgument(f"the model's family has no parallel plan: {self._plan_error}"[:500])
        if self._plan is None:
            self._plan = _parallel_plan(self._family.parallel_plan() if self._family else {}, self.hugging_face)
        return self._plan

    def head_counts(self) -> tuple[int, int]:
        """Numbers of attention heads and key-value heads."""
        return self._head_counts

    def __getstate__(self) -> dict[str, Any]:
        """State for another process.

        It contains all results of the family and its conversions instead of the objects themselves.
        """
        plan_error = self._plan_error
        try:
            self.parallel_plan()
        except Exception as error:  # `parallel_plan` raises it; the model can be used without a plan
            plan_error = f"{type(error).__name__}: {error}"
        rules: dict[int, Rule] = {}
        megatron = {}
        for name, entry in self.megatron.items():
            self.links(entry)
            rule = rules.get(id(entry.rule))
            if rule is None:
                rule = rules[id(entry.rule)] = replace(entry.rule, conversion=_TRACED)
            megatron[name] = replace(entry, rule=rule)
        return {**self.__dict__, "_family": None, "_plan_error": plan_error, "megatron": megatron}


class _Traced:
    """Placeholder for a conversion whose links are known, in a process that does not have the conversion."""

    def megatron_shape(self, shapes: Sequence[Shape]) -> Shape:
        raise NotImplementedError

    def split(self, tensor: Any) -> Sequence[Any]:
        raise NotImplementedError


_TRACED = _Traced()


def _parallel_plan(modules: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    # patterns such as `model.layers.*.self_attn.q_proj`
    patterns = [(re.compile(re.escape(k).replace(r"\*", r"\d+")), v) for k, v in modules.items()]
    styles: dict[str, str | None] = {}
    plan = {}
    for name in names:
        module = name.rpartition(".")[0]
        kind = kind_of(f"{module}.")
        if kind not in styles:
            styles[kind] = next((v for pattern, v in reversed(patterns) if pattern.fullmatch(module)), None)
        style = styles[kind]
        if style is not None:
            plan[name] = {"colwise_rep": "colwise", "rowwise_rep": "rowwise"}.get(style, style)
    return plan


def kind_of(name: str) -> str:
    """The name with its numbers replaced by ``*``. Tensors whose names have the same result are of one kind."""
    return _NUMBER.sub("*", name)


def _entries(rules: Sequence[Rule], shapes: Mapping[str, Shape]) -> Iterator[MegatronTensor]:
    """Megatron-core tensors of the rules whose Hugging Face tensors all exist.

    Each Hugging Face tensor is used once.
    """
    by_kind: dict[str, list[tuple[int, ...]]] = {}
    for name in shapes:
        numbers = tuple(int(n) for n in _NUMBER.findall(name))
        by_kind.setdefault(kind_of(name), []).append(numbers)
    reached: set[Target] = set()
    megatron_shapes: dict[tuple[str, tuple[Shape, ...]], Shape] = {}
    for rule in rules:
        _check_shift(rule)
        for layer, expert in _numbers(rule, shapes, by_kind):
            targets = tuple(_target(name, layer, expert) for name in rule.hugging_face)
            if not reached.isdisjoint(targets) or any(t.name not in shapes for t in targets):
                # a family's table also lists tensors that only some of its models have (biases, an untied output layer)
                continue
            reached.update(targets)
            of_targets = tuple(rule.seen(shapes[t.name][len(t.leading) :]) for t in targets)
            key = (rule.megatron, of_targets)
            if key not in megatron_shapes:
                megatron_shapes[key] = rule.conversion.megatron_shape(of_targets)
            copies = tuple(copy for copy in rule.copies if copy in shapes)
            made = rule if copies == rule.copies else replace(rule, copies=copies)
            yield MegatronTensor(_filled(rule.megatron, layer, expert), made, targets, megatron_shapes[key])


def _check_shift(rule: Rule) -> None:
    """Raise an error if trainers and conversions would add the constant differently: each rounds it to float32, and
    rows of padding are zeros.
    """
    if rule.vocabulary and rule.shift:
        raise InvalidArgument(
            f"the weight map adds {rule.shift:g} to {rule.megatron}, which has rows of padding",
            fix="use no shift in a rule of the vocabulary",
        )
    with np.errstate(over="ignore"):
        rounded = float(np.float32(rule.shift))
    if not math.isfinite(rounded) or rounded != rule.shift:
        raise InvalidArgument(
            f"the weight map adds {rule.shift!r} to {rule.megatron}, which is not a finite float32",
            fix="use a shift that float32 represents exactly",
        )


def _numbers(
    rule: Rule, shapes: Mapping[str, Shape], by_kind: Mapping[str, Sequence[tuple[int, ...]]]
) -> Iterator[tuple[int, int]]:
    """Layer and expert of each tensor that may match a rule; 0 if the rule does not have this field."""
    indexed = _INDEXED.match(rule.hugging_face[0])
    template = indexed[1] if indexed else rule.hugging_face[0]
    fields = _FIELD.findall(template)
    for numbers in by_kind.get(kind_of(_FIELD.sub("0", template)), ()):
        values = {"layer": 0, "expert": 0}
        written = iter(numbers)
        # literal numbers in the rule are part of the kind as well
        for literal, what, start in re.findall(r"(?<=\.)(\d+)(?=\.)|\{(layer|expert)(?:\+(\d+))?\}", template):
            number = next(written)
            if literal:
                if number != int(literal):
                    break
            else:
                values[what] = number - int(start or 0)
        else:
            if min(values.values()) < 0:
                continue
            if indexed and "{expert}" in indexed[2]:
                name = _filled(template, values["layer"], 0) if fields else template
                yield from ((values["layer"], expert) for expert in range(shapes[name][0]))
            else:
                yield values["layer"], values["expert"]


def _filled(template: str, layer: int, expert: int) -> str:
    values = {"layer": layer, "expert": expert}
    return _FIELD.sub(lambda field: str(values[field[1]] + int(field[2] or 0)), template)


def _target(template: str, layer: int, expert: int) -> Target:
    name = _filled(template, layer, expert)
    indexed = _INDEXED.match(name)
    return Target(indexed[1], (int(indexed[2]),)) if indexed else Target(name)


def parse_config(config_json: bytes) -> dict[str, Any]:
    """The content of a ``config.json``.

    Raises:
        InvalidArgument: it is too large or not a JSON object.
    """
    if len(config_json) > _MOST_CONFIG_BYTES:
        raise InvalidArgument(
            f"config.json has {len(config_json)} bytes, more than {_MOST_CONFIG_BYTES}",
            fix="keep only the fields that describe the model",
        )
    try:
        config = json.loads(config_json.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"config.json cannot be read: {error}"[:300]) from error
    if not isinstance(config, dict):
        raise InvalidArgument("config.json does not contain a JSON object")
    return config


def bridge_for(config_json: bytes, absent: Sequence[str] = ()) -> Bridge:
    """Bridge for a Hugging Face config. Each process makes one bridge per config.

    Takes about 5 s the first time in a process (mbridge imports transformers and megatron-core).

    Args:
        config_json: the config.
        absent: optional parts that the model lacks.

    Raises:
        InvalidArgument: no weight map exists for the config, or transformers cannot create a model from it.
    """
    family_of(parse_config(config_json))
    with _making:
        return _cached_bridge(config_json, tuple(sorted(absent)))


@contextmanager
def made_by(make: Callable[[bytes, Sequence[str]], Bridge]) -> Iterator[None]:
    """Let `bridge_for` call another function than `make_bridge` while the block runs."""
    _makers.append(make)
    try:
        yield
    finally:
        _makers.remove(make)


@functools.lru_cache(maxsize=64)
def _cached_bridge(config_json: bytes, absent: tuple[str, ...]) -> Bridge:
    return _makers[-1](config_json, absent)


def make_bridge(config_json: bytes, absent: Sequence[str] = ()) -> Bridge:
    """Make a bridge in this process. Only one thread may call it at a time.

    Raises:
        InvalidArgument: as `bridge_for`.
    """
    config = parse_config(config_json)
    try:
        family = family_of(config)(config)
        heads, kv_heads = family.head_counts()
        if heads % kv_heads:
            raise ValueError(f"{heads} attention heads cannot share {kv_heads} key-value heads")
        return Bridge(family, absent)
    except WeighbridgeError:
        raise
    except Exception as error:  # transformers may raise any error for an invalid value
        raise InvalidArgument(
            f"transformers cannot make a {config['model_type']} model of this config.json: {error}"[:500]
        ) from error


_makers: list[Callable[[bytes, Sequence[str]], Bridge]] = [make_bridge]
"""Functions that make bridges; the last one is called."""
_making = threading.Lock()
"""Two threads cannot import transformers at once, and it changes torch's default device while it makes a model."""
