"""Weighbridge moves model weights from the machines that train to the machines that serve.

This package is all that trainers and engines install: the vocabulary (tensors, boxes, layouts), `TrainerClient`,
`EngineClient`, `AsyncEngineClient` and the command line. Names are imported when first used, so that ``import weighbridge`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weighbridge.aio import AsyncEngineClient
    from weighbridge.boxes import Box
    from weighbridge.collection import Collection
    from weighbridge.engine import EngineClient
    from weighbridge.errors import WeighbridgeError
    from weighbridge.layouts import Layout, Shard, TensorSpec
    from weighbridge.push_handle import PushHandle
    from weighbridge.resources import Model, Retention, Version, VersionState
    from weighbridge.slices import Boxes, ExpertParallel, FullTensors, TensorParallel
    from weighbridge.trainer import TrainerClient

__version__ = "0.1.0"
__all__ = [
    "AsyncEngineClient",
    "Box",
    "Boxes",
    "Collection",
    "EngineClient",
    "ExpertParallel",
    "FullTensors",
    "Layout",
    "Model",
    "PushHandle",
    "Retention",
    "Shard",
    "TensorParallel",
    "TensorSpec",
    "TrainerClient",
    "Version",
    "VersionState",
    "WeighbridgeError",
]

_MODULES = {
    "AsyncEngineClient": "aio",
    "Box": "boxes",
    "Boxes": "slices",
    "Collection": "collection",
    "EngineClient": "engine",
    "ExpertParallel": "slices",
    "FullTensors": "slices",
    "Layout": "layouts",
    "Model": "resources",
    "PushHandle": "push_handle",
    "Retention": "resources",
    "Shard": "layouts",
    "TensorParallel": "slices",
    "TensorSpec": "layouts",
    "TrainerClient": "trainer",
    "Version": "resources",
    "VersionState": "resources",
    "WeighbridgeError": "errors",
}


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'weighbridge' has no attribute {name!r}")
    return getattr(importlib.import_module(f"weighbridge.{module}"), name)
