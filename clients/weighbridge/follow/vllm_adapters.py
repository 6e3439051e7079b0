"""Adapters in a running vLLM whose API servers have the middleware of `weighbridge.integrations.vllm_adapters`:
preloads adapters before a request names them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weighbridge.follow.adapters import LoadedAdapter
from weighbridge.follow.answers import EngineApi, understood

ROUTE = "/v1/weighbridge/adapters"
"""Path below a prefix that vLLM protects by its API key."""
_FIX = (
    "start it with --enable-lora --middleware "
    "weighbridge.integrations.vllm_adapters.middleware.Adapters, and WEIGHBRIDGE_ADAPTERS in "
    "its environment: "
    "docs/adapters.md"
)


def load(api: EngineApi, name: str) -> LoadedAdapter:
    """Make all engines behind a server load a version of an adapter; see `VllmServer.load_adapter`."""
    said = _call(api, {"model": name})
    with understood(api.url + ROUTE):
        return LoadedAdapter(str(said["name"]), str(said["base"]), int(said["nbytes"]), str(said["way"]))


def unload(api: EngineApi, name: str) -> None:
    """Make all engines behind a server unload an adapter. If a request names it, they load it again."""
    _call(api, {"model": name, "unload": True})


def loaded(api: EngineApi) -> tuple[str, ...]:
    """Adapters that all engines behind a server have in memory."""
    said = _call(api)
    with understood(api.url + ROUTE):
        return tuple(sorted(str(each) for each in said["adapters"]))


def _call(api: EngineApi, body: Mapping[str, Any] | None = None) -> Any:
    return replace(api, other=_FIX).call(ROUTE, body)
