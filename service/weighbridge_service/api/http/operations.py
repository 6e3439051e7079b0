"""Endpoints for operators and orchestrators: probes, checks, memory, usage, metrics.

The event loop answers probes from memory, so that neither a hanging store nor busy threads delay them.
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
        service: the service.
        metrics: metrics for ``/metrics``.
        health: checks for ``/readyz``.
    """
    router = APIRouter(tags=["operations"])
    examiner = Examiner(service)

    @router.get("/livez")
    async def liveness() -> StatusOut:
        """Whether the process responds.

        It succeeds even while the store is unavailable, because a restart would not help.
        """
        return StatusOut(status="ok")

    def findings_for(request: Request) -> list[Check]:
        """Last findings of the checks.

        Callers who may not observe do not see the details, because these name models and stores.
        """
        findings = health.findings()
        if peer_of(request).identity.may(Verb.OBSERVE):
            return findings
        return [Check(each.name, each.status, "details are shown only to callers who may observe") for each in findings]

    @router.get("/readyz")
    async def readiness(request: Request) -> ReadinessOut:
        """Whether new work should be sent here. It should if no check has failed. Lists the last findings of the
        checks, with details for callers who may observe."""
        findings = findings_for(request)
        health.check_ready(findings)
        return ReadinessOut.model_validate({"status": "ready", "checks": findings})

    @router.get("/readyz/{check}")
    async def readiness_of(check: CheckName, request: Request) -> CheckOut:
        """One of the checks of `/readyz`."""
        findings = {found.name: found for found in findings_for(request)}
        if check not in findings:
            raise NotFound(f"there is no check {check[:80]!r}", fix=f"checks: {', '.join(findings)}")
        health.check_ready([findings[check]])
        return CheckOut.model_validate(findings[check])

    @router.get("/v1/memory")
    def get_memory() -> MemoryOut:
        """Memory limits and budget, and the models that hold or wait for images. Does not access the store."""
        return MemoryOut.of(service.memory(), service.config.byte_budget, service.byte_budget.in_flight)

    @router.get("/v1/checks")
    @in_threads(ThreadPool("http-checks", 1))  # the checks write to the store
    def list_checks() -> ChecksOut:
        """Findings of `weighbridge doctor`: the checks of `/readyz`, memory, disk, and the resources that a push of
        each model requires.
        """
        return ChecksOut.model_validate({"checks": [*health.findings(), *examiner.checks()]})

    @router.get(
        "/metrics",
        response_class=Response,
        responses={
            200: {
                "description": "Metrics in Prometheus' text format.",
                "content": {"text/plain": {"schema": {"type": "string"}}},
            }
        },
    )
    # one scrape at a time, in a separate thread, because all other threads may be waiting for the store
    @in_threads(ThreadPool("http-metrics", 1))
    def read_metrics() -> Response:
        """Metrics of the service for Prometheus."""
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return router
