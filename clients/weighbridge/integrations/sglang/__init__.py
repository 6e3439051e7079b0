"""Adapter to SGLang: a server starts from the service, and takes over any version while it runs; each rank brings only what it holds.

To install weighbridge next to SGLang is enough from 0.5.12 on: SGLang finds `plugin` by its entry point, in every process. A model path
``weighbridge://HOST:PORT/NAMESPACE/NAME@VERSION`` makes a server start from the service, `load` is what updates of weights name as their
``load_format``, and `weighbridge.follow.sglang` drives a running server over HTTP.
"""

# May import: `engine_rank`, `follow`, `_lazy`, `_clients` and folders below, and SGLang.
#
# - `plugin`: hooks into SGLang.
# - `releases`: what SGLang's releases call it.
# - `external`: the hooks of updates, for SGLang 0.5.10.
# - `connecting`: a server's start from the service.
# - `configuration`: settings that decide where loaders put weights.
# - `model`: a rank's model, to the contract.

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from weighbridge.errors import InvalidArgument

if TYPE_CHECKING:
    import torch


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, Any]]) -> None:
    """Bring a version into the parameters of all ranks: a custom weight loader of SGLang's.

    Args:
        model: this rank's.
        named_tensors: one pair; its name is a `weighbridge.follow.wanted.Wanted` as JSON, its tensor says nothing.

    Raises:
        FailedPrecondition: it went wrong for a rank; all of them keep what they have.
        InvalidArgument: what came does not say which version is wanted.
    """
    from weighbridge.follow.wanted import Wanted
    from weighbridge.integrations.sglang import releases
    from weighbridge.integrations.sglang.model import number_to_update_to, sglang_rank, source_of

    if len(named_tensors) != 1:
        raise InvalidArgument(f"{len(named_tensors)} names came, and one has to say which version is wanted")
    wanted = Wanted.from_json(named_tensors[0][0])
    rank = sglang_rank(model)
    rank.apply(number_to_update_to(rank, wanted), source_of(wanted))
    releases.forget_embeddings()
