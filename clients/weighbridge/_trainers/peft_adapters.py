"""Peft adapters as they are stored: a config, and tensors by the names in peft's own files. They are read from a folder
or from a model in training.
"""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from weighbridge._core import dtypes
from weighbridge._core.file_names import ADAPTER_CONFIG, CONFIG
from weighbridge._core.layouts import Layout, TensorSpec
from weighbridge._core.text.counts import counted, first_lines
from weighbridge._formats.memory_forms import TensorForms
from weighbridge._formats.naming.weight_files import ADAPTER_WEIGHTS
from weighbridge._formats.peft_models import peft_model_in
from weighbridge._formats.push_sources import HeldShards, MappedSource
from weighbridge._formats.safetensors_files import layout_of_files, map_file
from weighbridge._formats.side_files.regular import read_regular
from weighbridge._formats.torch_state import adapter_forms
from weighbridge._formats.zero3 import is_partitioned
from weighbridge.errors import InvalidArgument, LayoutError, NotFound

if TYPE_CHECKING:
    import torch

PREFIX = "base_model.model."
"""Prefix of the names of all tensors of peft's adapters."""
_PICKLE = "adapter_model.bin"


@dataclass(frozen=True)
class AdapterFolder:
    """An adapter in a folder that peft's ``save_pretrained`` has written.

    Attributes:
        config_json: content of the adapter's ``adapter_config.json``.
        layout: the adapter's tensors as one stream, in the order of the file.
        shards: these tensors.
    """

    config_json: bytes = field(repr=False)
    layout: Layout
    shards: HeldShards = field(repr=False)

    @staticmethod
    def read(folder: Path) -> AdapterFolder:
        """Read a folder; of the tensors, only the header is read.

        Raises:
            NotFound: the folder does not exist, or lacks one of the two files.
            InvalidArgument: the folder contains a model, or its weights are a pickle.
            DataLoss: a file is damaged.
        """
        if not folder.is_dir():
            raise NotFound(f"there is no folder {folder}", fix="name one that peft's save_pretrained has written")
        if not os.path.lexists(folder / ADAPTER_CONFIG):
            if os.path.lexists(folder / CONFIG):
                raise InvalidArgument(f"{folder} is a model, not an adapter of peft", fix="import it without a base")
            raise NotFound(
                f"there is no {ADAPTER_CONFIG} in {folder}",
                fix="name a folder that peft's save_pretrained has written",
            )
        if not os.path.lexists(folder / ADAPTER_WEIGHTS):
            if os.path.lexists(folder / _PICKLE):
                raise InvalidArgument(
                    f"{folder / _PICKLE} is a pickle, which may run any code when it is loaded",
                    fix="load the adapter where it was made and save it again: "
                    "model.save_pretrained(folder), which writes "
                    f"{ADAPTER_WEIGHTS}",
                )
            raise NotFound(f"there is no {ADAPTER_WEIGHTS} in {folder}", fix="save or download the adapter again")
        buffers = {ADAPTER_WEIGHTS: map_file(folder, ADAPTER_WEIGHTS)}
        found = layout_of_files({name: file.data for name, file in buffers.items()}).layout
        stream = Layout.stream(found.tensors.values(), [placement.shard for placement in found.placements])
        config_json = read_regular(folder / ADAPTER_CONFIG, folder)
        return AdapterFolder(config_json, stream, MappedSource(stream, found.placements, buffers))


@dataclass(frozen=True)
class TrainedAdapter:
    """An adapter of a peft model.

    Attributes:
        config_json: content of the adapter's ``adapter_config.json``.
        state: the adapter's tensors, by the names in peft's own file. DTensors, and parameters that ZeRO-3 has
            partitioned, are unchanged.
        forms: forms of the tensors; the same object in later pushes, as long as the adapter's names are cached.
    """

    config_json: bytes = field(repr=False)
    state: Mapping[str, torch.Tensor]
    forms: TensorForms = field(repr=False)


class TrainedAdapters:
    """Reader of adapters of models in training.

    Peft takes longer to name an adapter's tensors than the rest of a push takes, and it may send requests to the Hub.
    So the reader caches peft's names as long as the model exists, and uses them as long as the adapter's config and the
    names, shapes and dtypes of the model's tensors do not change.
    """

    def __init__(self) -> None:
        self._named: WeakKeyDictionary[torch.nn.Module, dict[tuple[str, bool | str], _Named]] = WeakKeyDictionary()

    def read(self, model: Any, adapter_name: str, save_embedding_layers: bool | str = "auto") -> TrainedAdapter:
        """Return the adapter of this name, as peft would save it.

        Args:
            model: a ``PeftModel``, which DDP or torch.compile may have wrapped.
            adapter_name: name of the adapter.
            save_embedding_layers: as for peft's ``save_pretrained``.

        Raises:
            InvalidArgument: the model is not a peft model, or does not have an adapter of this name.
        """
        peft_model = wrapped_model(model)
        if adapter_name not in peft_model.peft_config:
            raise InvalidArgument(
                f"the model has no adapter {adapter_name!r}",
                fix=f"name one that it has: {', '.join(map(repr, sorted(peft_model.peft_config)))}",
            )
        config_json = _config_json(peft_model, adapter_name)
        present, hooks = _own_tensors(peft_model)
        made = (config_json, hooks, [(place, value.shape, value.dtype) for place, value in present.items()])
        named = self._named.setdefault(peft_model, {})
        known = named.get((adapter_name, save_embedding_layers))
        if known is not None and known.made == made:
            found = {name: _outside_autograd(present[place]) for name, place in known.places.items()}
            return TrainedAdapter(config_json, found, known.forms)
        from peft import get_peft_model_state_dict

        state = peft_model.state_dict(keep_vars=True)
        found = get_peft_model_state_dict(
            peft_model,
            state_dict=state,
            adapter_name=adapter_name,
            save_embedding_layers=save_embedding_layers,
        )
        places = {id(value): place for place, value in present.items()}
        own = {name: places[id(value)] for name, value in found.items() if id(value) in places}
        found = {name: _outside_autograd(value) for name, value in found.items()}
        forms = adapter_forms(found)
        # peft copies tensors that transformers has sharded, and hooks of modules may replace others: such an adapter is
        # named again in each push
        if len(own) == len(found):
            named[adapter_name, save_embedding_layers] = _Named(made, own, forms)
        return TrainedAdapter(config_json, found, forms)


def _own_tensors(module: torch.nn.Module) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """Parameters and persistent buffers of a module by their names in its state dict, which takes longer to make; and
    the hooks by which a state dict may differ from them.
    """
    found: dict[str, torch.Tensor] = {}
    hooks: list[Any] = []
    pending = [("", module)]
    while pending:
        prefix, each = pending.pop()
        for name, value in each._parameters.items():
            if value is not None:
                found[prefix + name] = value
        for name, buffer in each._buffers.items():
            if buffer is not None and name not in each._non_persistent_buffers_set:
                found[prefix + name] = buffer
        hooks += (*each._state_dict_pre_hooks.values(), *each._state_dict_hooks.values())
        pending += [(f"{prefix}{name}.", child) for name, child in each._modules.items() if child is not None]
    return found, hooks


def _outside_autograd(value: torch.Tensor) -> torch.Tensor:
    """The tensor without its graph; a parameter that ZeRO-3 has partitioned as it is, because it describes its
    partition.
    """
    return value if is_partitioned(value) else value.detach()


@dataclass(frozen=True)
class _Named:
    """Places of an adapter's tensors in the state of the model, by peft's names."""

    made: tuple[bytes, list[Any], list[tuple[str, Any, Any]]]
    places: Mapping[str, str]
    forms: TensorForms


@dataclass(frozen=True)
class LoraModule:
    """Scale of the adapter of one layer: its product is multiplied by ``alpha / rank``."""

    rank: int
    alpha: float
    dropout: float = 0.0


@dataclass(frozen=True)
class LoraParts:
    """The part of an adapter that one rank knows, or all parts together.

    Attributes:
        tensors: whole tensors by peft's names.
        modules: rank, alpha and dropout of the adapter of each layer, by the layer's name.
    """

    tensors: Mapping[str, TensorSpec]
    modules: Mapping[str, LoraModule]

    @property
    def encoded(self) -> bytes:
        """Encode this part for the other ranks. The same adapter always gives the same bytes."""
        tensors = [[each.name, each.dtype.name, list(each.shape)] for _, each in sorted(self.tensors.items())]
        modules = {name: asdict(module) for name, module in sorted(self.modules.items())}
        return json.dumps({"tensors": tensors, "modules": modules}, separators=(",", ":")).encode()

    @staticmethod
    def decode(data: bytes) -> LoraParts:
        """Decode the part of another rank."""
        found = json.loads(data)
        specs = [
            TensorSpec(name, dtypes.from_safetensors(dtype), tuple(shape)) for name, dtype, shape in found["tensors"]
        ]
        modules = {name: LoraModule(**module) for name, module in found["modules"].items()}
        return LoraParts({spec.name: spec for spec in specs}, modules)

    @staticmethod
    def together(parts: Sequence[LoraParts]) -> LoraParts:
        """Join the parts of several ranks.

        Raises LayoutError if they contradict each other (names the layers and tensors).
        """
        tensors: dict[str, TensorSpec] = {}
        modules: dict[str, LoraModule] = {}
        wrong: dict[str, None] = {}
        for part in parts:
            for name, spec in part.tensors.items():
                if tensors.setdefault(name, spec) != spec:
                    wrong[f"{spec} and {tensors[name]}"] = None
            for name, module in part.modules.items():
                if modules.setdefault(name, module) != module:
                    wrong[f"{name}: {module} and {modules[name]}"] = None
        if wrong:
            raise LayoutError(
                counted(len(wrong), "part of the adapter differs", "parts of the adapter differ") + " between ranks",
                details=first_lines(wrong),
                fix="give all ranks the same rank, alpha and target modules",
            )
        return LoraParts(tensors, modules)

    def config_json(self, base: str, base_tensors: Collection[str]) -> bytes:
        """Return the ``adapter_config.json`` with which peft loads the adapter.

        It names layers by the last part of their names if all layers of the base with that ending have adapters,
        otherwise one by one.

        Args:
            base: name of the base model.
            base_tensors: names of the base's tensors.
        """
        ranks = Counter(module.rank for _, module in sorted(self.modules.items()))
        alphas = Counter(module.alpha for _, module in sorted(self.modules.items()))
        rank, alpha = ranks.most_common(1)[0][0], alphas.most_common(1)[0][0]
        config = {
            "alpha_pattern": {
                name: _number(module.alpha) for name, module in sorted(self.modules.items()) if module.alpha != alpha
            },
            "base_model_name_or_path": base,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "init_lora_weights": True,
            "lora_alpha": _number(alpha),
            "lora_dropout": max(module.dropout for module in self.modules.values()),
            "modules_to_save": None,
            "peft_type": "LORA",
            "r": rank,
            "rank_pattern": {name: module.rank for name, module in sorted(self.modules.items()) if module.rank != rank},
            "target_modules": list(_targets(self.modules, base_tensors)),
            "task_type": "CAUSAL_LM",
            "use_dora": False,
            "use_rslora": False,
        }
        return json.dumps(config, indent=2).encode()


def _targets(modules: Collection[str], base_tensors: Iterable[str]) -> Iterable[str]:
    """Return names by which peft finds exactly these modules of the base."""
    there = {name.removesuffix(".weight") for name in base_tensors if name.endswith(".weight")}
    partly = {name.rpartition(".")[2] for name in there - set(modules)}
    leaves = {name.rpartition(".")[2] for name in modules}
    return [
        *sorted(leaves - partly),
        *sorted(name for name in modules if name.rpartition(".")[2] in partly),
    ]


def _number(value: float) -> float:
    return int(value) if value == int(value) else value


def wrapped_model(model: Any) -> Any:
    """Return the ``PeftModel`` inside wrappers. Raises InvalidArgument."""
    found = peft_model_in(model)
    if found is None:
        raise InvalidArgument(
            f"a {type(model).__name__} is not a model of peft",
            fix=(
                "push the model that get_peft_model or PeftModel.from_pretrained returned; push a "
                "whole model with push_state_dict"
            ),
        )
    return found


def _config_json(peft_model: Any, adapter_name: str) -> bytes:
    """Return the config as peft writes it next to the weights: for inference, and with the class of the model if it
    does not have a task.

    Sets, such as target modules, are sorted, because their order differs between processes and all ranks register the
    same config.
    """
    config = copy.deepcopy(peft_model.peft_config[adapter_name])
    for name, value in vars(config).items():
        if isinstance(value, set | frozenset):
            setattr(config, name, sorted(value))
    config.inference_mode = True
    base = type(peft_model.get_base_model())
    mapping = {"base_model_class": base.__name__, "parent_library": base.__module__}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder, auto_mapping_dict=mapping if config.task_type is None else None)
        return (Path(folder) / ADAPTER_CONFIG).read_bytes()
