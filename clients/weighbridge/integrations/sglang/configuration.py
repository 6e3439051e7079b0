"""Settings on which it depends, besides a model's parameters, where SGLang's loaders put weights.

On anything in its configuration, so all of that counts but what names this start of the engine; to record once too often costs seconds.
"""

from __future__ import annotations

import json
import os
from importlib.metadata import version

import torch

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


def configuration_of(model: torch.nn.Module) -> str:
    """A text that is the same whenever the loader of a model makes the same choices in this rank."""
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
            # experts move while an engine runs, if it balances their load
            "experts": None if experts is None else experts.physical_to_logical_map_cpu.tolist(),
        },
        sort_keys=True,
        default=str,
    )
