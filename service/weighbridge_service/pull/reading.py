"""A visible version that is open, and the stream of pieces that is read from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace

from weighbridge._core.layouts import Layout
from weighbridge._core.resources import Version
from weighbridge._core.striping import Striping
from weighbridge._formats.safetensors_files import FilesLayout
from weighbridge._transport import rpc
from weighbridge._transport.pieces import Buffer
from weighbridge.errors import InvalidArgument
from weighbridge_service.pull.read_ahead import StreamReader
from weighbridge_storage.memory.file_bytes import FileBytes
from weighbridge_storage.memory.images import Hold, together


@dataclass(frozen=True)
class OpenedVersion:
    """A version whose bytes can be read until it is closed.

    Attributes:
        version: which one.
        files: how its tensors lie in its files.
        sources: where the bytes of each file are, by its name.
    """

    version: Version
    files: FilesLayout
    sources: Mapping[str, FileBytes]
    _hold: Hold

    def partly_from(self, sources: Mapping[str, FileBytes], hold: Hold) -> OpenedVersion:
        """The same, with some of its files from elsewhere; closing it ends the hold on these, too."""
        return replace(self, sources={**self.sources, **sources}, _hold=together(self._hold, hold))

    def close(self) -> None:
        """Let go of the image, or end the reading from the store."""
        self._hold.release()


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a stream to a client.

    Attributes:
        offset: where in the stream it stands.
        data: its bytes; only valid until the next piece is taken.
        checksum: XXH3, 64 bits.
    """

    offset: int
    data: Buffer
    checksum: int


@dataclass(frozen=True)
class Reading:
    """A stream that is about to be sent.

    Attributes:
        version: which version it comes from.
        layout: what is in it.
        offset: the byte at which it begins.
        striping: which part of it is sent.
    """

    version: Version
    layout: Layout
    offset: int
    striping: Striping
    _opened: OpenedVersion
    _reader: StreamReader
    _gather: Callable[[int, int], Buffer]

    def __post_init__(self) -> None:
        if self.offset > self.layout.nbytes:
            self.close()
            raise InvalidArgument(
                f"the stream has {self.layout.nbytes} bytes; it cannot begin at {self.offset}"
            )

    def close(self) -> None:
        """Let go of the version, if not all pieces are taken."""
        self._reader.close()
        self._opened.close()

    def pieces(self, make_room: Callable[[int], None] = lambda _: None) -> Iterator[Piece]:
        """The rest of the stream from its offset on; the version stays open until the last piece is taken.

        Args:
            make_room: is called with the size of each piece before it is read.
        """
        with closing(self):
            for start, stop in self.striping.messages(self.offset, self.layout.nbytes):
                make_room(stop - start)
                yield self._piece(start, stop)

    def _piece(self, start: int, stop: int) -> Piece:
        data = self._gather(start, stop - start)
        return Piece(start, data, rpc.checksum(data))
