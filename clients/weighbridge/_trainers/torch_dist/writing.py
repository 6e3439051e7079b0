"""Writing of a checkpoint from a stream of its tensors. Only one piece of the stream is in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from weighbridge._trainers.torch_dist.folder import FramedFile, TorchDistFiles
from weighbridge._trainers.torch_dist.metadata import METADATA_FILE
from weighbridge.errors import DataLoss


def write_torch_dist(
    folder: Path,
    checkpoint: TorchDistFiles,
    stream: Iterable[memoryview],
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> None:
    """Write a checkpoint. ``.metadata`` is written last, because a folder that contains it counts as complete.

    Args:
        folder: an existing folder that does not contain any of the files.
        checkpoint: the checkpoint to write.
        stream: the bytes of the shards of its layout, concatenated in the layout's order, in pieces of any size.
        on_progress: called with the bytes written so far and the total.

    Raises:
        DataLoss: the stream is longer or shorter than the layout.
        OSError: a file cannot be written.
    """
    taken = _Taken(stream)
    total = sum(file.nbytes for file in checkpoint.files)
    done = 0
    for file in checkpoint.files:
        with (folder / file.name).open("xb") as out:
            for piece in _content(file, taken):
                out.write(piece)
                done += len(piece)
                on_progress(done, total)
    taken.end()
    for name, content in sorted(checkpoint.metadata_files.items(), key=lambda file: file[0] == METADATA_FILE):
        (folder / name).write_bytes(content)


def _content(file: FramedFile, taken: _Taken) -> Iterator[bytes | memoryview]:
    """Yield the content of a file from its first to its last byte.

    The stream fills the parts that framing does not cover.
    """
    position = 0
    for offset, framing in file.framing:
        yield from taken.next(offset - position)
        yield framing
        position = offset + len(framing)
    yield from taken.next(file.nbytes - position)


class _Taken:
    """A stream that is read in runs whose sizes differ from those of its pieces."""

    def __init__(self, stream: Iterable[memoryview]) -> None:
        self._pieces = iter(stream)
        self._left = memoryview(b"")

    def next(self, nbytes: int) -> Iterator[memoryview]:
        """Yield the next bytes, in pieces."""
        while nbytes:
            if not self._left:
                piece = next(self._pieces, None)
                if piece is None:
                    raise DataLoss(f"the stream of tensors ended {nbytes} bytes before the end of a shard")
                self._left = piece
            yield self._left[:nbytes]
            taken = min(nbytes, len(self._left))
            self._left = self._left[taken:]
            nbytes -= taken

    def end(self) -> None:
        """Raise DataLoss if the stream is not at its end."""
        if self._left or next(self._pieces, None) is not None:
            raise DataLoss("the stream of tensors continues after the last shard")
