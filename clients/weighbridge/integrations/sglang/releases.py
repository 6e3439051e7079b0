"""Names by which SGLang, from 0.5.10 to the newest release, has what the plug-in needs: the one place where releases differ.

What a release has is seen by looking for it, not by its number.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from weighbridge.follow.wanted import LOAD_FORMAT

_SRT = "sglang.srt"
CONNECT = f"{_SRT}.connector.create_remote_connector"
LOAD_FIRST = f"{_SRT}.model_loader.loader.RemoteModelLoader._load_model_from_remote_fs"
FLUSH = f"{_SRT}.managers.scheduler.Scheduler.flush_cache"
UPDATE = (
    f"{_SRT}.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_tensor",
    f"{_SRT}.model_executor.model_runner.ModelRunner.update_weights_from_tensor",  # 0.5.15
)
CONTROL = (
    f"{_SRT}.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.check_weights",
    f"{_SRT}.managers.scheduler_update_weights_mixin.SchedulerUpdateWeightsMixin.check_weights",  # 0.5.12
)
"""Methods by the names that releases have had for them, the newest first; behind the others, the last release that was seen with it."""

_EMBEDDINGS = (f"{_SRT}.managers.mm_schedule", f"{_SRT}.managers.mm_utils")
"""Modules that have had the cache of multimodal embeddings, the newest first; behind the last, 0.5.15."""

Hook = Callable[..., Any]
"""Function that is called in place of another one, with that function as its first argument."""


def has_registry() -> bool:
    """Whether SGLang calls plug-ins in its processes and wraps functions for them, as 0.5.12 does and 0.5.10 does not."""
    return importlib.util.find_spec(f"{_SRT}.plugins") is not None


def register(hooks: Mapping[str, Hook]) -> None:
    """Have SGLang's registry put hooks around the functions of these names, when all plug-ins have been called."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)


def wrap(hooks: Mapping[str, Hook]) -> None:
    """Put hooks around the methods of these names at once, where there is no registry."""
    for target, hook in hooks.items():
        owner, _, name = target.rpartition(".")
        place = pkgutil.resolve_name(owner)
        setattr(place, name, _around(getattr(place, name), hook))


def present(targets: tuple[str, ...]) -> str:
    """The first of these names of methods whose module this release has."""
    return next(target for target in targets if _has_module(target.rsplit(".", 2)[0]))


def server_arguments() -> dict[str, Any]:
    """All that this start of the engine was configured with, as SGLang has resolved it."""
    try:
        from sglang.srt.runtime_context import get_context

        resolved = get_context().resolved_server_args_dict
    except (ImportError, AttributeError):  # 0.5.15
        from sglang.srt.server_args import get_global_server_args

        return dict(vars(get_global_server_args()))
    return dict(resolved())


def run_loader(original: Callable[..., Any], updater: Any, named_tensors: Any) -> tuple[bool, str]:
    """Have `weighbridge.integrations.sglang.load` bring a version, whether or not ``--custom-weight-loader`` names it.

    Args:
        original: the method of `UPDATE`.
        updater: whose method it is.
        named_tensors: those of the request.
    """
    if dataclasses.is_dataclass(updater):
        knowing: Any = dataclasses.replace(updater, custom_weight_loaders=[LOAD_FORMAT])  # type: ignore[type-var]
        return original(knowing, named_tensors=named_tensors, load_format=LOAD_FORMAT)  # type: ignore[no-any-return]
    from weighbridge.integrations.sglang import load

    load(updater.model, named_tensors)  # of a model runner, which does nothing else before and after
    return True, "Success"


def flush(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Empty the caches of a scheduler that is paused though requests wait, as 0.5.23 does.

    They have given back what they held when they were retracted. 0.5.15 refuses because of them, and ends the engine if that is in an update.
    """
    knows = "ignore_waiting" in inspect.signature(scheduler.is_fully_idle).parameters
    if knows or not scheduler._engine_paused or scheduler.disaggregation_mode.name != "NULL":
        return original(scheduler, *args, **kwargs)
    waiting, scheduler.waiting_queue = scheduler.waiting_queue, []
    try:
        return original(scheduler, *args, **kwargs)
    finally:
        scheduler.waiting_queue = waiting


def forget_embeddings() -> None:
    """Empty the cache of what encoders of images, videos and audio have computed.

    SGLang finds an embedding by the content of its image alone, and leaves this cache as it is when it flushes the others.
    """
    for name in _EMBEDDINGS:
        cache = getattr(sys.modules.get(name), "embedding_cache", None)
        if cache is not None:
            cache.clear()


def _around(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    @wraps(original)
    def around(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    return around


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # not even the package that it would be in
        return False
