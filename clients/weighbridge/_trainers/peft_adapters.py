"""Adapters of peft as they are kept: a config, and tensors by the names that peft's own files have. From a folder, and from a model that is trained."""

from __future__ import annotations

import copy
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weighbridge._core.layouts import Layout
from weighbridge._formats.naming.weight_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CONFIG
from weighbridge._formats.push_sources import MappedSource, OpenSource
from weighbridge._formats.safetensors_files import layout_of_files, map_file
from weighbridge._formats.side_files.regular import read_regular
from weighbridge.errors import InvalidArgument, NotFound

if TYPE_CHECKING:
    import torch

_PICKLE = "adapter_model.bin"


@dataclass(frozen=True)
class AdapterFolder:
    """An adapter in a folder that peft's ``save_pretrained`` has written.

    Attributes:
        config_json: content of its ``adapter_config.json``.
        layout: its tensors as one stream, in the order of the file.
        open_source: gives the bytes of some of its shards.
    """

    config_json: bytes = field(repr=False)
    layout: Layout
    open_source: OpenSource = field(repr=False)

    @staticmethod
    def read(folder: Path) -> AdapterFolder:
        """Find out what is in a folder; of the tensors, only the header is read.

        Raises:
            NotFound: there is no folder, or it lacks one of the two files.
            InvalidArgument: it is the folder of a model, or its weights are a pickle.
            DataLoss: a file is damaged.
        """
        if not folder.is_dir():
            raise NotFound(
                f"there is no folder {folder}", fix="name one that peft's save_pretrained has written"
            )
        if not os.path.lexists(folder / ADAPTER_CONFIG):
            if os.path.lexists(folder / CONFIG):
                raise InvalidArgument(
                    f"{folder} is a model, and no adapter of peft", fix="import it without a base"
                )
            raise NotFound(
                f"there is no {ADAPTER_CONFIG} in {folder}",
                fix="name a folder that peft's save_pretrained has written",
            )
        if not os.path.lexists(folder / ADAPTER_WEIGHTS):
            if os.path.lexists(folder / _PICKLE):
                raise InvalidArgument(
                    f"{folder / _PICKLE} is a pickle, which may run any code when it is loaded",
                    fix="load the adapter where it was made and save it again: model.save_pretrained(folder), which writes "
                    f"{ADAPTER_WEIGHTS}",
                )
            raise NotFound(
                f"there is no {ADAPTER_WEIGHTS} in {folder}", fix="save or download the adapter again"
            )
        buffers = {ADAPTER_WEIGHTS: map_file(folder, ADAPTER_WEIGHTS)}
        found = layout_of_files({name: file.data for name, file in buffers.items()}).layout
        return AdapterFolder(
            read_regular(folder / ADAPTER_CONFIG, folder),
            Layout.stream(found.tensors.values(), [placement.shard for placement in found.placements]),
            MappedSource.opener(found.placements, buffers),
        )


@dataclass(frozen=True)
class TrainedAdapter:
    """An adapter of a model that peft has wrapped.

    Attributes:
        config_json: content of its ``adapter_config.json``.
        state: its tensors, by the names that peft's own file has; DTensors as they are.
    """

    config_json: bytes = field(repr=False)
    state: Mapping[str, torch.Tensor]

    @staticmethod
    def of(model: Any, adapter_name: str, save_embedding_layers: bool | str = "auto") -> TrainedAdapter:
        """The adapter of this name, as peft would save it.

        Args:
            model: a ``PeftModel``, or what DDP or torch.compile have made of one.
            adapter_name: which of its adapters.
            save_embedding_layers: as for peft's ``save_pretrained``.

        Raises:
            InvalidArgument: peft has not wrapped the model, or there is no adapter of this name.
        """
        peft_model = _peft_model(model)
        from peft import get_peft_model_state_dict

        if adapter_name not in peft_model.peft_config:
            raise InvalidArgument(
                f"the model has no adapter {adapter_name!r}",
                fix=f"name one that it has: {', '.join(map(repr, sorted(peft_model.peft_config)))}",
            )
        state = get_peft_model_state_dict(
            peft_model, adapter_name=adapter_name, save_embedding_layers=save_embedding_layers
        )
        return TrainedAdapter(_config_json(peft_model, adapter_name), state)


def _peft_model(model: Any) -> Any:
    """The ``PeftModel`` in what wrappers have made of one. Raises InvalidArgument."""
    found = model
    while not _is_peft_model(found):
        inner = getattr(found, "module", None)
        found = getattr(found, "_orig_mod", None) if inner is None else inner
        if found is None:
            raise InvalidArgument(
                f"a {type(model).__name__} is no model of peft",
                fix="push what get_peft_model or PeftModel.from_pretrained has made; a whole model is pushed by push_state_dict",
            )
    return found


def _is_peft_model(model: Any) -> bool:
    if "peft" not in sys.modules:  # it has made none in this process
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)


def _config_json(peft_model: Any, adapter_name: str) -> bytes:
    """The config as peft writes it beside the weights: for inference, and without a task with the class of the model."""
    config = copy.deepcopy(peft_model.peft_config[adapter_name])
    config.inference_mode = True
    base = type(peft_model.get_base_model())
    mapping = {"base_model_class": base.__name__, "parent_library": base.__module__}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder, auto_mapping_dict=mapping if config.task_type is None else None)
        return (Path(folder) / ADAPTER_CONFIG).read_bytes()
