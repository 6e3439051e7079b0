"""Handlers of `EngineService`."""

from __future__ import annotations

from weighbridge._transport.wire_engines import engine_to_proto, report_from_proto
from weighbridge.errors import InvalidArgument
from weighbridge.v1 import engine_service_pb2 as pb
from weighbridge_service.api.grpc.call import Call
from weighbridge_service.engines.entries import Owner
from weighbridge_service.engines.known_engines import KnownEngines

_PAGE = 1000


class EngineHandlers:
    """`EngineService`.

    Args:
        engines: those of the service.
    """

    def __init__(self, engines: KnownEngines) -> None:
        self._engines = engines

    def ReportEngine(self, request: pb.ReportEngineRequest, call: Call) -> pb.ReportEngineResponse:
        """See the contract."""
        owner = Owner(call.peer.name, call.peer.host)
        engine = self._engines.report(owner, report_from_proto(request.report))
        report_ms = round(self._engines.report_seconds * 1000)
        return pb.ReportEngineResponse(engine=engine_to_proto(engine), report_ms=report_ms)

    def ListEngines(self, request: pb.ListEnginesRequest, call: Call) -> pb.ListEnginesResponse:
        """See the contract. A page token is where the page begins: of engines that come or go meanwhile one may be left out, or come twice."""
        token = request.page_token or "0"
        if not (token.isascii() and token.isdigit() and len(token) <= 9):
            raise InvalidArgument(f"{token[:40]!r} is no page token", fix="pass on what the last page gave")
        begin = int(token)
        end = begin + min(request.page_size or _PAGE, _PAGE)
        found = self._engines.listed(request.model, call.peer.sees)
        return pb.ListEnginesResponse(
            engines=map(engine_to_proto, found[begin:end]),
            next_page_token=str(end) if end < len(found) else "",
        )
