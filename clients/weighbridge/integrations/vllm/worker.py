"""Worker extension of vLLM: what an agent beside a server can ask its workers, by ``/collective_rpc``. The load format puts it there."""

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
    """Methods of every worker (``--worker-extension-cls``). Each answers with the rank's `Status` as JSON, which worker it is (``engine``, ``rank``,
    ``ranks`` of the engine, and ``group``: of the ranks that agree), and ``failed``. The API server adds ``engines``: how many it has.

    None of them raises: a failure is a text under ``failed`` in the answer. vLLM reads its workers' answers in order and stops at the first that
    raised; what the others have answered would be taken for answers to the next call. All but
    `weighbridge_stage`, `weighbridge_apply`, `weighbridge_undo` and `weighbridge_compare_with_load` return at once, because the engine stands still meanwhile.
    """

    weight_transfer_engine: Any
    model_runner: Any

    def weighbridge_connect(self, info: str) -> dict[str, Any]:
        """Say where versions come from: JSON with ``model``, ``server`` and ``lane``, of which any may be left out; ``reported`` by an agent
        that reports to the service what the engine serves; ``when_asleep``, the policy for updates while weights sleep; and ``stale_drafter``, the policy for updates that leave a drafter behind."""
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
        """Begin to bring a version, named by its number, to this machine. Here and below, ``draft`` names the drafter's version that goes with it, for
        a drafter that is a model of its own."""
        return self._weighbridge_do(lambda rank: rank.prepare(int(version), _source(rank, draft)))

    def weighbridge_prepare_early(self, version: str) -> dict[str, Any]:
        """Begin to bring a version, named by its number, as its parts arrive."""
        return self._weighbridge_do(lambda rank: rank.prepare_early(int(version)))

    def weighbridge_stage(self, version: str, draft: str = "") -> dict[str, Any]:
        """Have all bytes of a version, named by its number, on this machine."""
        return self._weighbridge_do(lambda rank: rank.stage(int(version), _source(rank, draft)))

    def weighbridge_apply(self, version: str, draft: str = "") -> dict[str, Any]:
        """Bring a version, named by its number, to the parameters, while nothing is being computed."""
        return self._weighbridge_do(
            lambda rank: rank.apply(int(version), _source(rank, draft)), self._weighbridge_settle
        )

    def weighbridge_undo(self, version: str, draft: str = "") -> dict[str, Any]:
        """Go back from a version, named by its number, to the previous one, if this engine has it."""
        return self._weighbridge_do(
            lambda rank: rank.undo(int(version), _source(rank, draft)), self._weighbridge_settle
        )

    def weighbridge_status(self) -> dict[str, Any]:
        """Status of this worker: what it serves, and what it prepares."""
        return self._weighbridge_do(lambda _rank: None)

    def weighbridge_evidence(self, known: str) -> dict[str, Any]:
        """Digests of the parameters as this worker computes with them, and what it takes of a version, unless that is among those that the caller knows: digests, with
        commas between them."""
        found: dict[str, Any] = {}

        def take(rank: EngineRank) -> None:
            found.update(rank.evidence(known.split(",")).to_json())

        return {**self._weighbridge_do(take), "evidence": found}

    def weighbridge_compare_with_load(self) -> dict[str, Any]:
        """Load the version that this worker has again by vLLM's own loader, while nothing is being computed, and say what that has changed."""
        found: dict[str, Any] = {}

        def compare(rank: EngineRank) -> None:
            found.update(rank.compare_with_load().to_json())

        return {**self._weighbridge_do(compare, self._weighbridge_settle), "proof": found}

    def weighbridge_discard(self) -> dict[str, Any]:
        """Give back the memory of what was prepared."""
        return self._weighbridge_do(EngineRank.discard)

    def _weighbridge_settle(self) -> None:
        _settle(self)
        # a session that another caller has left open: vLLM would refuse the next one, on every worker
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
    """Bring what waits into the parameters of a worker that has just been woken up. The engine's core calls it, on all workers.

    Args:
        worker: of vLLM.
        lost, last: as for `EngineRank.wake`.

    Returns:
        The version that is ``served``; whether it has ``changed``; whether the worker ``owes`` one, before which the engine must not compute; and what
        has ``failed``. Nothing of a worker that takes no updates from weighbridge. Raises nothing, as `WorkerExtension`.
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
    """Source of an order that names this version of a drafter, or none.

    Raises:
        InvalidArgument: it names it otherwise than by its number.
    """
    check_draft(draft)
    return rank.source and rank.source.with_draft(draft)


def _settle(worker: Any) -> None:
    torch.accelerator.synchronize()
    reset_adapters(worker.model_runner)
