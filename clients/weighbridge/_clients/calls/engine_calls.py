"""Calls about engines: reports of agents, and the list of engines."""

from __future__ import annotations

from functools import partial

from weighbridge._clients.calls.steps import Steps, call_method
from weighbridge._core.engines.facts import Engine, EngineReport, Reported
from weighbridge._transport import wire, wire_engines
from weighbridge.v1 import engine_service_pb2 as pb

REPORT_SECONDS = 5.0
"""Deadline of a report. It is short, because the next report is newer."""

_call = partial(call_method, pb.DESCRIPTOR.services_by_name["EngineService"])


def report_engine(report: EngineReport) -> Steps[Reported]:
    """Report the status of an engine."""
    request = pb.ReportEngineRequest(report=wire.write(pb.EngineReport, report))
    response = yield from _call("ReportEngine", request, REPORT_SECONDS)
    return Reported(wire_engines.engine_from_proto(response.engine), response.report_ms / 1000)


def list_engines(model: str | None) -> Steps[list[Engine]]:
    """List the engines of a model, or of all models, page by page."""
    found: list[Engine] = []
    request = pb.ListEnginesRequest(model=model or "")
    while True:
        page = yield from _call("ListEngines", request)
        found += [wire_engines.engine_from_proto(each) for each in page.engines]
        if not page.next_page_token:
            return found
        request = pb.ListEnginesRequest(model=model or "", page_token=page.next_page_token)
