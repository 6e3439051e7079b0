"""Relay of one push: passes bytes on to the replica that puts together the file they belong to."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import grpc

from weighbridge import pieces, rpc
from weighbridge.errors import VersionFailed, WeighbridgeError
from weighbridge.v1 import checkpoint_service_pb2 as pb
from weighbridge_service.push.declarations import Home

_BATCH_BYTES = 8 << 20
_BATCHES = 16
"""Most batches that wait or are on their way, over all versions; who has another one waits."""
_GATHERED_BYTES = 64 << 20
"""Most bytes of batches that are not full yet, of one version."""
_SMALL = rpc.MESSAGE_BYTES // 2
"""Parts of messages up to this size are copied: what is kept of a message keeps all of it."""
_AT_ONCE = 8

Piece = tuple[int, memoryview]
"""Where in a rank's stream, and the bytes."""


class Peers:
    """Connections to other replicas. Thread-safe.

    Args:
        patience_s: for how long a replica that cannot be reached is tried again.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._channels: dict[str, grpc.Channel] = {}
        self.pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="forward")
        self.room = threading.BoundedSemaphore(_BATCHES)

    def push(
        self, home: Home, header: pb.PushHeader, batch: Sequence[Piece], wanted: Callable[[], bool]
    ) -> None:
        """Send parts of a rank's stream; returns when they have arrived.

        Args:
            home: to whom.
            header: which rank's stream.
            batch: the parts.
            wanted: whether it is worth trying again.

        Raises:
            WeighbridgeError: the other replica refuses them, or cannot be reached for all of the patience.
        """
        patience = rpc.Patience(self._patience_s)
        while True:
            try:
                with rpc.translated_errors(home.address):
                    self._method(home.address)(_messages(header, batch))
                return
            except WeighbridgeError as error:
                if not wanted() or not patience.wait_after(error):
                    raise

    def _method(self, address: str) -> Callable[[Iterator[bytes]], pb.PushResponse]:
        with self._lock:
            channel = self._channels.get(address)
            if channel is None:
                channel = self._channels[address] = rpc.open_channel(address)
        return channel.stream_unary(
            "/weighbridge.v1.CheckpointService/Push",
            request_serializer=None,
            response_deserializer=pb.PushResponse.FromString,
        )

    def close(self) -> None:
        """End all connections; what is on its way fails."""
        with self._lock:
            channels, self._channels = self._channels, {}
        for channel in channels.values():
            channel.close()
        self.pool.shutdown(cancel_futures=True)


def _messages(header: pb.PushHeader, batch: Sequence[Piece]) -> Iterator[bytes]:
    yield pb.PushRequest(header=header).SerializeToString()
    for offset, data in batch:
        yield pieces.encode(pb.PushRequest(offset=offset, checksum=rpc.checksum(data)), data)


class Relay:
    """Passes on what ranks push to one version for other replicas. Thread-safe.

    Args:
        peers: connections to the other replicas.
        model: ``namespace/name``.
        number: the version.
    """

    def __init__(self, peers: Peers, model: str, number: int) -> None:
        self._peers = peers
        self._model = model
        self._number = number
        self._lock = threading.Lock()
        self._batches: dict[tuple[Home, int], list[Piece]] = defaultdict(list)
        self._sent: dict[int, list[Future[None]]] = defaultdict(list)
        self._gathered = 0
        self._claim = ""
        self._failure: WeighbridgeError | None = None

    def send(self, claim: str, home: Home, rank: int, offset: int, data: memoryview) -> None:
        """Pass a part of a rank's stream on, now or together with the next ones. Waits if too much is on its way.

        Args:
            claim: of the agreement that says where it belongs.
            home: who is to have it.
            rank: whose stream it is a part of.
            offset: where it stands there.
            data: the bytes; they must not change any more.

        Raises:
            VersionFailed: something before it could not be passed on.
        """
        with self._lock:
            self._check()
            self._claim = claim
            batch = self._batches[home, rank]
            batch.append((offset, memoryview(bytes(data)) if len(data) <= _SMALL else data))
            self._gathered += len(data)
            nbytes = sum(len(piece) for _, piece in batch)
            if nbytes < _BATCH_BYTES and self._gathered < _GATHERED_BYTES:
                return
            del self._batches[home, rank]
            self._gathered -= nbytes
        self._submit(home, rank, batch)

    def flush(self, rank: int) -> None:
        """Wait until all that was passed on of a rank's stream has arrived.

        Raises:
            VersionFailed: it could not be passed on.
        """
        with self._lock:
            rest = [(home, of) for home, of in self._batches if of == rank]
            batches = [(home, self._batches.pop((home, of))) for home, of in rest]
            self._gathered -= sum(len(piece) for _, batch in batches for _, piece in batch)
        for home, batch in batches:
            self._submit(home, rank, batch)
        with self._lock:
            sent = self._sent.pop(rank, [])
        for future in sent:
            future.result()
        with self._lock:
            self._check()

    def stop(self) -> None:
        """Pass nothing on any more; who waits to do so gets an error. The version has failed."""
        with self._lock:
            self._failure = self._failure or VersionFailed(f"{self._model}@{self._number} was given up")
            self._batches.clear()

    def _submit(self, home: Home, rank: int, batch: Sequence[Piece]) -> None:
        while not self._peers.room.acquire(timeout=1.0):
            with self._lock:
                self._check()
        try:
            future = self._peers.pool.submit(self._send, home, rank, batch)
        except RuntimeError as error:  # the pool is shut down
            self._peers.room.release()
            raise VersionFailed("the service is shutting down", fix="push the step again") from error
        with self._lock:
            self._sent[rank] = [other for other in self._sent[rank] if not other.done()] + [future]

    def _send(self, home: Home, rank: int, batch: Sequence[Piece]) -> None:
        try:
            with self._lock:
                if self._failure is not None:
                    return
                header = pb.PushHeader(model=self._model, number=self._number, rank=rank, claim=self._claim)
            self._peers.push(home, header, batch, lambda: self._failure is None)
        except Exception as error:  # goes to whoever pushes
            known = error.message if isinstance(error, WeighbridgeError) else repr(error)
            failure = VersionFailed(
                f"{self._model}@{self._number}: what rank {rank} has pushed for files of the replica {home} did not get "
                f"there: {known}",
                fix="see whether that replica is running and can be reached under this address, then push the step again",
            )
            with self._lock:
                self._failure = self._failure or failure
        finally:
            self._peers.room.release()

    def _check(self) -> None:
        if self._failure is not None:
            raise VersionFailed(self._failure.message, fix=self._failure.fix)
