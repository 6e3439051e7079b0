"""Places outside a vLLM engine where results of old weights persist, although each update empties the engine's own
caches. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from weighbridge.integrations.engine_rank.fitting import refuse_updates

_KEEPING = frozenset(
    {
        "LMCacheConnectorV1",
        "LMCacheConnectorV1Dynamic",
        "LMCacheMPConnector",
        "FlexKVConnectorV1",
        "HF3FSKVConnector",
        "ExampleConnector",
    }
)
"""KV connectors that look up a block only by its tokens and have no `reset_cache`, so that vLLM's pause does not clear
them (vLLM 0.24 to 0.32).
"""


def check_updatable(configuration: Any) -> None:
    """Refuse updates of an engine whose responses would still be computed from old weights in part.

    Args:
        configuration: the engine's ``VllmConfig``.

    Raises:
        FailedPrecondition: names the setting.
    """
    keeping = _KEEPING.intersection(_connectors(getattr(configuration, "kv_transfer_config", None)))
    if keeping:
        refuse_updates(
            f"the {' and '.join(sorted(keeping))} of --kv-transfer-config",
            "it identifies KV blocks only by their tokens, and vLLM cannot empty it",
            "use a connector that vLLM empties in a pause, such as OffloadingConnector or MooncakeStoreConnector",
        )
    if getattr(getattr(configuration, "ec_transfer_config", None), "ec_connector", None):
        refuse_updates(
            "an --ec-transfer-config",
            "it loads what encoders of other engines have computed, and identifies it only by the image",
            "let the engine encode images itself",
        )


def _connectors(kv_transfer_config: Any) -> Iterator[str]:
    """Names of all KV connectors of an engine. For MultiConnector, the names of its parts."""
    if kv_transfer_config is None:
        return
    yield str(kv_transfer_config.kv_connector)
    inner = (kv_transfer_config.kv_connector_extra_config or {}).get("connectors", [])
    yield from (str(each.get("kv_connector")) for each in inner if isinstance(each, Mapping))
