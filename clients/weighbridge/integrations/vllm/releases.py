"""Names, in vLLM from 0.24 to the newest release, of the functions that the plug-in needs.

Only this module depends on the release.

Features are detected by their presence, not by the release number. vLLM 0.24 does not pass all required information to
a transfer engine; `remember_models` and `leave_models_whole` wrap two of its functions to obtain it. Newer releases are
not changed.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_pp_group
from vllm.logger import init_logger
from vllm.model_executor.layers import attention
from vllm.model_executor.model_loader.reload import layerwise, meta

from weighbridge.errors import FailedPrecondition
from weighbridge.integrations.engine_rank.drafting import Drafting
from weighbridge.integrations.vllm import engines
from weighbridge.integrations.vllm.sleeping import Bring, SleepHooks

logger = init_logger(f"vllm.plugins.{__name__}")

_CONFIGURATION = "_weighbridge_vllm_config"
_drafters: WeakKeyDictionary[torch.nn.Module, Any] = WeakKeyDictionary()
"""Drafters that vLLM has loaded in this process, with vLLM's configuration of each."""

LEFT_IN_PLACE: frozenset[str] = frozenset(
    meta.SKIP_LOAD_TENSORS if hasattr(meta, "SKIP_LOAD_TENSORS") else meta.SKIP_TENSORS  # 0.24
)
"""Names of tensors that layerwise reloading neither recreates nor counts."""

NOT_MADE_ANEW: frozenset[str] = frozenset(getattr(meta, "SKIP_TENSORS", LEFT_IN_PLACE))
"""Names of tensors that stay in place while layers are reloaded."""


def is_deferred(layer: torch.nn.Module) -> bool:
    """Whether vLLM processes a layer after all others, such as attention."""
    if hasattr(attention, "is_deferred_attention_layer"):
        return bool(attention.is_deferred_attention_layer(layer))
    return isinstance(layer, (attention.Attention, attention.MLAAttention))  # 0.24


def put_back(layer: torch.nn.Module) -> None:
    """Restore the tensors that the kernels of a layer read before a reload.

    The end of a reload does the same with layers that received no weights. But it logs a warning for layers that could
    have received weights, and vLLM 0.24 skips the others.
    """
    info = layerwise.get_layerwise_info(layer)
    if info.kernel_tensors is not None:
        layerwise._place_kernel_tensors(layer, info)
    info.reset()


def track(loader: Any, model: torch.nn.Module, loaded: set[str], quantized: bool) -> None:
    """Make vLLM raise if parameters received no weights, unless the model's quantization leaves some without."""
    asked = inspect.signature(loader.track_weights_loading).parameters
    if "quantized" in asked:
        loader.track_weights_loading(model, loaded, quantized=quantized)
    elif not quantized:  # 0.31: only such models are checked
        loader.track_weights_loading(model, loaded)


def reset_adapters(model_runner: Any) -> None:
    """Make vLLM drop its state of LoRA adapters, if it keeps any in addition to the weights."""
    if hasattr(model_runner, "reset_lora_state"):  # not in 0.24
        model_runner.reset_lora_state()


def remember_models() -> None:
    """Store the engine's configuration with each loaded model, if transfer engines do not receive it, and record
    drafters, which transfer engines never receive.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    given = "vllm_config" in inspect.signature(WeightTransferEngineFactory.create_engine).parameters
    load = BaseModelLoader.load_model

    @wraps(load)
    def load_model(self: Any, vllm_config: Any, model_config: Any, *args: Any, **kwargs: Any) -> Any:
        model = load(self, vllm_config, model_config, *args, **kwargs)
        if not given:
            setattr(model, _CONFIGURATION, vllm_config)
        if getattr(model_config, "runner_type", "") == "draft":
            _drafters[model] = model_config
        return model

    BaseModelLoader.load_model = load_model


def drafting(vllm_config: Any) -> Drafting:
    """Drafter of the engine that has this configuration, in this process.

    If vLLM loaded the drafter from the same place as the policy, it is a part of the policy's versions, such as layers
    of multi-token prediction; otherwise it is a separate model. With pipeline stages, only the last stage has the
    drafter.
    """
    speculative: Any = getattr(vllm_config, "speculative_config", None)
    config: Any = getattr(speculative, "draft_model_config", None)
    if getattr(config, "runner_type", "") != "draft":  # no drafter, or one without a model, such as n-grams
        return Drafting()
    name = f"the drafter {config.model} ({speculative.method})"
    target = vllm_config.model_config
    found = [model for model, known in _drafters.items() if known is config]
    apart = config.model not in (target.model, getattr(target, "model_weights", None))
    if not apart and not found and not get_pp_group().is_last_rank:
        return Drafting()
    return Drafting(name, found[0] if len(found) == 1 else None, apart or len(found) != 1)


def configuration(model: torch.nn.Module, given: Any) -> Any:
    """The engine's configuration.

    Args:
        model: its model.
        given: the configuration, or a part of it, that the transfer engine received.

    Raises:
        FailedPrecondition: vLLM has loaded the model in a way that `remember_models` does not observe.
    """
    found = given if isinstance(given, VllmConfig) else getattr(model, _CONFIGURATION, None)
    if found is None:
        raise FailedPrecondition(
            "the configuration of this engine is not known to weighbridge",
            fix="start it with --load-format weighbridge, auto or safetensors, or with vLLM 0.29 or newer",
        )
    return found


def leave_models_whole() -> None:
    """Prevent update sessions from changing the model in this process.

    vLLM 0.24 begins a reload in each session, while the model may still compute.
    """
    from vllm.v1.worker.gpu_worker import Worker

    start = Worker.start_weight_update
    if "is_checkpoint_format" not in inspect.signature(start).parameters or hasattr(start, "__wrapped__"):
        return

    @wraps(start)
    def start_weight_update(self: Any, is_checkpoint_format: bool = True) -> None:
        del is_checkpoint_format  # either way, the engine reloads what is needed once it has all bytes
        start(self, is_checkpoint_format=False)

    Worker.start_weight_update = start_weight_update


def hear_all_engines() -> None:
    """Make an API server respond for all engines behind it, if vLLM's client of engines has the form of a known
    release.

    Only in a process that creates an engine. If the form is unknown, agents detect and report that not all engines
    respond.
    """
    from vllm.v1.engine import core_client

    client: Any = getattr(core_client, "AsyncMPClient", None)
    original = getattr(client, "collective_rpc_async", None)
    if original is None or hasattr(original, "__wrapped__") or not hasattr(client, "_call_utility_async"):
        return

    @wraps(original)
    async def collective_rpc_async(self: Any, *given: Any, **named: Any) -> Any:
        return await engines.collective_rpc(partial(original, self), self, engines.WorkersCall(*given, **named))

    client.collective_rpc_async = collective_rpc_async


def empty_caches_after_updates(backend: str) -> None:
    """Make each engine empty its caches after every call that may have changed the parameters of its workers.

    Running requests are recomputed with the new weights. Results of multimodal processors stay, because they do not
    depend on weights. Applies only if the engine's core is imported: other processes have no core.

    Args:
        backend: backend of weight transfer; engines with a different one are not changed.
    """
    core = _engine_core()
    if core is None or hasattr(core.collective_rpc, "__wrapped__"):
        return
    call = core.collective_rpc

    @wraps(call)
    def collective_rpc(self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return call(self, method, timeout, args, kwargs)
        finally:  # a failed update may have changed parameters too
            transfer = self.vllm_config.weight_transfer_config
            ours = transfer is not None and transfer.backend == backend
            if ours and engines.changes_parameters(engines.WorkersCall(method, timeout, args, kwargs)):
                _forget_results(self)

    core.collective_rpc = collective_rpc


def watch_sleep(backend: str, bring: Bring) -> None:
    """Make wake-ups of each engine apply the waiting version.

    Applies only if the engine's core is imported: other processes have no core.

    Call this after `empty_caches_after_updates`: both wrap the core's calls to workers.

    Args:
        backend: backend of weight transfer; engines with a different one are not changed.
        bring: called in each worker.
    """
    core = _engine_core()
    if core is not None:
        SleepHooks(backend, bring, _forget_results).begin(core)


def _engine_core() -> Any:
    """vLLM's class of the engine's core; None in a process that has not imported it."""
    return getattr(sys.modules.get("vllm.v1.engine.core"), "EngineCore", None)


def _forget_results(core: Any) -> None:
    """Empty an engine's caches of results.

    A failure is logged, not raised: the caller receives the result or the error of the update itself.
    """
    prefixes = partial(core.reset_prefix_cache, reset_running_requests=True, reset_connector=True)
    for what, forget in (("prefixes", prefixes), ("encoders", core.reset_encoder_cache)):
        try:
            emptied = forget() is not False
        except Exception:
            logger.exception("vLLM cannot empty its cache of %s", what)
            emptied = False
        if not emptied:
            logger.error("the cache of %s may contain results of old weights: pause the engine, which empties it", what)


def place_of(worker: Any) -> dict[str, int]:
    """Place of a worker: the index of its engine among those of the server, its rank in the engine, and the number of
    ranks of the engine.
    """
    parallel = worker.vllm_config.parallel_config
    return {
        "engine": int(getattr(parallel, "data_parallel_index", 0)),
        "rank": int(worker.rank),
        "ranks": int(parallel.world_size),
    }


def label_first_version(label_of: Callable[[VllmConfig], str]) -> None:
    """Make an engine report the label of its first version to its clients; vLLM reports ``default`` until a label is
    set.

    Applies only if the engine's core is imported: other processes have no core. vLLM 0.24 does not report versions to
    clients.

    Args:
        label_of: returns the version's label; empty if the weights came from another source.
    """
    core = _engine_core()
    if core is None or hasattr(core._initialize_kv_caches, "__wrapped__"):
        return
    initialize = core._initialize_kv_caches  # after the model has been loaded, and before the first request

    @wraps(initialize)
    def initialize_kv_caches(self: Any, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "_weight_version", None) == "default":
            self._weight_version = label_of(vllm_config) or self._weight_version
        return initialize(self, vllm_config, *args, **kwargs)

    core._initialize_kv_caches = initialize_kv_caches
