"""What can be set about a service."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """Settings of one service process.

    Attributes:
        store: folder that keeps everything.
        exports: folder under which exports that are asked for over HTTP are written; by default ``exports`` in the
            store's folder.
        memory_budget: most bytes of shared memory for images; what does not fit goes to files in the store's folder.
        receive_timeout: seconds without a word from any rank after which a version being received is given up.
        declare_timeout: seconds that a rank waits for the others to declare their layouts.
        publish_attempts: how often making a version durable is tried.
        image_wait: seconds that a push waits for an image while all room for images is taken.
        max_receiving: versions of all models together that may be received at one time.
        drain_seconds: how long shutting down waits for pushes and publications that are under way.
        grpc_workers: most threads for gRPC calls, made as needed; each running push, pull and watch takes one. A quarter of
            them may be watches.
    """

    store: Path
    exports: Path | None = None
    memory_budget: int = 8 << 30
    receive_timeout: float = 300.0
    declare_timeout: float = 600.0
    publish_attempts: int = 5
    image_wait: float = 60.0
    max_receiving: int = 64
    drain_seconds: float = 30.0
    grpc_workers: int = 1024

    @property
    def exports_folder(self) -> Path:
        """Where exports go."""
        return self.exports or self.store / "exports"
