"""A process of its own that uses the local lane as a test says, and can be killed while it does.

``python -m tests.support.lane_client SERVER write|keep|leave|read|hold MODEL NUMBER [RANK]``: borrows, prints one line,
and waits for a line on standard input. What it does then is in `_write` and `_read`.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.forked import ForkedPython, forked_python
from weighbridge._clients.transport import find_faces
from weighbridge._lane.connection import LaneConnection
from weighbridge._transport import rpc
from weighbridge.v1 import local_lane_pb2 as pb

CLIENT_ID = "lane-client-of-a-test"


def connected(server: str, client_id: str = CLIENT_ID) -> LaneConnection:
    """A connection to a service's socket, for requests that no well-behaved client makes."""
    found = find_faces(server)
    return LaneConnection(
        found.socket, False, found.service_id, client_id, "", lambda _key: None, lambda _connection: None
    )


@contextmanager
def lane_process(server: str, *arguments: str) -> Iterator[ForkedPython]:
    """Such a process, once it has borrowed; killed in the end."""
    with forked_python("-m", "tests.support.lane_client", server, *arguments) as process:
        assert process.stdout.readline() == "borrowed\n"
        yield process


def go_on(process: ForkedPython) -> str:
    """Let the process take its next step; returns the line that it prints when it is done."""
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def main(server: str, what: str, model: str, number: str, rank: str = "0") -> None:
    """Do what is asked: see `_write` and `_read`."""
    connection = connected(server)
    if what in ("keep", "leave", "write"):
        _write(connection, what, pb.BeginWrite(model=model, number=int(number), rank=int(rank)))
    else:
        _read(connection, what, pb.BeginRead(model=model, version=number))


def _write(connection: LaneConnection, what: str, begin: pb.BeginWrite) -> None:
    """Fill borrowed memory with garbage. ``keep``: say that nothing was written and the memory stays mapped, and hear
    no recall. ``leave``: end the connection in the middle of writing, and write once more. ``write``: say that the loan
    is complete and nothing is mapped any more, without letting go of it, and write once more."""
    answer, [descriptor] = connection.ask(pb.LaneRequest(begin_write=begin))
    loan, memory = answer.write.loan, mmap.mmap(descriptor, answer.write.memory.bytes)
    os.close(descriptor)
    memory.write(b"\xee" * len(memory))
    if what == "keep":
        connection.ask(pb.LaneRequest(end_write=pb.EndWrite(loan=loan, kept=True)))
        _say("borrowed")
        sys.stdin.readline()
        return
    _say("borrowed")
    if what == "leave":
        connection.close()
        _say("left")
    else:
        try:
            connection.ask(pb.LaneRequest(end_write=pb.EndWrite(loan=loan, complete=True)))
            _say("ended")
        except Exception as error:
            _say(type(error).__name__)
    memory.seek(0)
    memory.write(b"\xdd" * len(memory))
    _say("wrote")
    sys.stdin.readline()  # until then it is mapped


def _read(connection: LaneConnection, what: str, begin: pb.BeginRead) -> None:
    """Borrow a version. ``read``: print whether the memory is still what it was.

    ``hold``: the same, after ending the connection.
    """
    begin.layout.full.SetInParent()
    _, descriptors = connection.ask(pb.LaneRequest(begin_read=begin))
    views = [mmap.mmap(each, 0, prot=mmap.PROT_READ) for each in descriptors]
    before = rpc.checksum(b"".join(view[:] for view in views))
    _say("borrowed")
    if what == "hold":
        connection.close()
        _say("left")
    _say("same" if rpc.checksum(b"".join(view[:] for view in views)) == before else "changed")
    sys.stdin.readline()


def _say(word: str) -> None:
    print(word, flush=True)
    if word != "wrote":
        sys.stdin.readline()


if __name__ == "__main__":
    main(*sys.argv[1:])
