"""Adapter code in vLLM's workers: each worker fetches the files to its own host before vLLM reads them, and reports the
base version in its parameters.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from functools import partial, wraps
from typing import Any

from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager

from weighbridge._clients.engine import EngineClient
from weighbridge._lazy.caching import cache_folder
from weighbridge.errors import FailedPrecondition
from weighbridge.follow.status import policy_in
from weighbridge.integrations.engine_rank.rank import EngineRank, known_rank
from weighbridge.integrations.vllm_adapters.names import Order, key_in
from weighbridge.integrations.vllm_adapters.serving import EngineState
from weighbridge.integrations.vllm_adapters.settings import AdapterSettings
from weighbridge.integrations.vllm_adapters.store import Store

_source: dict[str, str | None] = {}
"""Server and lane of this process's newest order.

If vLLM reads an adapter again later and its folder is gone, the adapter is fetched from there.
"""


def install() -> None:
    """Make vLLM's workers in this process read weighbridge adapters from this host's folder.

    Calling it again changes nothing.
    """
    load = WorkerLoRAManager._load_adapter
    if hasattr(load, "__wrapped__"):
        return

    @wraps(load)
    def load_adapter_here(self: Any, lora_request: Any) -> Any:
        key = key_in(lora_request.lora_path)
        if not key:
            return load(self, lora_request)
        store = _store()
        here_before = store.has(key)
        with store.hold(key, partial(_fetch, lora_request.lora_name)) as hold:
            here = LoRARequest(
                lora_name=lora_request.lora_name,
                lora_int_id=lora_request.lora_int_id,
                lora_path=str(hold.folder),
                base_model_name=lora_request.base_model_name,
            )
            loaded = load(self, here)
        if not here_before:  # no API server on this host removes what is over the bounds
            store.prune()
        return loaded

    WorkerLoRAManager._load_adapter = load_adapter_here


def state_of(worker: Any) -> dict[str, Any]:
    """State of one worker, as the fields of an `EngineState`.

    Does not raise: vLLM would take an exception of a worker for the response to another call.
    """
    try:
        return asdict(_state(worker))
    except Exception as error:
        return asdict(EngineState(why=f"a worker did not report its state: {error!r}"))


def load_adapter(worker: Any, order: Mapping[str, Any]) -> str:
    """Make a worker load an adapter. Returns the reason if it cannot, and an empty string otherwise.

    Does not raise, as `state_of`.

    Args:
        worker: vLLM's worker.
        order: the fields of an `Order`.
    """
    try:
        known = Order(**order)
        _source.update(server=known.server, lane=known.lane)
        worker.add_lora(lora_request(known))
    except Exception as error:
        return str(error) or repr(error)
    return ""


def lora_request(order: Order) -> Any:
    """An order as the object that vLLM attaches to each request."""
    return LoRARequest(
        lora_name=order.name,
        lora_int_id=order.number,
        lora_path=order.path,
        base_model_name=order.base,
    )


def _state(worker: Any) -> EngineState:
    manager = worker.model_runner.lora_manager._adapter_manager
    packed = manager.packed_modules_mapping
    modules = {part for each in manager.supported_lora_modules for part in (each, *packed.get(each, ()))}
    config = worker.vllm_config.lora_config
    known = tuple(each.name for each in fields(PEFTHelper))
    base, created_ms, why = _base(worker)
    return EngineState(base, created_ms, why, tuple(sorted(modules)), int(config.max_lora_rank), known)


def _base(worker: Any) -> tuple[str, int, str]:
    rank = getattr(getattr(worker, "weight_transfer_engine", None), "rank", None)
    if not isinstance(rank, EngineRank):
        rank = known_rank(worker.model_runner.get_model())
    if rank is not None and rank.held is not None:
        return policy_in(rank.held.label), rank.held.version.create_time_ms, ""
    if rank is not None and (broken := rank.status().broken):
        return "", 0, broken
    settings = AdapterSettings.of(os.environ)
    if settings is not None and settings.base:
        return settings.base, 0, ""
    return (
        "",
        0,
        (
            "it was not started from the service: name the version in the setting base, or start "
            "it with --load-format weighbridge"
        ),
    )


def _store() -> Store:
    settings = AdapterSettings.of(os.environ)
    if settings is None:
        raise FailedPrecondition(
            "WEIGHBRIDGE_ADAPTERS is not set in this worker", fix="set it on every host of the engine"
        )
    return Store(cache_folder(), settings.keep_versions, settings.keep_bytes)


def _fetch(name: str, folder: Any) -> None:
    settings = AdapterSettings.of(os.environ)
    server, lane = _source.get("server"), _source.get("lane")
    if settings is not None:
        server, lane = settings.server or server, settings.lane or lane
    with EngineClient(server, lane=lane, retry_seconds=5.0) as client:
        client.export(name, None, folder)
