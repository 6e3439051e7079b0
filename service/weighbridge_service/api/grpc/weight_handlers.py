"""Handlers of `WeightService`, `BulkService` and `LocalLaneService`: streams of weights to clients, and the ports and
sockets for weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from weighbridge._core.tensor_spaces import TensorSpace
from weighbridge._transport import wire
from weighbridge.v1 import bulk_service_pb2, local_lane_pb2, weight_service_pb2
from weighbridge_service.access.access import Access
from weighbridge_service.admission.tickets import VALID_SECONDS, Tickets
from weighbridge_service.api.grpc.bulk_streams import BulkStreams
from weighbridge_service.api.grpc.call import Call
from weighbridge_service.api.lane.server import LaneServer
from weighbridge_service.core import Core


class WeightHandlers:
    """`WeightService`."""

    def __init__(self, service: Core, streams: BulkStreams) -> None:
        self._serving = service.serving
        self._streams = streams

    def PlanPull(self, request: weight_service_pb2.PlanPullRequest, call: Call) -> weight_service_pb2.PlanPullResponse:
        version, layout = self._serving.plan_pull(
            request.model, request.version, wire.request_from_proto(request.layout), request.dtype
        )
        known = layout.digest == request.known_layout
        return weight_service_pb2.PlanPullResponse(
            version=wire.version_to_proto(version),
            layout=None if known else wire.layout_to_proto(layout, TensorSpace.HUGGING_FACE),
            stream_bytes=layout.nbytes,
            layout_digest=layout.digest,
        )

    def Pull(
        self, request: weight_service_pb2.PullRequest, call: Call
    ) -> Iterator[weight_service_pb2.PullResponse | bytes]:
        layout = wire.request_from_proto(request.layout)
        plan = partial(self._serving.pull, request.model, request.version, layout, request.offset, request.dtype)
        yield from self._streams.send(call, request, plan, weight_service_pb2.PullResponse, self._serving.count)


class LocalLaneHandlers:
    """`LocalLaneService`.

    Args:
        lane: the local lane that `GetLocalLane` describes.
        access: issues tickets for the lane.
        http: ``host:port`` of the HTTP server; empty without one.
    """

    def __init__(self, lane: LaneServer, access: Access, http: str) -> None:
        self._lane = lane
        self._access = access
        self._http = http

    def GetLocalLane(
        self, request: local_lane_pb2.GetLocalLaneRequest, call: Call
    ) -> local_lane_pb2.GetLocalLaneResponse:
        return local_lane_pb2.GetLocalLaneResponse(
            socket=self._lane.path,
            service_id=self._lane.service_id,
            unavailable=self._lane.unavailable,
            private=self._lane.private,
            ticket="" if call.evidence is None else self._access.lane_ticket(call.evidence),
            http=self._http,
        )


class BulkHandlers:
    """`BulkService`.

    Args:
        tickets: issues tickets.
        port: the port for streams of weights; 0 if they have no separate port.
    """

    def __init__(self, tickets: Tickets, port: int) -> None:
        self._tickets = tickets
        self._port = port

    async def GetTicket(
        self, request: bulk_service_pb2.GetTicketRequest, call: Call
    ) -> bulk_service_pb2.GetTicketResponse:
        return bulk_service_pb2.GetTicketResponse(
            ticket=self._tickets.give(call.peer.host), valid_seconds=VALID_SECONDS, port=self._port
        )
