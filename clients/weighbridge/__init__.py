"""Weighbridge moves model weights from the machines that train to the machines that serve.

::

    trainer = TrainerClient("127.0.0.1:50051")
    trainer.register_model("acme/smol", hf_dir)
    trainer.push("acme/smol", model.sharded_state_dict(), step=10, rank=rank, world_size=n)   # Megatron-core
    trainer.push_state_dict("acme/smol", model, step=10)                                      # torch: FSDP2, DDP

    engine = EngineClient("127.0.0.1:50051")
    for name, tensor in engine.pull("acme/smol@latest", layout=TensorParallel(size=2, rank=0)):
        ...

- `TrainerClient`: pushes of ranks, training states, restores, folders. `CheckpointManager` does it for a loop.
- `EngineClient`, `AsyncEngineClient`: pulls and watches of refs. `EngineReporter` reports what an engine serves.
- `Client`: models, versions, refs and what is kept; the other clients have it, too. `Signatures` signs versions and
  checks signatures.
- `weighbridge.errors`: what can go wrong, named by what the caller can do about it.
- `weighbridge.integrations`: vLLM, SGLang, transformers, Megatron, frameworks of reinforcement learning.
- `weighbridge.follow`, `weighbridge.relay`: the agent beside an engine; step folders between machines.

Names are imported when first used. What begins with an underscore is private; `weighbridge.v1` is the wire contract.
"""

# May import: neither storage nor service. A folder imports only those listed before it:
#
# - `errors`: what can go wrong, named by what the caller can do about it; `_version` is this distribution's.
# - `_core`: the vocabulary: boxes, layouts, dtypes, resources.
# - `_tracing`: spans of OpenTelemetry, where they are wanted.
# - `_transport`: messages, channels and streams on the wire.
# - `_memory`: memory that is shared with the service, and copies.
# - `_formats`: files and processes in which weights lie, as streams.
# - `_lane`: the local lane's client.
# - `_clients`: clients, pushes and pulls.
# - `_trainers`: the client of a trainer rank: pushes, training states, restores and folders.
# - `_signing`: signatures of versions.
# - `_reporting`: reports of what an engine serves.
# - `aio`, `_lazy`, `relay`, `_comparing`: the asyncio client; lazy tensors; step folders between machines; what has
# changed between versions.
# - `follow`: the agent beside an engine.
# - `integrations`: trainers, frameworks of reinforcement learning, and inference engines.
# - `_cli`: the command line.

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from weighbridge._version import VERSION

# Public names, which modules have in `__all__`: written by protos/derive.py, not by hand.
if TYPE_CHECKING:
    from weighbridge._clients.calls.pull_calls import PullPlan
    from weighbridge._clients.client import Client
    from weighbridge._clients.engine import EngineClient, Pull
    from weighbridge._clients.filling import Filled
    from weighbridge._clients.push_handle import PushHandle, PushReport
    from weighbridge._clients.push_options import PushOptions
    from weighbridge._clients.transport import ConnectionOptions
    from weighbridge._core.boxes import Box
    from weighbridge._core.dtypes import DType
    from weighbridge._core.engines.facts import Engine
    from weighbridge._core.engines.golden import GoldenPrompt
    from weighbridge._core.engines.status import AgentStatus
    from weighbridge._core.layouts import Layout, Placement, Shard, TensorSpec
    from weighbridge._core.megatron_rank import MegatronRank
    from weighbridge._core.metadata import BaseVersion, Metadata
    from weighbridge._core.reports.collection import (
        Collection,
        DeletedVersion,
        KeptVersion,
        SweptVersion,
        WaitingVersion,
    )
    from weighbridge._core.reports.usage import Quota, Usage
    from weighbridge._core.resources import (
        HELD_CANDIDATE,
        HELD_NONFINITE,
        REF_LATEST,
        REF_LIVE,
        DeletedModel,
        Gate,
        Model,
        Protection,
        RefApproval,
        RefRequest,
        Retention,
        Signature,
        Verification,
        Version,
        VersionState,
        WarmMemory,
    )
    from weighbridge._core.slices import Boxes, ExpertParallel, FullTensors, LayoutRequest, TensorParallel
    from weighbridge._core.tensor_spaces import TensorSpace
    from weighbridge._formats.host_slices import HostSlices, Slices
    from weighbridge._formats.push_sources import HeldShards, ShardSource, StreamSource
    from weighbridge._reporting.reporter import EngineReporter
    from weighbridge._signing.checking import Signed
    from weighbridge._signing.signatures import Signatures
    from weighbridge._signing.signer import Signer
    from weighbridge._signing.steps import Signing
    from weighbridge._signing.trust import Trusted
    from weighbridge._trainers.checkpoint_manager import CheckpointManager
    from weighbridge._trainers.states.random_states import RandomStates
    from weighbridge._trainers.trainer import TrainerClient
    from weighbridge._trainers.training_files import WrittenCheckpoint
    from weighbridge._transport.credentials import Credentials
    from weighbridge.aio.client import AsyncEngineClient
    from weighbridge.aio.pulls import AsyncPull
    from weighbridge.errors import (
        AlreadyExists,
        Conflict,
        DataLoss,
        DeadlineExceeded,
        FailedPrecondition,
        InvalidArgument,
        LayoutError,
        NotFound,
        PermissionDenied,
        ResourceExhausted,
        Unauthenticated,
        Unavailable,
        VersionFailed,
        WeighbridgeError,
    )

__all__ = [
    "HELD_CANDIDATE",
    "HELD_NONFINITE",
    "REF_LATEST",
    "REF_LIVE",
    "AgentStatus",
    "AlreadyExists",
    "AsyncEngineClient",
    "AsyncPull",
    "BaseVersion",
    "Box",
    "Boxes",
    "CheckpointManager",
    "Client",
    "Collection",
    "Conflict",
    "ConnectionOptions",
    "Credentials",
    "DType",
    "DataLoss",
    "DeadlineExceeded",
    "DeletedModel",
    "DeletedVersion",
    "Engine",
    "EngineClient",
    "EngineReporter",
    "ExpertParallel",
    "FailedPrecondition",
    "Filled",
    "FullTensors",
    "Gate",
    "GoldenPrompt",
    "HeldShards",
    "HostSlices",
    "InvalidArgument",
    "KeptVersion",
    "Layout",
    "LayoutError",
    "LayoutRequest",
    "MegatronRank",
    "Metadata",
    "Model",
    "NotFound",
    "PermissionDenied",
    "Placement",
    "Protection",
    "Pull",
    "PullPlan",
    "PushHandle",
    "PushOptions",
    "PushReport",
    "Quota",
    "RandomStates",
    "RefApproval",
    "RefRequest",
    "ResourceExhausted",
    "Retention",
    "Shard",
    "ShardSource",
    "Signature",
    "Signatures",
    "Signed",
    "Signer",
    "Signing",
    "Slices",
    "StreamSource",
    "SweptVersion",
    "TensorParallel",
    "TensorSpace",
    "TensorSpec",
    "TrainerClient",
    "Trusted",
    "Unauthenticated",
    "Unavailable",
    "Usage",
    "Verification",
    "Version",
    "VersionFailed",
    "VersionState",
    "WaitingVersion",
    "WarmMemory",
    "WeighbridgeError",
    "WrittenCheckpoint",
]
_MODULE_OF = {
    "PullPlan": "_clients.calls.pull_calls",
    "Client": "_clients.client",
    "EngineClient": "_clients.engine",
    "Pull": "_clients.engine",
    "Filled": "_clients.filling",
    "PushHandle": "_clients.push_handle",
    "PushReport": "_clients.push_handle",
    "PushOptions": "_clients.push_options",
    "ConnectionOptions": "_clients.transport",
    "Box": "_core.boxes",
    "DType": "_core.dtypes",
    "Engine": "_core.engines.facts",
    "GoldenPrompt": "_core.engines.golden",
    "AgentStatus": "_core.engines.status",
    "Layout": "_core.layouts",
    "Placement": "_core.layouts",
    "Shard": "_core.layouts",
    "TensorSpec": "_core.layouts",
    "MegatronRank": "_core.megatron_rank",
    "BaseVersion": "_core.metadata",
    "Metadata": "_core.metadata",
    "Collection": "_core.reports.collection",
    "DeletedVersion": "_core.reports.collection",
    "KeptVersion": "_core.reports.collection",
    "SweptVersion": "_core.reports.collection",
    "WaitingVersion": "_core.reports.collection",
    "Quota": "_core.reports.usage",
    "Usage": "_core.reports.usage",
    "HELD_CANDIDATE": "_core.resources",
    "HELD_NONFINITE": "_core.resources",
    "REF_LATEST": "_core.resources",
    "REF_LIVE": "_core.resources",
    "DeletedModel": "_core.resources",
    "Gate": "_core.resources",
    "Model": "_core.resources",
    "Protection": "_core.resources",
    "RefApproval": "_core.resources",
    "RefRequest": "_core.resources",
    "Retention": "_core.resources",
    "Signature": "_core.resources",
    "Verification": "_core.resources",
    "Version": "_core.resources",
    "VersionState": "_core.resources",
    "WarmMemory": "_core.resources",
    "Boxes": "_core.slices",
    "ExpertParallel": "_core.slices",
    "FullTensors": "_core.slices",
    "LayoutRequest": "_core.slices",
    "TensorParallel": "_core.slices",
    "TensorSpace": "_core.tensor_spaces",
    "HostSlices": "_formats.host_slices",
    "Slices": "_formats.host_slices",
    "HeldShards": "_formats.push_sources",
    "ShardSource": "_formats.push_sources",
    "StreamSource": "_formats.push_sources",
    "EngineReporter": "_reporting.reporter",
    "Signed": "_signing.checking",
    "Signatures": "_signing.signatures",
    "Signer": "_signing.signer",
    "Signing": "_signing.steps",
    "Trusted": "_signing.trust",
    "CheckpointManager": "_trainers.checkpoint_manager",
    "RandomStates": "_trainers.states.random_states",
    "TrainerClient": "_trainers.trainer",
    "WrittenCheckpoint": "_trainers.training_files",
    "Credentials": "_transport.credentials",
    "AsyncEngineClient": "aio.client",
    "AsyncPull": "aio.pulls",
    "AlreadyExists": "errors",
    "Conflict": "errors",
    "DataLoss": "errors",
    "DeadlineExceeded": "errors",
    "FailedPrecondition": "errors",
    "InvalidArgument": "errors",
    "LayoutError": "errors",
    "NotFound": "errors",
    "PermissionDenied": "errors",
    "ResourceExhausted": "errors",
    "Unauthenticated": "errors",
    "Unavailable": "errors",
    "VersionFailed": "errors",
    "WeighbridgeError": "errors",
}
# Here they end.

__version__ = VERSION


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'weighbridge' has no attribute {name!r}")
    return getattr(importlib.import_module(f"weighbridge.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
