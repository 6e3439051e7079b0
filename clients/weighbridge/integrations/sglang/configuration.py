"""Settings on which it depends, besides a model's parameters, where SGLang's loaders put weights.

On anything in its configuration, so all of that counts but what names this start of the engine; to record once too often costs seconds.
"""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from typing import Any

import torch

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


def configuration_of(model: torch.nn.Module) -> str:
    """A text that is the same whenever the loader of a model makes the same choices in this rank."""
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata
    from sglang.srt.runtime_context import get_context

    here = parallel()
    experts = get_global_expert_location_metadata()
    arguments: dict[str, Any] = get_context().resolved_server_args_dict()
    return json.dumps(
        {
            "sglang": version("sglang"),
            "model": f"{type(model).__module__}.{type(model).__qualname__}",
            "config": str(getattr(model, "config", "")),
            "rank": [here.tp_rank, here.pp_rank, here.moe_ep_rank],
            "arguments": {k: v for k, v in arguments.items() if k not in _OF_THIS_START},
            "environment": {k: v for k, v in os.environ.items() if k.startswith("SGLANG_")},
            # experts move while an engine runs, if it balances their load
            "experts": None if experts is None else experts.physical_to_logical_map_cpu.tolist(),
        },
        sort_keys=True,
        default=str,
    )


def parallel() -> Any:
    """SGLang's sizes and groups of this process."""
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()
