"""Does anything of a call that was refused wait for the garbage collector? Thousands of them would hold hundreds of MiB
until it comes.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from tests.support.alone import alone
from tests.support.services import RunningService, running_service
from tests.support.waiting import eventually
from weighbridge._transport import bulk_entry, rpc
from weighbridge.v1 import model_service_pb2, weight_service_pb2
from weighbridge_service.api.grpc.call import Call

CALLS = 100
VERSION = model_service_pb2.GetVersionRequest(model="acme/none", version="live").SerializeToString()
PULL = weight_service_pb2.PullRequest(model="acme/none", version="live").SerializeToString()


def refuse(channel: grpc.Channel, path: str, request: bytes, **options: object) -> None:
    """Ask for what is not there."""
    call = channel.stream_stream(f"/weighbridge.v1.{path}")
    for _ in range(CALLS):
        with pytest.raises(grpc.RpcError) as refused:
            list(call(iter([request]), timeout=60, **options))
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND


def one_without_a_model(service: RunningService) -> None:
    with rpc.open_channel(service.address, shared=False) as channel:
        refuse(channel, "ModelService/GetVersion", VERSION)


def pulls_at_the_known_port(service: RunningService) -> None:
    with rpc.open_channel(service.address, shared=False) as channel:
        refuse(channel, "WeightService/Pull", PULL)


def pulls_at_the_port_for_weights(service: RunningService) -> None:
    with rpc.open_channel(service.address, shared=False) as channel:
        entry = bulk_entry.ask(channel, service.address)
    with rpc.open_channel(entry.address, shared=False) as channel:
        refuse(channel, "WeightService/Pull", PULL, metadata=entry.metadata)


def silent_ones(service: RunningService) -> None:
    """More than have a place, so that they are hurried."""
    end = threading.Event()

    def nothing() -> Iterator[bytes]:
        end.wait()
        yield from ()

    with rpc.open_channel(service.address, shared=False) as channel:
        call = channel.stream_stream("/weighbridge.v1.ModelService/GetVersion")
        running = [call(nothing(), timeout=10) for _ in range(CALLS)]
        codes = []
        for each in running[:20]:
            with suppress(grpc.RpcError):
                list(each)
            codes.append(each.code())
        end.set()
        assert grpc.StatusCode.RESOURCE_EXHAUSTED in codes


def living() -> int:
    """Calls that the service has in memory, garbage or not."""
    return sum(type(each) is Call for each in gc.get_objects())


@pytest.mark.parametrize(
    "refused",
    [one_without_a_model, pulls_at_the_known_port, pulls_at_the_port_for_weights, silent_ones],
    ids=lambda each: each.__name__,
)
@alone
def test_a_refused_call_leaves_nothing_for_the_garbage_collector(
    tmp_path: Path, refused: Callable[[RunningService], None]
) -> None:
    with running_service(tmp_path, bulk_port="0") as service:
        gc.collect()
        gc.disable()
        refused(service)
        eventually(lambda: living() <= 2)
