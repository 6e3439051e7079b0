"""Start of ``vllm serve acme/smol --load-format weighbridge``: config and tokenizer.

vLLM reads them before it has a loader, from a folder or from the Hugging Face Hub. So the engine's arguments are
completed just before vLLM creates its configuration from them: the ref is resolved to a number, the same for all ranks;
the files other than weights are downloaded to a folder, which replaces the model argument; and the engine receives the
settings that updates need. This wraps vLLM's own code, because vLLM has no hook that early. If ``HF_ENDPOINT`` points
at the service, vLLM gets the files from it without this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

from weighbridge._lazy.caching import folder_of
from weighbridge.errors import InvalidArgument
from weighbridge.follow.status import label
from weighbridge.integrations.vllm import NAME
from weighbridge.integrations.vllm.releases import (
    empty_caches_after_updates,
    hear_all_engines,
    label_first_version,
    remember_models,
    watch_sleep,
)
from weighbridge.integrations.vllm.settings import Settings

logger = init_logger(f"vllm.plugins.{__name__}")

_WORKER_EXTENSION = "weighbridge.integrations.vllm.worker.WorkerExtension"
_EXTENSIONS = "weighbridge.integrations.vllm.extensions."
_MARK = "_weighbridge_completes"
_DRAFTERS = "vllm-drafters"
"""Folders separate from those of policies: vLLM treats a drafter with the policy's folder as a part of the policy."""


def install() -> None:
    """Make vLLM's arguments be completed in this process, and register the load format."""
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.engine import arg_utils
    from vllm.engine.arg_utils import EngineArgs

    label_first_version(_first_label)
    empty_caches_after_updates(NAME)
    watch_sleep(NAME, _bring_after_sleep)
    if hasattr(EngineArgs, _MARK):
        return
    _register_loader()
    remember_models()
    setattr(EngineArgs, _MARK, True)
    made, configured = EngineArgs.__post_init__, EngineArgs.create_engine_config
    local_path, not_here, named = arg_utils.get_model_path, dict[str, Exception](), dict[str, str]()

    def get_model_path(model: Any, revision: str | None = None) -> Any:
        # HF_HUB_OFFLINE: the first arguments of a process look for the Hub's copy just after they loaded this plug-in
        try:
            found = local_path(model, revision)
            named[str(found)] = str(model)
            return found
        except Exception as error:
            not_here[str(model)] = error
            return model

    def post_init(self: Any) -> None:
        _complete(self, WeightTransferConfig)
        made(self)

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        # again: arguments may be changed after their creation, and the first ones created loaded this plug-in
        if self.load_format == NAME:  # the service's model, even if the Hub's cache contains one of that name
            self.model = named.get(str(self.model), self.model)
            self.tokenizer = named.get(str(self.tokenizer), self.tokenizer)
        _complete(self, WeightTransferConfig)
        for name in (self.model, self.tokenizer):  # still unresolved: they do not come from the service
            if (missing := not_here.pop(str(name), None)) is not None:
                raise missing
        label_first_version(_first_label)
        empty_caches_after_updates(NAME)
        watch_sleep(NAME, _bring_after_sleep)
        hear_all_engines()
        return configured(self, *args, **kwargs)

    arg_utils.get_model_path = get_model_path
    EngineArgs.__post_init__, EngineArgs.create_engine_config = post_init, create_engine_config


def _bring_after_sleep(worker: Any, lost: bool, last: bool) -> Mapping[str, Any]:
    """Called in workers; only they need its imports."""
    from weighbridge.integrations.vllm.worker import bring_after_sleep

    return bring_after_sleep(worker, lost, last)


def _first_label(configuration: Any) -> str:
    """The version that an engine starts with, as ``acme/smol@17``; empty if it does not come from the service."""
    load = configuration.load_config
    if load.load_format != NAME:
        return ""
    settings = Settings.of(load.model_loader_extra_config or {}, configuration.model_config.model)
    return label(settings.model, int(settings.version), settings.draft) if settings.version.isdecimal() else ""


def _register_loader() -> None:
    from vllm.model_executor.model_loader import register_model_loader

    from weighbridge.integrations.vllm.loader import WeighbridgeLoader

    register_model_loader(NAME)(WeighbridgeLoader)


def _complete(arguments: Any, transfer_config: Any) -> None:
    """Fill in the arguments that users of load format weighbridge, or of its updates, need not write. Idempotent."""
    if arguments.load_format == NAME:
        settings = Settings.of(arguments.model_loader_extra_config or {}, arguments.model)
        has_folder = Path(arguments.model).is_dir()
        if not (has_folder and settings.version.isdecimal()):
            settings = _take_from_service(arguments, settings, has_folder)
        if settings.draft:
            _take_drafter(arguments, settings)
        if arguments.weight_transfer_config is None:
            arguments.weight_transfer_config = transfer_config(backend=NAME)
    transfer = arguments.weight_transfer_config
    backend = transfer.get("backend") if isinstance(transfer, dict) else getattr(transfer, "backend", None)
    if backend == NAME:
        arguments.worker_extension_cls = _extension_with(arguments.worker_extension_cls)


def _extension_with(other: str) -> str:
    """Qualified name of the worker extension that has weighbridge's methods, and those of another extension, if any."""
    if not other or other == _WORKER_EXTENSION:
        return _WORKER_EXTENSION
    if other.startswith(_EXTENSIONS):
        return other
    return _EXTENSIONS + other.replace(".", ":")


def _take_drafter(arguments: Any, settings: Settings) -> None:
    """Make the drafter load from one version of its model, with the files of that version in a folder.

    Raises:
        InvalidArgument: the engine has no drafter, a different drafter, or pipeline stages.
    """
    said, of = arguments.speculative_config, settings.of_drafter
    if not isinstance(said, Mapping):
        raise InvalidArgument(
            f"draft of load format weighbridge is {settings.draft}, and the engine does not decode speculatively",
            fix="start it with --speculative-config "
            f"""'{{"model": "{of.model}", "method": ..., "num_speculative_tokens": ...}}'""",
        )
    if int(getattr(arguments, "pipeline_parallel_size", 1) or 1) > 1:
        raise InvalidArgument(
            f"draft of load format weighbridge is {settings.draft}, but only the last pipeline stage has the drafter",
            fix="start the engine without pipeline stages, or leave draft out",
        )
    named = str(said.get("model") or of.model)
    has_folder = Path(named).is_dir()
    if not has_folder and named != of.model:
        raise InvalidArgument(
            f"draft of load format weighbridge is {settings.draft}, and the model of the speculative config is {named}",
            fix="name the same model, or leave draft out",
        )
    if has_folder and of.version.isdecimal():
        return
    with settings.source.connect() as client:
        version = client.version(of.model, of.version)
        files = {} if has_folder else client.model_files(of.model, version.number)
    folder = named if has_folder else str(folder_of(_DRAFTERS, files))
    logger.info("%s@%d: config of the drafter is in %s", version.model, version.number, folder)
    arguments.speculative_config = {**said, "model": folder}
    arguments.model_loader_extra_config = replace(settings, draft=f"{of.model}@{version.number}").write()


def _take_from_service(arguments: Any, settings: Settings, has_folder: bool) -> Settings:
    """Make the model load from one version, with the files of that version in a folder.

    Returns the settings for that.
    """
    with settings.source.connect() as client:
        version = client.version(settings.model, settings.version)
        version.check_whole()
        files = {} if has_folder else client.model_files(settings.model, version.number)
    settings = replace(settings, version=str(version.number))
    arguments.model_loader_extra_config = settings.write()
    if has_folder:
        return settings
    folder = folder_of("vllm", files)
    logger.info("%s@%d: config and tokenizer are in %s", version.model, version.number, folder)
    name = arguments.model
    arguments.served_model_name = arguments.served_model_name or name
    arguments.tokenizer = str(folder) if arguments.tokenizer in (None, name) else arguments.tokenizer
    arguments.model = str(folder)
    arguments.revision = None
    return settings
