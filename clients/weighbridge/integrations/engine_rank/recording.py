"""Recording of what a rank takes of a version, by a run of the model's own loader; and whether a version is one that it fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from weighbridge import _lazy as lazy
from weighbridge._clients.engine import EngineClient
from weighbridge._core.layouts import TensorSpec
from weighbridge.errors import FailedPrecondition, WeighbridgeError
from weighbridge.integrations.engine_rank.fitting import check_config, check_tensors


@dataclass(frozen=True)
class Recorded:
    """What a rank takes of any version of a model.

    Attributes:
        model: ``namespace/name``.
        specs: the tensors of its versions.
        configuration: the engine's, when its loader was recorded.
        recording: of the loader.
    """

    model: str
    specs: tuple[TensorSpec, ...]
    configuration: str
    recording: lazy.Recording


def check_version(config: Any, client: EngineClient, source: lazy.Source, known: Recorded | None) -> None:
    """Refuse a version that is of another model than the engine's, or has other tensors than those that were recorded.

    Args:
        config: the Hugging Face configuration that the engine's model was made with; None compares nothing.
        client: of the service.
        source: the version.
        known: what was recorded; None compares nothing.

    Raises:
        FailedPrecondition: says what differs.
    """
    version = source.version
    if config is not None:
        theirs = client.model_files(version.model, version.number).get("config.json")
        if theirs is not None:
            check_config(config, theirs, version)
    if known is not None:
        check_tensors(known.specs, source.specs, version)


def record(
    source: lazy.Source, load: lazy.Load, targets: Mapping[str, torch.Tensor], configuration: str | None
) -> lazy.Recording:
    """What a loader takes of any version with the tensors of this one; brings no bytes.

    Args:
        source: a version.
        load: the model's own loader.
        targets: the parameters and buffers that it may write to, by name; afterwards they hold nothing of use.
        configuration: all else that the loader's choice depends on, to use what was recorded before; None runs the loader.

    Raises:
        FailedPrecondition: the loader does not take the version; names the tensor that it had got last.
        LayoutError: a part of a tensor was copied to where it does not fit; names the tensor.
    """
    last: list[TensorSpec] = []

    def watched(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for spec, named in zip(source.specs, tensors, strict=True):
            last[:] = [spec]
            yield named

    def run(tensors: Iterator[tuple[str, torch.Tensor]]) -> object:
        return load(watched(tensors))

    try:
        if configuration is None:
            return lazy.record(source.specs, run, targets)
        return lazy.remembered(source.specs, run, targets, configuration)
    except WeighbridgeError:
        raise
    except Exception as error:
        where = f" at {last[-1]}" if last else ""
        raise FailedPrecondition(
            f"the engine's loader does not take {source.version}: it ended{where} with {type(error).__name__}: {error}",
            fix="start the engine with the configuration of this model",
        ) from error
