"""An open version, and the stream of pieces that is read from it."""

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
from weighbridge_storage.memory.images import ImageHold, together


@dataclass(frozen=True)
class OpenedVersion:
    """A version whose bytes can be read until it is closed.

    Attributes:
        version: the version.
        files: layout of its tensors in its files.
        sources: bytes of each file, by name.
    """

    version: Version
    files: FilesLayout
    sources: Mapping[str, FileBytes]
    _hold: ImageHold

    def partly_from(self, sources: Mapping[str, FileBytes], hold: ImageHold) -> OpenedVersion:
        """The same version with other sources for some of its files. Closing it also releases ``hold``."""
        return replace(self, sources={**self.sources, **sources}, _hold=together(self._hold, hold))

    def close(self) -> None:
        """Release the image, or end the reading from the store."""
        self._hold.release()


@dataclass(frozen=True, slots=True)
class StreamPiece:
    """A piece of a stream to a client.

    Attributes:
        offset: offset in the stream.
        data: the bytes; valid only until the next piece is taken.
        checksum: 64-bit XXH3 of the bytes.
    """

    offset: int
    data: Buffer
    checksum: int


@dataclass(frozen=True)
class Reading:
    """A stream that is about to be sent.

    Attributes:
        version: the version that it is read from.
        layout: layout of the stream.
        offset: first byte to send.
        striping: part of the stream to send.

    Raises:
        InvalidArgument: the offset is beyond the end of the stream.
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
            raise InvalidArgument(f"the stream has {self.layout.nbytes} bytes; it cannot begin at {self.offset}")

    def close(self) -> None:
        """Close the version. Only needed if not all pieces were taken."""
        self._reader.close()
        self._opened.close()

    def pieces(self, make_room: Callable[[int], None] = lambda _: None) -> Iterator[StreamPiece]:
        """The pieces of the stream from `offset` on. The version stays open until the last piece is taken.

        Args:
            make_room: called with the size of each piece before it is read.
        """
        with closing(self):
            for start, stop in self.striping.messages(self.offset, self.layout.nbytes):
                make_room(stop - start)
                yield self._piece(start, stop)

    def _piece(self, start: int, stop: int) -> StreamPiece:
        data = self._gather(start, stop - start)
        return StreamPiece(start, data, rpc.checksum(data))
