"""Names, in SGLang from 0.5.10 to the newest release, of the functions that the plug-in needs.

Only this module depends on the release.

Features are detected by their presence, not by the release number.
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
"""Methods under the names of different releases, newest first.

A comment after an older name gives the last release that was seen with it.
"""

_EMBEDDINGS = (f"{_SRT}.managers.mm_schedule", f"{_SRT}.managers.mm_utils")
"""Modules that contained the cache of multimodal embeddings, newest first; the last one is from 0.5.15."""

Hook = Callable[..., Any]
"""Function that is called in place of another one, with that function as its first argument."""


def has_registry() -> bool:
    """Whether SGLang calls plug-ins in its processes and wraps functions for them, as 0.5.12 does and 0.5.10 does
    not.
    """
    return importlib.util.find_spec(f"{_SRT}.plugins") is not None


def register(hooks: Mapping[str, Hook]) -> None:
    """Make SGLang's registry wrap the functions of these names after all plug-ins have been called."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)


def wrap(hooks: Mapping[str, Hook]) -> None:
    """Wrap the methods of these names immediately, if there is no registry."""
    for target, hook in hooks.items():
        owner, _, name = target.rpartition(".")
        place = pkgutil.resolve_name(owner)
        setattr(place, name, _around(getattr(place, name), hook))


def present(targets: tuple[str, ...]) -> str:
    """The first of these method names whose module exists in this release."""
    return next(target for target in targets if _has_module(target.rsplit(".", 2)[0]))


def server_arguments() -> dict[str, Any]:
    """The whole configuration of this start of the engine, as resolved by SGLang."""
    try:
        from sglang.srt.runtime_context import get_context

        resolved = get_context().resolved_server_args_dict
    except (ImportError, AttributeError):  # 0.5.15
        from sglang.srt.server_args import get_global_server_args

        return dict(vars(get_global_server_args()))
    return dict(resolved())


def run_loader(original: Callable[..., Any], updater: Any, named_tensors: Any) -> tuple[bool, str]:
    """Make `weighbridge.integrations.sglang.load` load a version, whether or not ``--custom-weight-loader`` names it.

    Args:
        original: the method of `UPDATE`.
        updater: object of the method.
        named_tensors: tensors of the request.
    """
    if dataclasses.is_dataclass(updater):
        knowing: Any = dataclasses.replace(updater, custom_weight_loaders=[LOAD_FORMAT])  # type: ignore[type-var]
        return original(knowing, named_tensors=named_tensors, load_format=LOAD_FORMAT)  # type: ignore[no-any-return]
    from weighbridge.integrations.sglang import load

    load(updater.model, named_tensors)  # the model of a model runner, which does nothing else before and after
    return True, "Success"


def flush(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Empty the caches of a paused scheduler even if requests wait, as 0.5.23 does.

    The waiting requests released their memory when they were retracted. 0.5.15 refuses because of them, and ends the
    engine if that happens in an update.
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
    """Empty the cache of embeddings of images, videos and audio.

    SGLang looks up an embedding only by the content of its image, and does not flush this cache with the others.
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
    except ModuleNotFoundError:  # the parent package is missing too
        return False
