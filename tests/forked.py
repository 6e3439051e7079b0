"""Processes that have imported torch, Megatron and the service when they start: ranks, and those that tests kill.

They are forked from one server a test process, which has imported what its first user asks for and nothing later: so all
ask for the same. gRPC is among it, which starts no thread before there is a channel or a server; these would not survive a
fork, and the server makes none. Imports left to the forked process would cost it half a second of a core, several times what
else a rank does.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

from weighbridge.demo import ranks

PRELOAD = (
    *ranks.PRELOAD,
    "mbridge",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "pytest",
    "weighbridge.engine",
    "weighbridge.trainer",
    "weighbridge_service.bridges",
    "weighbridge_service.grpc_server",
    "weighbridge_service.lane_server",
    "weighbridge_service.metrics",
    "weighbridge_service.service",
)


def forking() -> ForkServerContext:
    """What starts such processes; the server is there by then, and imports."""
    ranks.start_server(PRELOAD)
    return multiprocessing.get_context("forkserver")
