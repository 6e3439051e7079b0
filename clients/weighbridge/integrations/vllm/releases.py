"""Names by which vLLM, from 0.24 to the newest release, has what the plug-in needs: the one place where releases differ.

What a release has is seen by looking for it, not by its number. What vLLM 0.24 does not tell a transfer engine is found out by two functions of
its that `remember_models` and `leave_models_whole` wrap; newer releases are left as they are.
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
from weighbridge.integrations.vllm.sleeping import Bring, Watch

logger = init_logger(f"vllm.plugins.{__name__}")

_CONFIGURATION = "_weighbridge_vllm_config"
_drafters: WeakKeyDictionary[torch.nn.Module, Any] = WeakKeyDictionary()
"""Models that vLLM has loaded in this process to draft for others, with vLLM's configuration of each."""

LEFT_IN_PLACE: frozenset[str] = frozenset(
    meta.SKIP_LOAD_TENSORS if hasattr(meta, "SKIP_LOAD_TENSORS") else meta.SKIP_TENSORS  # 0.24
)
"""Names of tensors that layerwise reloading neither makes anew nor counts."""

NOT_MADE_ANEW: frozenset[str] = frozenset(getattr(meta, "SKIP_TENSORS", LEFT_IN_PLACE))
"""Names of tensors that stay in place while layers are reloaded."""


def is_deferred(layer: torch.nn.Module) -> bool:
    """Whether vLLM processes a layer after all others, as it does attention."""
    if hasattr(attention, "is_deferred_attention_layer"):
        return bool(attention.is_deferred_attention_layer(layer))
    return isinstance(layer, (attention.Attention, attention.MLAAttention))  # 0.24


def put_back(layer: torch.nn.Module) -> None:
    """Give a layer that was to be reloaded what its kernels have read before.

    As the end of a reload does with layers that got no weights; but those which weights may go to, and do not, are warned of there, and the others
    are forgotten by vLLM 0.24.
    """
    info = layerwise.get_layerwise_info(layer)
    if info.kernel_tensors is not None:
        layerwise._place_kernel_tensors(layer, info)
    info.reset()


def track(loader: Any, model: torch.nn.Module, loaded: set[str], quantized: bool) -> None:
    """Have vLLM raise if parameters got no weights, unless the model is quantized in a way that leaves some without."""
    asked = inspect.signature(loader.track_weights_loading).parameters
    if "quantized" in asked:
        loader.track_weights_loading(model, loaded, quantized=quantized)
    elif not quantized:  # 0.31: only such models are asked
        loader.track_weights_loading(model, loaded)


def reset_adapters(model_runner: Any) -> None:
    """Have vLLM forget what it keeps of LoRA adapters beside the weights, if it does."""
    if hasattr(model_runner, "reset_lora_state"):  # not in 0.24
        model_runner.reset_lora_state()


def remember_models() -> None:
    """Keep with each model that is loaded the engine's configuration, where a transfer engine is not given it, and see drafters: a transfer engine
    is given none.
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

    A drafter that vLLM has read from where it has read the policy is a part of the policy's versions, as layers of multi-token prediction are; any other is
    a model of its own. With pipeline stages, the last one has it; the others have nothing for it to fill.
    """
    speculative: Any = getattr(vllm_config, "speculative_config", None)
    config: Any = getattr(speculative, "draft_model_config", None)
    if getattr(config, "runner_type", "") != "draft":  # none, or the policy's own, as of n-grams
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
        model: that it has.
        given: to the transfer engine, the configuration or a part of it.

    Raises:
        FailedPrecondition: vLLM has loaded the model in a way that `remember_models` does not see.
    """
    found = given if isinstance(given, VllmConfig) else getattr(model, _CONFIGURATION, None)
    if found is None:
        raise FailedPrecondition(
            "how this engine is configured is not known to weighbridge",
            fix="start it with --load-format weighbridge, auto or safetensors, or with vLLM 0.29 or newer",
        )
    return found


def leave_models_whole() -> None:
    """Let sessions of updates leave the model in this process as it is. vLLM 0.24 begins a reload in each, while the model may still compute."""
    from vllm.v1.worker.gpu_worker import Worker

    start = Worker.start_weight_update
    if "is_checkpoint_format" not in inspect.signature(start).parameters or hasattr(start, "__wrapped__"):
        return

    @wraps(start)
    def start_weight_update(self: Any, is_checkpoint_format: bool = True) -> None:
        del is_checkpoint_format  # in any case, the engine reloads what is needed once it has all bytes
        start(self, is_checkpoint_format=False)

    Worker.start_weight_update = start_weight_update


def hear_all_engines() -> None:
    """Let an API server answer for all engines behind it, where vLLM's client of engines is as in the releases that are known.

    Only where this process makes an engine. If it is another one, agents see that not all engines answer, and say so.
    """
    from vllm.v1.engine import core_client

    client: Any = getattr(core_client, "AsyncMPClient", None)
    original = getattr(client, "collective_rpc_async", None)
    if original is None or hasattr(original, "__wrapped__") or not hasattr(client, "_call_utility_async"):
        return

    @wraps(original)
    async def collective_rpc_async(self: Any, *given: Any, **named: Any) -> Any:
        return await engines.collective_rpc(partial(original, self), self, engines.Call(*given, **named))

    client.collective_rpc_async = collective_rpc_async


def empty_caches_after_updates(backend: str) -> None:
    """Make each engine empty its caches after every call that may have changed the parameters of its workers.

    Running requests are computed anew by the new weights. What multimodal processors have made of inputs stays: it depends on no weights.
    Only where the engine's core is imported: other processes have none.

    Args:
        backend: of weight transfer; engines with another one are left as they are.
    """
    core = _engine_core()
    if core is None or hasattr(core.collective_rpc, "__wrapped__"):
        return
    call = core.collective_rpc

    @wraps(call)
    def collective_rpc(
        self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None
    ) -> Any:
        try:
            return call(self, method, timeout, args, kwargs)
        finally:  # a failed update may have touched parameters, too
            transfer = self.vllm_config.weight_transfer_config
            ours = transfer is not None and transfer.backend == backend
            if ours and engines.changes_parameters(engines.Call(method, timeout, args, kwargs)):
                _forget_results(self)

    core.collective_rpc = collective_rpc


def watch_sleep(backend: str, bring: Bring) -> None:
    """Make wake-ups of each engine bring the version that waits. Only where the engine's core is imported: other processes have none.

    To be called after `empty_caches_after_updates`: both wrap the core's calls of workers.

    Args:
        backend: of weight transfer; engines with another one are left as they are.
        bring: is called in each worker.
    """
    core = _engine_core()
    if core is not None:
        Watch(backend, bring, _forget_results).begin(core)


def _engine_core() -> Any:
    """vLLM's class of the engine's core; None in a process that has not imported it."""
    return getattr(sys.modules.get("vllm.v1.engine.core"), "EngineCore", None)


def _forget_results(core: Any) -> None:
    """Empty an engine's caches of results. A failure is logged, not raised: the caller gets the result or the error of the update itself."""
    prefixes = partial(core.reset_prefix_cache, reset_running_requests=True, reset_connector=True)
    for what, forget in (("prefixes", prefixes), ("encoders", core.reset_encoder_cache)):
        try:
            emptied = forget() is not False
        except Exception:
            logger.exception("vLLM cannot empty its cache of %s", what)
            emptied = False
        if not emptied:
            logger.error(
                "the cache of %s may have results of old weights: pause the engine, which empties it", what
            )


def place_of(worker: Any) -> dict[str, int]:
    """Place of a worker: the index of its engine among those of the server, its rank in the engine, and the number of ranks of the engine."""
    parallel = worker.vllm_config.parallel_config
    return {
        "engine": int(getattr(parallel, "data_parallel_index", 0)),
        "rank": int(worker.rank),
        "ranks": int(parallel.world_size),
    }


def label_first_version(label_of: Callable[[VllmConfig], str]) -> None:
    """Let an engine give its clients the label of its first version, where vLLM calls it ``default`` until a label is set.

    Only where the engine's core is imported: other processes have none. vLLM 0.24 gives clients no version.

    Args:
        label_of: gives the version's label; empty if the weights came from elsewhere.
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
