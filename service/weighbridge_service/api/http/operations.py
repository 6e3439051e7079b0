"""Endpoints for operators and orchestrators: probes, checks, memory, usage, metrics.

Probes are answered on the event loop from what is in memory, so neither a store that hangs nor handlers that fill all threads hold them up.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from weighbridge._core.checks import Check
from weighbridge._core.operations.verbs import Verb
from weighbridge.errors import NotFound
from weighbridge_service.api.http.callers import peer_of
from weighbridge_service.api.http.metrics import Metrics
from weighbridge_service.api.http.reports import (
    CheckOut,
    ChecksOut,
    MemoryOut,
    ReadinessOut,
    StatusOut,
)
from weighbridge_service.api.http.threads import in_threads
from weighbridge_service.health import Health
from weighbridge_service.health.doctor import Examiner
from weighbridge_service.service import Weighbridge
from weighbridge_storage.threads import ThreadPool

CheckName = Annotated[str, Path(description="Name of the check.", examples=["store-reachable"])]


def operations_router(service: Weighbridge, metrics: Metrics, health: Health) -> APIRouter:
    """The endpoints.

    Args:
        service: which is operated.
        metrics: what ``/metrics`` shows.
        health: what ``/readyz`` says.
    """
    router = APIRouter(tags=["operations"])
    examiner = Examiner(service)

    @router.get("/livez")
    async def liveness() -> StatusOut:
        """Whether the process answers. It stays so while the store is away: a restart would not bring it back."""
        return StatusOut(status="ok")

    def findings_for(request: Request) -> list[Check]:
        """What the checks have found; without what names models and stores for those who may not observe."""
        findings = health.findings()
        if peer_of(request).identity.may(Verb.OBSERVE):
            return findings
        return [Check(each.name, each.status, "details are for those who may observe") for each in findings]

    @router.get("/readyz")
    async def readiness(request: Request) -> ReadinessOut:
        """Whether new work should be sent here: no check has failed. Says what the background checks found last; details are for those who may observe."""
        findings = findings_for(request)
        health.check_ready(findings)
        return ReadinessOut.model_validate({"status": "ready", "checks": findings})

    @router.get("/readyz/{check}")
    async def readiness_of(check: CheckName, request: Request) -> CheckOut:
        """One of the checks of `/readyz`."""
        findings = {found.name: found for found in findings_for(request)}
        if check not in findings:
            raise NotFound(f"there is no check {check[:80]!r}", fix=f"there are: {', '.join(findings)}")
        health.check_ready([findings[check]])
        return CheckOut.model_validate(findings[check])

    @router.get("/v1/memory")
    def get_memory() -> MemoryOut:
        """Limits, budget, and who has or waits for which image. Asks nothing of the store."""
        return MemoryOut.of(service.memory(), service.config.byte_budget, service.byte_budget.in_flight)

    @router.get("/v1/checks")
    @in_threads(ThreadPool("http-checks", 1))  # it takes writes
    def list_checks() -> ChecksOut:
        """What `weighbridge doctor` finds: what `/readyz` says, memory, disk, and what a push of each model needs."""
        return ChecksOut.model_validate({"checks": [*health.findings(), *examiner.checks()]})

    @router.get(
        "/metrics",
        response_class=Response,
        responses={
            200: {
                "description": "Figures in Prometheus' text format.",
                "content": {"text/plain": {"schema": {"type": "string"}}},
            }
        },
    )
    # one scrape at a time, in a thread of its own: others may all be waiting for the store
    @in_threads(ThreadPool("http-metrics", 1))
    def read_metrics() -> Response:
        """What the service tells Prometheus."""
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return router
