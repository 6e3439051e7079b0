"""Registered model: its config, its tensors, its files, and plans and layouts that are derived once and used for every
version.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

from weighbridge._core.block_scales import says_quantized
from weighbridge._core.file_names import is_adapter
from weighbridge._core.layouts import Layout, TensorSpec, adapter_digest
from weighbridge._core.lru import Cache
from weighbridge._core.slices import LayoutRequest
from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._core.text.counts import counted, first_lines
from weighbridge._formats.safetensors_files import FilesLayout, lay_out_adapter, lay_out_files
from weighbridge.errors import InvalidArgument, LayoutError
from weighbridge_service.families import model_types, no_weight_map
from weighbridge_service.models.bridges import Bridge, bridge_for, parse_config
from weighbridge_service.models.engine_layouts import EngineLayouts, padding_of
from weighbridge_service.models.listed_tensors import ListedTensors
from weighbridge_service.models.model_tensors import ModelTensors, usual_dtype
from weighbridge_service.models.weight_maps import derive_weight_map, shifts_back
from weighbridge_service.plan.casting import ROUTER_BIASES
from weighbridge_service.plan.declarations import KnownSet
from weighbridge_service.plan.planning import make_plan
from weighbridge_service.plan.push_plan import PreparedPush, prepare_push
from weighbridge_service.plan.quantised_scales import scales_of
from weighbridge_service.plan.relations import WeightMap, identity_links
from weighbridge_service.plan.transfers import Transfer
from weighbridge_storage.documents.names import (
    ModelName,
)

KEPT_SHARDS = 2_000_000
"""Default number of shards of declared layouts, and of slices of pulls, that a model caches. Each takes about 1 KB."""
_KEPT_OFFERS = 100_000
"""Number of layouts that a model records as offered to other replicas, and number of layouts whose shifts it caches."""
_SHARD_BYTES, _PART_BYTES = 2 << 10, 300
"""Approximate bytes of a tensor or a shard, with its part of the plan, and of a copy in the plan of a pull."""
_KEPT_PARTS = 1_000_000
"""Number of copies in the plans of pulls and restores that a model caches.

A plan itself counts as a thousand copies.
"""
_KEPT_DECLARED = 4
"""Number of versions with their own tensors whose layouts and plans are cached."""
_KEPT_FITTING = 1024
"""Number of adapters that are known to fit a base. It takes milliseconds to compare one."""
IDENTITY_FORMAT = 2
"""Format of `RegisteredModel.identity`. Models in heads of another format are compared by their tensors alone."""


DeclaredLayout: TypeAlias = tuple[TensorSpace, Layout]
"""Layout that a rank has declared, with the tensor space of its names."""


class RegisteredModel:
    """Registered model, with a cache of its layouts and plans.

    Args:
        name: the model's name.
        config_json: content of its ``config.json``; for an adapter, of its ``adapter_config.json``.
        kept: properties of its tensors that the config does not determine.
        files_id: id of the registered set of files.
        side_files: names of these files.
        listed: its tensors, if no weight map exists for its model type; ``kept`` then contains the digest of the list.
            For a part: the tensors of one version, or None, because each version of a part has its own tensors
            (`declared_by`).

    Attributes:
        fitting: digests of adapters whose tensors fit this model.
    """

    def __init__(
        self,
        name: ModelName,
        config_json: bytes,
        kept: ModelTensors,
        files_id: str,
        side_files: Sequence[str],
        listed: ListedTensors | None = None,
    ) -> None:
        self.name = name
        self.kept = kept
        self.listed = listed
        self.files_id = files_id
        self.side_files = tuple(side_files)
        self.config_json = config_json
        self.known_set: KnownSet | None = None
        self.known_number = 0  # number of the version that ``known_set`` belongs to
        self._layouts: Cache[DeclaredLayout]
        self.remember(KEPT_SHARDS)
        self._offered: Cache[bool] = Cache(_KEPT_OFFERS)
        self._pushes: Cache[PreparedPush] = Cache(4)
        self._reads: Cache[Transfer] = Cache(_KEPT_PARTS, lambda transfer: 1000 + transfer.parts)
        self._shifts: Cache[Mapping[str, float]] = Cache(_KEPT_OFFERS)
        self._requests: Cache[Layout] = Cache(KEPT_SHARDS // 4, lambda layout: 1 + len(layout.placements))
        self._declared: Cache[RegisteredModel] = Cache(_KEPT_DECLARED)
        self.fitting: Cache[bool] = Cache(_KEPT_FITTING)

    def remember(self, shards: int) -> None:
        """Set the number of shards of declared layouts to cache, and drop the layouts that were declared before."""
        self._layouts = Cache(shards, lambda entry: 1 + len(entry[1].placements))

    @cached_property
    def bridge(self) -> Bridge:
        """Bridge of the model. The first call in a process takes seconds.

        Raises:
            InvalidArgument: the model was registered without a weight map, so it has only Hugging Face's names.
        """
        if self.listed is not None:
            raise _not_mapped(self)
        return bridge_for(self.config_json, self.kept.absent)

    @property
    def is_adapter(self) -> bool:
        """Whether the model is a peft adapter. Its versions are based on versions of another model."""
        return is_adapter(self.side_files)

    @cached_property
    def adapter_digest(self) -> str:
        """Digest of an adapter's config and tensors; empty for other models."""
        return adapter_digest(self.config_json, self.tensors.values()) if self.is_adapter else ""

    @property
    def by_version(self) -> bool:
        """Whether each version has its own tensors, which its ranks declare and name. True for a part of a model."""
        return bool(self.name.part)

    def declared_by(self, layouts: Iterable[Layout]) -> RegisteredModel:
        """The model with the tensors of one version; the model itself if all versions have the same tensors.

        Args:
            layouts: layouts that the version's ranks have declared, in the order of the ranks.

        Raises:
            LayoutError: two ranks declare one tensor with different dtypes or shapes, or no rank holds any elements.
        """
        if not self.by_version:
            return self
        specs: dict[str, TensorSpec] = {}
        problems = []
        for rank, layout in enumerate(layouts):
            problems += [
                f"{spec} on rank {rank}, {specs[spec.name]} on an earlier rank"
                for spec in layout.tensors.values()
                if specs.setdefault(spec.name, spec) != spec
            ]
        if problems or not any(spec.nbytes for spec in specs.values()):
            raise LayoutError(
                f"the ranks contradict each other in {counted(len(problems), 'tensor')} of {self.name}"
                if problems
                else f"no rank holds any elements of {self.name}",
                details=first_lines(problems),
                fix="all ranks push the state of one model and one optimizer; check that they run the same code",
            )
        return self.with_tensors(specs.values())

    def with_tensors(self, specs: Iterable[TensorSpec]) -> RegisteredModel:
        """The model with these tensors of one version; the model itself if all versions have the same.

        Both share declared layouts.
        """
        if not self.by_version:
            return self
        listed = ListedTensors.of(specs)

        def make() -> RegisteredModel:
            kept = ModelTensors(usual_dtype(listed.specs), listed=listed.digest)
            found = RegisteredModel(self.name, self.config_json, kept, self.files_id, self.side_files, listed)
            found._layouts, found._offered = self._layouts, self._offered
            return found

        return self._declared.get_or_make(listed.digest, make)

    @cached_property
    def model_type(self) -> str:
        """Model type in its config; empty if the config does not name one."""
        return model_type_of(parse_config(self.config_json))

    @cached_property
    def tensors_digest(self) -> str:
        """Digest of all tensors of its versions: their names, dtypes and shapes."""
        return Layout.stream(self.files.layout.tensors.values(), ()).digest

    @property
    def keep_in_fp32(self) -> tuple[str, ...]:
        """Suffixes of the names of tensors that a cast does not narrow."""
        return ROUTER_BIASES if self.listed is not None else self.bridge.keep_in_fp32

    @cached_property
    def scales(self) -> frozenset[str]:
        """Names of tensors that are scales of quantised weights, which are not cast."""
        quantised = says_quantized(parse_config(self.config_json))
        return scales_of(self.tensors.values(), quantised=quantised)

    @cached_property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Tensors of the model in Hugging Face's space, by name."""
        if self.listed is not None:
            return {spec.name: spec for spec in self.listed.specs}
        return self.kept.specs(self.bridge)

    @cached_property
    def files(self) -> FilesLayout:
        """Layout of the safetensors files of the model's versions."""
        tensors = list(self.tensors.values())
        return lay_out_adapter(tensors) if self.is_adapter else lay_out_files(tensors)

    @cached_property
    def identity(self) -> str:
        """Digest of the tensors and of the place of each of their elements in megatron-core.

        Configs with the same identity are interchangeable: the same shards give the same files. Heads store it, so its
        format is fixed: `IDENTITY_FORMAT`, a colon, and the hex digits of a SHA-256. The SHA-256 is over the digest of
        the files' layout and one line of canonical JSON for each of megatron-core's tensors, in order:
        ``[name, [[target, leading indexes] ...], [copies ...], [[offset, extent, number of the target, offset, extent,
        axes] ...]]``, with the constant that is added to each element, if any, as the last item. A model without a
        weight map has no such lines.
        """
        digest = hashlib.sha256(self.files.layout.digest.encode())
        links: dict[int, object] = {}  # by kind; most tensors share their links with other layers
        for name, entry in () if self.listed is not None else self.bridge.megatron.items():
            of_kind = self.bridge.links(entry)
            if id(of_kind) not in links:
                links[id(of_kind)] = [
                    [*link.source_box, int(link.target), *link.target_box, link.axes] for link in of_kind
                ]
            targets = [[target.name, target.leading] for target in entry.targets]
            line = [name, targets, list(entry.rule.copies), links[id(of_kind)]]
            if entry.rule.shift:
                line.append(entry.rule.shift)
            digest.update(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        return f"{IDENTITY_FORMAT}:{digest.hexdigest()}"

    @property
    def nbytes(self) -> int:
        """Approximate bytes of memory that the model uses now, without the `bridge`, which models with the same config
        share.
        """
        # tensors count only once they are derived
        tensors = len(self.listed.specs if self.listed is not None else self.__dict__.get("tensors", ()))
        shards = tensors + self._layouts.weight + self._requests.weight
        return len(self.config_json) + shards * _SHARD_BYTES + self._reads.weight * _PART_BYTES

    @cached_property
    def _engine_layouts(self) -> EngineLayouts:
        return EngineLayouts(self.tensors, lambda: self.bridge, self.kept.block)

    def add_layout(self, space: TensorSpace, layout: Layout) -> None:
        """Store a declared layout under its digest.

        Raises:
            InvalidArgument: the layout contains Megatron-core's names, but the model has no weight map.
        """
        if space == TensorSpace.MEGATRON and self.listed is not None and not self.by_version:
            raise _not_mapped(self)
        self._layouts.put(layout.digest, (space, layout))

    def declared_layout(self, digest: str) -> DeclaredLayout | None:
        """The declared layout with this digest; None if it is not stored, or no longer stored."""
        return self._layouts.get(digest)

    def is_offered(self, digest: str) -> bool:
        """Whether other replicas can read a layout, as far as this process knows."""
        return self._offered.get(digest) is not None

    def offered(self, digest: str) -> None:
        """Record that other replicas can read a layout."""
        self._offered.put(digest, True)

    def prepare(self, declared: Sequence[DeclaredLayout], homes: Sequence[int]) -> PreparedPush:
        """Plan of a push, from the declared layouts of all ranks.

        Args:
            declared: the layouts, in the order of the ranks.
            homes: number of the replica of the service that each rank pushes to.

        Raises:
            LayoutError: the layouts contradict the model or each other.
        """
        digests = tuple(layout.digest for _, layout in declared)

        def make() -> PreparedPush:
            spaces = {space for space, _ in declared}
            if len(spaces) != 1:
                raise InvalidArgument("some ranks push Megatron-core's tensors and others Hugging Face's")
            layouts = [layout for _, layout in declared]
            space = spaces.pop()
            try:
                return prepare_push(
                    layouts, self.files, lambda tensors: self._relate(space, tensors), homes, space=space
                )
            except LayoutError:
                # a layout may have been declared in the wrong tensor space: drop it, so that ranks send it again
                for digest in digests:
                    self._layouts.drop(digest)
                raise

        return self._pushes.get_or_make((digests, tuple(homes)), make)

    def _relate(self, space: TensorSpace, tensors: Mapping[str, TensorSpec]) -> WeightMap:
        if space == TensorSpace.MEGATRON and not self.by_version:
            return derive_weight_map(self.bridge, self.tensors, tensors)
        problems = [
            f"{spec}: " + (f"the model has {self.tensors[name]}" if name in self.tensors else "no tensor of the model")
            for name, spec in tensors.items()
            if self.tensors.get(name) != spec
        ]
        if problems:
            raise LayoutError(
                counted(len(problems), "tensor is not one", "tensors are not those") + f" of {self.name}",
                details=first_lines(problems),
                fix="push tensors of the registered names and shapes; if the model was registered wrongly, delete it "
                f"(`weighbridge delete {self.name}`) and register it with the folder's own config.json",
            )
        return WeightMap(tensors, self.tensors, identity_links(tensors.values()), ())

    def restore_transfer(self, source: Layout, target: Layout) -> Transfer:
        """Transfer from a version's files to the shards of a trainer rank.

        Raises:
            LayoutError: the shards contradict the model.
        """

        def make() -> Transfer:
            weight_map = derive_weight_map(self.bridge, self.tensors, target.tensors)
            plan = make_plan(weight_map.as_seen(source), target, weight_map.inverse_links, padding=weight_map.padding)
            return Transfer(plan, scatter=False)

        return self._reads.get_or_make(("restore", source.digest, target.digest), make)

    def restore_shifts(self, target: Layout) -> Mapping[str, float]:
        """Constants to add to each element of some restored shards of a trainer rank, by the names of their tensors."""
        if not self.bridge.shifts:
            return {}
        return self._shifts.get_or_make(target.digest, lambda: shifts_back(self.bridge, target.tensors))

    def pull_layout(self, request: LayoutRequest) -> Layout:
        """Layout of the slices that an engine requests.

        Raises:
            InvalidArgument: the slices do not fit the model.
        """
        return self._requests.get_or_make(repr(request), lambda: self._engine_layouts.layout(request))

    def pull_transfer(self, source: Layout, target: Layout) -> Transfer:
        """Transfer from a version's files to an engine's slices."""

        def make() -> Transfer:
            links = identity_links(source.tensors[name] for name in target.tensors)
            plan = make_plan(source, target, links, padding=padding_of(source, target))
            return Transfer(plan, scatter=False)

        return self._reads.get_or_make(("pull", source.digest, target.digest), make)


def model_type_of(config: Mapping[str, Any]) -> str:
    """Model type of a config; empty if the config does not name one.

    Raises InvalidArgument if it is not a short string.
    """
    named = config.get("model_type")
    if named is not None and not (isinstance(named, str) and named.isprintable() and len(named) <= 256):
        raise no_weight_map(named, ", which is not a valid name of a model type")
    return named or ""


def _not_mapped(model: RegisteredModel) -> InvalidArgument:
    """Error of a request that needs a weight map, for a model without one."""
    if model.is_adapter:
        return InvalidArgument(
            f"{model.name} is an adapter, whose tensors are not cut by ranks of an engine or a trainer",
            fix="pull whole tensors or boxes, or load it with peft: docs/adapters.md",
        )
    names = (
        "use Hugging Face's names: push_state_dict, push_folder, restore_state_dict; pull "
        "whole tensors or boxes, or by an "
        "engine's plug-in"
    )
    if model.model_type in model_types():
        return InvalidArgument(
            f"{model.name} was registered without a weight map",
            fix=f"{names}; or register it under another name: {model.model_type} has one",
        )
    return no_weight_map(model.model_type, f" of {model.name}", names)
