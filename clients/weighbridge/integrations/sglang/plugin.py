"""Hooks into SGLang: four of its functions are wrapped, by its own registry of hooks."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from weighbridge.errors import WeighbridgeError
from weighbridge.follow.wanted import ACTION, DISCARD, LOAD_FORMAT, PREPARE, STATUS, Wanted

_SRT = "sglang.srt"


def register() -> None:
    """What the entry point ``weighbridge`` of ``sglang.srt.plugins`` names; SGLang calls it once in every process."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in {
        f"{_SRT}.connector.create_remote_connector": connect,
        f"{_SRT}.model_loader.loader.RemoteModelLoader._load_model_from_remote_fs": load_first,
        f"{_SRT}.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_tensor": update,
        f"{_SRT}.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.check_weights": control,
    }.items():
        HookRegistry.register(target, hook, HookType.AROUND)


def connect(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Model paths that begin with ``weighbridge://``."""
    from weighbridge.integrations.sglang import connecting

    return connecting.connect(original, *args, **kwargs)


def load_first(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The first load from such a path."""
    from weighbridge.integrations.sglang import connecting

    return connecting.load_first(original, *args, **kwargs)


def update(
    original: Callable[..., Any], updater: Any, named_tensors: Any, load_format: str | None = None
) -> tuple[bool, str]:
    """``/update_weights_from_tensor``: an error is an answer, where SGLang would end the engine. Needs no ``--custom-weight-loader``."""
    if load_format != LOAD_FORMAT:
        return original(updater, named_tensors=named_tensors, load_format=load_format)  # type: ignore[no-any-return]
    knowing = dataclasses.replace(updater, custom_weight_loaders=[LOAD_FORMAT])
    try:
        return original(knowing, named_tensors=named_tensors, load_format=load_format)  # type: ignore[no-any-return]
    except WeighbridgeError as error:
        return False, str(error)


def control(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """``/weights_checker``, whose requests reach every rank while the engine serves: prepare, discard, and how it stands."""
    if not request.action.startswith(ACTION):
        return original(manager, request)
    from sglang.srt.managers.io_struct import CheckWeightsReqOutput

    from weighbridge.integrations.sglang.model import number_to_update_to, sglang_rank, source_of

    rank = sglang_rank(manager.tp_worker.model_runner.model)
    try:
        if request.action == PREPARE:
            wanted = Wanted.from_json((request.skip_tensor_list or [""])[0])
            rank.prepare_all(number_to_update_to(rank, wanted), source_of(wanted))
        elif request.action == DISCARD:
            rank.discard()
        elif request.action != STATUS:
            return CheckWeightsReqOutput(success=False, message=f"there is no action {request.action!r}")
    except WeighbridgeError as error:
        return CheckWeightsReqOutput(success=False, message=str(error))
    ranks = rank.engine.ranks.all_gather_object(rank.status().to_json())
    return CheckWeightsReqOutput(success=True, message=json.dumps({"ranks": ranks}))
