"""Hooks into SGLang: the plug-in wraps five of its functions, through SGLang's registry of hooks if it has one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from weighbridge.errors import WeighbridgeError
from weighbridge.follow.wanted import (
    ACTION,
    COMPARE,
    DISCARD,
    EVIDENCE,
    LOAD_FORMAT,
    PREPARE,
    REPORTED,
    STATUS,
    Wanted,
)
from weighbridge.integrations.sglang import releases


def register() -> None:
    """Install the plug-in.

    The entry point ``weighbridge`` of ``sglang.srt.plugins`` names it; SGLang calls it once in every process.
    """
    hooks_of_starts = {releases.CONNECT: connect, releases.LOAD_FIRST: load_first}
    releases.register(hooks_of_starts | hooks_of_updates())


def hooks_of_updates() -> dict[str, releases.Hook]:
    """Hooks by the names of the functions that they wrap."""
    return {
        releases.present(releases.UPDATE): update,
        releases.present(releases.CONTROL): control,
        releases.FLUSH: releases.flush,
    }


def connect(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Model paths that begin with ``weighbridge://``."""
    from weighbridge.integrations.sglang import connecting

    return connecting.connect(original, *args, **kwargs)


def load_first(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The first load from such a path."""
    from weighbridge.integrations.sglang import connecting

    return connecting.load_first(original, *args, **kwargs)


def update(
    original: Callable[..., Any], updater: Any, named_tensors: Any, load_format: str | None = None
) -> tuple[bool, str]:
    """``/update_weights_from_tensor``: returns an error as a response, where SGLang would end the engine.

    Does not need ``--custom-weight-loader``.
    """
    if load_format != LOAD_FORMAT:
        return original(updater, named_tensors=named_tensors, load_format=load_format)  # type: ignore[no-any-return]
    try:
        return releases.run_loader(original, updater, named_tensors)
    except WeighbridgeError as error:
        return False, str(error)


def control(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """``/weights_checker``: prepare, discard, proofs, and status.

    Its requests reach every rank while the engine serves.
    """
    if not request.action.startswith(ACTION):
        return original(manager, request)
    from sglang.srt.managers.io_struct import CheckWeightsReqOutput

    from weighbridge.integrations.sglang import model as of_sglang
    from weighbridge.integrations.sglang.model import number_to_update_to, sglang_rank, source_of

    rank = sglang_rank(manager.tp_worker.model_runner.model)
    action, _, order = request.action.partition(" ")
    more: dict[str, Any] = {}
    try:
        if action == PREPARE:
            wanted = Wanted.from_json(order)
            rank.prepare_all(number_to_update_to(rank, wanted), source_of(wanted))
        elif action == DISCARD:
            rank.discard()
        elif action == EVIDENCE:
            known, _, wanted_text = order.partition(" ")
            more = {"evidence": of_sglang.evidence(rank, known.split(","), Wanted.from_json(wanted_text))}
        elif action == COMPARE:
            more = {"proofs": rank.engine.ranks.all_gather_object(rank.compare_with_load().to_json())}
        elif action != STATUS:
            return CheckWeightsReqOutput(success=False, message=f"there is no action {action!r}")
        elif order == REPORTED:
            rank.end_reports()
    except WeighbridgeError as error:
        return CheckWeightsReqOutput(success=False, message=str(error))
    ranks = rank.engine.ranks.all_gather_object(rank.status().to_json())
    more["asleep"] = sorted(getattr(manager, "offload_tags", ()))  # of /release_memory_occupation
    return CheckWeightsReqOutput(success=True, message=json.dumps({"ranks": ranks, **more}))
