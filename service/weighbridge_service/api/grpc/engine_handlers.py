"""Handlers of `EngineService`."""

from __future__ import annotations

from functools import partial
from typing import Any

from weighbridge._core.engines.facts import EngineReport
from weighbridge._core.operations.verbs import Verb
from weighbridge._transport import wire
from weighbridge._transport.wire_engines import engine_to_proto
from weighbridge.v1 import engine_service_pb2 as pb
from weighbridge_service.api.grpc.call import Call
from weighbridge_service.engines.entries import Owner
from weighbridge_service.engines.known_engines import KnownEngines
from weighbridge_service.engines.pages import LARGEST_PAGE


class EngineHandlers:
    """`EngineService`.

    Args:
        engines: the engines that the service knows.
    """

    def __init__(self, engines: KnownEngines) -> None:
        self._engines = engines

    def ReportEngine(self, request: pb.ReportEngineRequest, call: Call) -> pb.ReportEngineResponse:
        owner = Owner(call.peer.name, call.peer.host)
        pulls = partial(call.peer.identity.may, Verb.PULL)
        engine = self._engines.report(owner, wire.read(EngineReport, request.report), pulls)
        report_ms = round(self._engines.report_seconds * 1000)
        return pb.ReportEngineResponse(engine=engine_to_proto(engine), report_ms=report_ms)

    def ListEngines(self, request: pb.ListEnginesRequest, call: Call) -> pb.ListEnginesResponse:
        limit = min(request.page_size or LARGEST_PAGE, LARGEST_PAGE)
        found, more = self._engines.page(request.model, call.peer.sees, request.page_token, limit)
        return pb.ListEnginesResponse(engines=map(engine_to_proto, found), next_page_token=more)


def engine_service(engines: KnownEngines) -> tuple[Any, str, object]:
    """`EngineService` and its handlers, for `GrpcServer`."""
    return pb, "EngineService", EngineHandlers(engines)
