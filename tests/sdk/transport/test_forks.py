"""Does a client that was used say at once, in a process that is forked later, that its connections do not work
there?
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import pytest

from weighbridge import Client, FailedPrecondition, Unavailable
from weighbridge._transport.addresses import Addresses
from weighbridge._transport.bulk import Connections
from weighbridge.aio import AsyncEngineClient

NOWHERE = "127.0.0.1:1"


def told_in_a_fork(call: Callable[[], object]) -> str:
    """The message of the error that a call raises in a forked process; empty if it raises another one."""
    receiver, sender = os.pipe()
    if (child := os.fork()) == 0:
        try:
            call()
        except FailedPrecondition as error:
            os.write(sender, str(error).encode())
        finally:
            os._exit(0)
    os.close(sender)
    with os.fdopen(receiver, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return said


def is_told(call: Callable[[], object]) -> None:
    said = told_in_a_fork(call)
    assert f"this client was used in process {os.getpid()}" in said
    assert "make a client in each process" in said


def test_a_client_that_was_used_before_a_fork_is_refused_after_it() -> None:
    with Client(NOWHERE, retry_seconds=0.0) as client:
        for _ in range(2):
            with pytest.raises(Unavailable):
                client.models()
        is_told(client.models)
        with pytest.raises(Unavailable):
            client.models()  # where it was made, it goes on


def test_connections_for_weights_are_refused_after_a_fork() -> None:
    connections = Connections(Addresses([NOWHERE]), 1)
    connections.control(NOWHERE)
    is_told(lambda: connections.control(NOWHERE))
    is_told(lambda: connections.way(0))
    connections.close()


def test_a_client_for_asyncio_is_refused_after_a_fork() -> None:
    client = AsyncEngineClient(NOWHERE, retry_seconds=0.0)
    with pytest.raises(Unavailable):
        asyncio.run(client.models())
    is_told(lambda: asyncio.run(client.models()))


def test_connections_that_were_not_made_before_a_fork_belong_to_the_process_that_makes_them() -> None:
    connections = Connections(Addresses([NOWHERE]), 1)
    assert told_in_a_fork(lambda: connections.control(NOWHERE)) == ""
    connections.control(NOWHERE)
    connections.close()
