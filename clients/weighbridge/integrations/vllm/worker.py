"""What an agent beside a vLLM server can ask its workers, by ``/collective_rpc``. The load format puts it there by itself."""

from __future__ import annotations

from typing import Any

from weighbridge.errors import FailedPrecondition
from weighbridge.integrations.vllm.serving import ServingRank


class WorkerExtension:
    """Methods of every worker (``--worker-extension-cls``). They return at once: the engine stands still meanwhile."""

    weight_transfer_engine: Any

    def weighbridge_prepare(self, version: str) -> dict[str, Any]:
        """Begin to bring a version, named by its number, to this machine."""
        self._weighbridge_rank().prepare(int(version))
        return self.weighbridge_status()

    def weighbridge_status(self) -> dict[str, Any]:
        """What this worker serves and prepares."""
        return self._weighbridge_rank().status()

    def weighbridge_discard(self) -> None:
        """Give back the memory of what was prepared."""
        self._weighbridge_rank().discard()

    def _weighbridge_rank(self) -> ServingRank:
        rank = getattr(self.weight_transfer_engine, "rank", None)
        if not isinstance(rank, ServingRank):
            raise FailedPrecondition(
                "this engine takes no updates from weighbridge",
                fix="""start it with --weight-transfer-config '{"backend": "weighbridge"}'""",
            )
        return rank
