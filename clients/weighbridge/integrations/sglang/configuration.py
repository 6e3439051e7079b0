"""Settings of SGLang that determine where its loaders put weights, and whether an update changes all responses.

The destination of weights may depend on any setting. So all settings are compared, except those that identify this
start of the engine. An unnecessary recording costs only seconds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch

from weighbridge.integrations.engine_rank.fitting import refuse_updates
from weighbridge.integrations.sglang.releases import server_arguments

_OF_THIS_START = frozenset(
    {
        *("model_path", "tokenizer_path", "served_model_name", "revision", "weight_version"),
        *(
            "host",
            "port",
            "nccl_port",
            "grpc_port",
            "dist_init_addr",
            "random_seed",
            "api_key",
            "admin_api_key",
        ),
        *("download_dir", "log_level", "log_level_http"),
    }
)

_KEPT_KV = (
    "it keeps the KV cache of prompts outside the engine, where a flush does not clear it and no "
    "entry names the weights that computed it"
)
_KEEP_OLD_RESULTS = {
    "hicache_storage_backend": _KEPT_KV,
    "enable_lmcache": _KEPT_KV,
    "language_only": "other servers encode its images, videos and audio, and those keep their weights",
}
"""Settings with which an engine would continue to use results of old weights, with the reason."""

_WITHOUT_WEIGHTS = frozenset({"", "NONE", "NGRAM", "UNO"})
"""Algorithms of speculative decoding that draft without a model."""


def check_updatable(arguments: Mapping[str, Any]) -> None:
    """Refuse updates of an engine whose responses would still be computed from old weights in part.

    Args:
        arguments: the engine's whole configuration, by the names of SGLang's ``ServerArgs``.

    Raises:
        FailedPrecondition: names the setting.
    """
    for setting, why in _KEEP_OLD_RESULTS.items():
        if arguments.get(setting):
            option = f"--{setting.replace('_', '-')}"
            refuse_updates(option, why, f"start the engine without {option}")


def drafter_of(arguments: Mapping[str, Any]) -> str:
    """Name of an engine's drafter in errors, if updates do not fill it; empty if there is no drafter with weights.

    Args:
        arguments: as for `check_updatable`.
    """
    algorithm = str(arguments.get("speculative_algorithm") or "")
    if algorithm.upper() in _WITHOUT_WEIGHTS:
        return ""
    path = arguments.get("speculative_draft_model_path")
    return f"the drafter{f' {path}' if path else ''} of --speculative-algorithm {algorithm}"


def configuration_of(model: torch.nn.Module) -> str:
    """A string that is equal whenever the loader of a model makes the same choices on this rank."""
    from sglang.srt.distributed.parallel_state import get_moe_ep_group, get_pp_group, get_tp_group
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    groups = (get_tp_group(), get_pp_group(), get_moe_ep_group())
    experts = get_global_expert_location_metadata()
    return json.dumps(
        {
            "sglang": version("sglang"),
            "model": f"{type(model).__module__}.{type(model).__qualname__}",
            "config": str(getattr(model, "config", "")),
            "rank": [group.rank_in_group for group in groups],
            "arguments": {k: v for k, v in server_arguments().items() if k not in _OF_THIS_START},
            "environment": {k: v for k, v in os.environ.items() if k.startswith("SGLANG_")},
            # experts move while an engine runs if it balances their load
            "experts": None if experts is None else experts.physical_to_logical_map_cpu.tolist(),
        },
        sort_keys=True,
        default=str,
    )
