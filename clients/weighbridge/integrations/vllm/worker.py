"""Worker extension of vLLM: methods of workers that an agent calls through ``/collective_rpc``.

The load format installs it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from weighbridge.errors import FailedPrecondition
from weighbridge.follow.engines import stale_drafter_of, when_asleep_of
from weighbridge.integrations.engine_rank.rank import EngineRank
from weighbridge.integrations.engine_rank.source import ModelSource, check_draft
from weighbridge.integrations.vllm.releases import place_of, reset_adapters
from weighbridge.integrations.vllm.settings import source_for


class WorkerExtension:
    """Methods of every worker (``--worker-extension-cls``). Each returns the rank's `Status` as JSON, the identity of
    the worker (``engine``, ``rank``, ``ranks`` of the engine, and ``group`` of the ranks that agree), and ``failed``.
    The API server adds ``engines``, the number of its engines.

    They do not raise: a failure is a string under ``failed`` in the response. vLLM reads its workers' responses in
    order and stops at the first that raised; it would take the remaining responses for those of the next call. All but
    `weighbridge_stage`, `weighbridge_apply`, `weighbridge_undo` and `weighbridge_compare_with_load` return immediately,
    because the engine does not compute meanwhile.
    """

    weight_transfer_engine: Any
    model_runner: Any

    def weighbridge_connect(self, info: str) -> dict[str, Any]:
        """Set the source of versions: JSON with ``model``, ``server`` and ``lane``, all optional; ``reported``, if an
        agent reports the served version to the service; ``when_asleep``, the policy for updates while weights sleep;
        and ``stale_drafter``, the policy for updates that leave a drafter behind.
        """
        said = json.loads(info)

        def connect(rank: EngineRank) -> None:
            if said.get("reported"):
                rank.end_reports()
            if "when_asleep" in said:
                rank.when_asleep = when_asleep_of(said["when_asleep"])
            if "stale_drafter" in said:
                rank.stale_drafter = stale_drafter_of(said["stale_drafter"])
            rank.connect(source_for(rank.source, said.get("model"), said.get("server"), said.get("lane")))

        return self._weighbridge_do(connect)

    def weighbridge_prepare(self, version: str, draft: str = "") -> dict[str, Any]:
        """Begin to fetch a version, named by its number, to this machine.

        Here and below, ``draft`` names the drafter's version that belongs to it, if the drafter is a separate model.
        """
        return self._weighbridge_do(lambda rank: rank.prepare(int(version), _source(rank, draft)))

    def weighbridge_prepare_early(self, version: str) -> dict[str, Any]:
        """Begin to fetch a version, named by its number, as its parts arrive."""
        return self._weighbridge_do(lambda rank: rank.prepare_early(int(version)))

    def weighbridge_stage(self, version: str, draft: str = "") -> dict[str, Any]:
        """Wait until all bytes of a version, named by its number, are on this machine."""
        return self._weighbridge_do(lambda rank: rank.stage(int(version), _source(rank, draft)))

    def weighbridge_apply(self, version: str, draft: str = "") -> dict[str, Any]:
        """Write a version, named by its number, into the parameters while the model does not compute."""
        return self._weighbridge_do(
            lambda rank: rank.apply(int(version), _source(rank, draft)), self._weighbridge_settle
        )

    def weighbridge_undo(self, version: str, draft: str = "") -> dict[str, Any]:
        """Roll back from a version, named by its number, to the previous one, if this engine has that version."""
        return self._weighbridge_do(
            lambda rank: rank.undo(int(version), _source(rank, draft)), self._weighbridge_settle
        )

    def weighbridge_status(self) -> dict[str, Any]:
        """Status of this worker: the version that it serves, and the one that it prepares."""
        return self._weighbridge_do(lambda _rank: None)

    def weighbridge_evidence(self, known: str) -> dict[str, Any]:
        """Digests of the parameters that this worker computes with, and its recording, unless the caller already has
        it.

        ``known`` contains digests of the caller's recordings, separated by commas.
        """
        found: dict[str, Any] = {}

        def take(rank: EngineRank) -> None:
            found.update(rank.evidence(known.split(",")).to_json())

        return {**self._weighbridge_do(take), "evidence": found}

    def weighbridge_compare_with_load(self) -> dict[str, Any]:
        """Load this worker's version again with vLLM's own loader while the model does not compute, and report what
        changed.
        """
        found: dict[str, Any] = {}

        def compare(rank: EngineRank) -> None:
            found.update(rank.compare_with_load().to_json())

        return {**self._weighbridge_do(compare, self._weighbridge_settle), "proof": found}

    def weighbridge_discard(self) -> dict[str, Any]:
        """Release the memory of a prepared version."""
        return self._weighbridge_do(EngineRank.discard)

    def _weighbridge_settle(self) -> None:
        _settle(self)
        # another caller may have left a session open: vLLM would refuse the next one on every worker
        self._weight_update_active = False

    def _weighbridge_do(
        self, what: Callable[[EngineRank], None], then: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        place = place_of(self)
        rank = getattr(self.weight_transfer_engine, "rank", None)
        try:
            if not isinstance(rank, EngineRank):
                raise FailedPrecondition(
                    "this engine takes no updates from weighbridge",
                    fix="""start it with --weight-transfer-config '{"backend": "weighbridge"}'""",
                )
            what(rank)
            then()
        except Exception as error:
            status = rank.status().to_json() if isinstance(rank, EngineRank) else {}
            return {**status, **place, "failed": str(error) or repr(error)}
        return {**rank.status().to_json(), **place, "group": rank.engine.ranks.size, "failed": ""}


def bring_after_sleep(worker: Any, lost: bool, last: bool) -> dict[str, Any]:
    """Write the waiting version into the parameters of a worker after its wake-up.

    The engine's core calls this on all workers.

    Args:
        worker: vLLM's worker.
        lost, last: as for `EngineRank.wake`.

    Returns:
        The version that is ``served``; whether it has ``changed``; whether the worker ``owes`` one, without which the
        engine must not compute; and what has ``failed``. Empty for a worker that receives no updates from weighbridge.
        Does not raise, as `WorkerExtension`.
    """
    rank = getattr(getattr(worker, "weight_transfer_engine", None), "rank", None)
    if not isinstance(rank, EngineRank):
        return {}
    had, failed = rank.held, ""
    try:
        rank.wake(lost=lost, last=last)
        if rank.held is not had:
            _settle(worker)
    except Exception as error:
        failed = str(error) or repr(error)
    return {
        "served": rank.status().served,
        "changed": rank.held is not had,
        "owes": rank.owes_a_version,
        "failed": failed,
    }


def _source(rank: EngineRank, draft: str) -> ModelSource | None:
    """Source of versions with this drafter's version, or without one.

    Raises:
        InvalidArgument: the drafter's version is not named by its number.
    """
    check_draft(draft)
    return rank.source and rank.source.with_draft(draft)


def _settle(worker: Any) -> None:
    torch.accelerator.synchronize()
    reset_adapters(worker.model_runner)
