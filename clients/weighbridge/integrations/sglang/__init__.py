"""SGLang integration: a server loads its first weights from the service, and can switch to any version while it runs.

Each rank fetches only its own slices.

From SGLang 0.5.12 on, it is enough to install weighbridge next to SGLang, which finds `plugin` by its entry point in
every process. A model path ``weighbridge://HOST:PORT/NAMESPACE/NAME@VERSION`` makes a server start from the service.
For weight updates, set ``load_format`` to `load`. `weighbridge.follow.sglang` drives a running server over HTTP.
"""

# May import: `engine_rank`, `follow`, `_lazy`, `_clients` and folders below, and SGLang.
#
# - `plugin`: hooks into SGLang.
# - `releases`: names in different releases of SGLang.
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
    """Custom weight loader of SGLang: load a version into the parameters of all ranks.

    Args:
        model: this rank's model.
        named_tensors: one pair; its name is a `weighbridge.follow.wanted.Wanted` as JSON, its tensor is ignored.

    Raises:
        FailedPrecondition: a rank failed; all ranks keep their weights.
        InvalidArgument: the request does not name a version.
    """
    from weighbridge.follow.wanted import Wanted
    from weighbridge.integrations.sglang import releases
    from weighbridge.integrations.sglang.model import number_to_update_to, sglang_rank, source_of

    if len(named_tensors) != 1:
        raise InvalidArgument(f"got {len(named_tensors)} names, expected one that contains the wanted version")
    wanted = Wanted.from_json(named_tensors[0][0])
    rank = sglang_rank(model)
    rank.apply(number_to_update_to(rank, wanted), source_of(wanted))
    releases.forget_embeddings()
