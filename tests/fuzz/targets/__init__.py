"""Targets, by the name by which each is asked for.

- `texts`: names, references, scopes, conditions, sizes, ranges.
- `documents`: stored documents: heads, manifests, nodes of histories, and others.
- `files`: safetensors headers and indexes, pickles and archives of torch_dist.
- `wire`: messages and how they are framed: requests, responses, pieces, parts, the local lane.
- `layouts`: plans of declared and requested layouts.
- `access`: policies, tokens, keys.
- `models`: configs of models.
- `services`: a whole service: calls over gRPC, requests over HTTP, sessions of the local lane.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from tests.fuzz.target import Target

MODULES: Mapping[str, tuple[str, ...]] = {
    "texts": ("conditions", "references", "names", "scopes", "ranges", "hub-paths", "hosts"),
    "documents": (
        "heads",
        "manifests",
        "history-nodes",
        "small-documents",
    ),
    "files": ("safetensors", "safetensors-index", "torch-dist-metadata", "torch-dist-items"),
    "wire": ("messages", "pieces", "request-parts", "lane-frames", "lane-plans"),
    "layouts": ("push-plans", "layouts"),
    "access": ("policies", "tokens", "key-sets"),
    "models": ("configs",),
    "services": ("grpc", "http", "lane"),
}
"""Targets by module: a process imports only the module of its target."""
NAMES = tuple(name for names in MODULES.values() for name in names)


def find(name: str) -> Target:
    """The target of this name. Raises KeyError."""
    for module, names in MODULES.items():
        if name in names:
            found: Target = next(
                target for target in importlib.import_module(f"{__name__}.{module}").TARGETS if target.name == name
            )
            return found
    raise KeyError(name)
