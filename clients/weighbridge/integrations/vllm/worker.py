"""Worker extension of vLLM: what an agent beside a server can ask its workers, by ``/collective_rpc``. The load format puts it there."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from weighbridge.errors import FailedPrecondition
from weighbridge.integrations.engine_rank.rank import EngineRank
from weighbridge.integrations.vllm.releases import reset_adapters
from weighbridge.integrations.vllm.settings import source_for


class WorkerExtension:
    """Methods of every worker (``--worker-extension-cls``). Each answers with the rank's `Status` as JSON, and ``failed``.

    None of them raises: a failure is a text under ``failed`` in the answer. vLLM reads its workers' answers in order and stops at the first that
    raised; what the others have answered would be taken for answers to the next call. All but `weighbridge_apply` return at once, because the
    engine stands still meanwhile.
    """

    weight_transfer_engine: Any
    model_runner: Any

    def weighbridge_connect(self, info: str) -> dict[str, Any]:
        """Say where versions come from: JSON with ``model``, ``server`` and ``lane``, of which any may be left out; and ``reported`` by an agent
        that reports to the service what the engine serves."""
        said = json.loads(info)

        def connect(rank: EngineRank) -> None:
            if said.get("reported"):
                rank.end_reports()
            rank.connect(source_for(rank.source, said.get("model"), said.get("server"), said.get("lane")))

        return self._weighbridge_do(connect)

    def weighbridge_prepare(self, version: str) -> dict[str, Any]:
        """Begin to bring a version, named by its number, to this machine."""
        return self._weighbridge_do(lambda rank: rank.prepare(int(version)))

    def weighbridge_apply(self, version: str) -> dict[str, Any]:
        """Bring a version, named by its number, to the parameters, while nothing is being computed."""

        def apply(rank: EngineRank) -> None:
            rank.apply(int(version))
            torch.accelerator.synchronize()
            reset_adapters(self.model_runner)
            # a session that somebody has begun and left: vLLM would refuse the next one, on every worker
            self._weight_update_active = False

        return self._weighbridge_do(apply)

    def weighbridge_status(self) -> dict[str, Any]:
        """What this worker serves and prepares."""
        return self._weighbridge_do(lambda _rank: None)

    def weighbridge_discard(self) -> dict[str, Any]:
        """Give back the memory of what was prepared."""
        return self._weighbridge_do(EngineRank.discard)

    def _weighbridge_do(self, what: Callable[[EngineRank], None]) -> dict[str, Any]:
        rank = getattr(self.weight_transfer_engine, "rank", None)
        try:
            if not isinstance(rank, EngineRank):
                raise FailedPrecondition(
                    "this engine takes no updates from weighbridge",
                    fix="""start it with --weight-transfer-config '{"backend": "weighbridge"}'""",
                )
            what(rank)
        except Exception as error:
            status = rank.status().to_json() if isinstance(rank, EngineRank) else {}
            return {**status, "failed": str(error) or repr(error)}
        return {**rank.status().to_json(), "failed": ""}
