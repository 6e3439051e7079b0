"""Shards of Megatron's model chunks in training.

Chunks are wrapped, and a rank has one for each of its virtual pipeline stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def sharded_chunks(chunks: Sequence[Any]) -> dict[str, Any]:
    """Return Megatron-core's own sharded state dict of each of a rank's chunks, without wrappers (DDP, Float16Module).

    Returns:
        The state dicts by ``model0``, ``model1`` and so on, as `TrainerClient.push` accepts them.
    """
    from megatron.core import parallel_state

    if len(chunks) == 1:
        return {"model0": _sharded(chunks[0])}
    # in releases whose chunks do not know their virtual stage, keys depend on the current stage of the process
    stage_before = parallel_state.get_virtual_pipeline_model_parallel_rank()
    found = {}
    try:
        for stage, chunk in enumerate(chunks):
            parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
            found[f"model{stage}"] = _sharded(chunk)
    finally:
        parallel_state.set_virtual_pipeline_model_parallel_rank(stage_before)
    return found


def unwrapped(chunk: Any) -> Any:
    """Return a module without its wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _sharded(chunk: Any) -> Any:
    from megatron.core.transformer import utils

    # stages with multi-token prediction do not find the group themselves
    complete = getattr(utils, "ensure_metadata_has_dp_cp_group", lambda metadata: metadata)
    return unwrapped(chunk).sharded_state_dict(metadata=complete(None))
