"""Recordings that outlast a process: an engine that starts again with the same model and configuration runs no loader."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from weighbridge._core.layouts import TensorSpec
from weighbridge._lazy.caching import cache_folder
from weighbridge._lazy.recorder import Load, record
from weighbridge._lazy.recording import Recording, Shape
from weighbridge._version import VERSION
from weighbridge.errors import WeighbridgeError

log = logging.getLogger(__name__)


def remembered(
    specs: Iterable[TensorSpec], load: Load, targets: Mapping[str, torch.Tensor], configuration: str
) -> Recording:
    """`record`, or what was recorded before of the same tensors, parameters and configuration.

    Args:
        specs, load, targets: as for `record`.
        configuration: all else that the loader's choice depends on: the engine and its release, its parallelism and this rank.
    """
    specs = tuple(specs)
    shapes = [[name, *Shape.of(tensor)[:2], str(tensor.dtype)] for name, tensor in sorted(targets.items())]
    releases = [VERSION, torch.__version__]
    known = json.dumps([[[s.name, s.dtype.name, s.shape] for s in specs], shapes, configuration, releases])
    name = f"{hashlib.sha256(known.encode()).hexdigest()}.json"
    with contextlib.suppress(OSError, UnicodeDecodeError, WeighbridgeError):
        return Recording.from_json((cache_folder() / "recordings" / name).read_text())
    made = record(specs, load, targets)
    try:
        file = cache_folder() / "recordings" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as written:
            written.write(made.to_json())
        Path(written.name).replace(file)
    except (OSError, WeighbridgeError) as error:
        log.info("the recording is not kept for the next start: %s", error)
    return made
