"""What one rank holds, as one safetensors file.

Tensors have the names of the layout that they come from, and the shape of the rank's part. A tensor of which the rank
holds several boxes (Megatron-core's gate and up) is those boxes, concatenated in order along axis 0, as the rank's own
parameter is. The header's ``__metadata__`` has, under ``shards``, the JSON text ``{name: {"shape": [...], "boxes":
[{"offset": [...], "extent": [...]}, ...]}}``: the tensor's global shape, and where in it the boxes lie.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from weighbridge.errors import DataLoss, FailedPrecondition, LayoutError
from weighbridge.layouts import Layout, TensorSpec
from weighbridge.safetensors_files import TensorFile, lay_out_files


@dataclass(frozen=True)
class RankFile:
    """How the shards of a stream lie in a file.

    Attributes:
        header: the file's first bytes.
        offsets: where in the file each placement of the stream begins.
        nbytes: size of the file.
    """

    header: bytes
    offsets: tuple[int, ...]
    nbytes: int


def lay_out_rank_file(layout: Layout, about: Mapping[str, str]) -> RankFile:
    """Lay the shards of a stream out in one file.

    Args:
        layout: the stream.
        about: further entries of ``__metadata__``.

    Raises:
        LayoutError: the boxes of one tensor do not follow each other along axis 0.
    """
    local = [_local_spec(layout, name) for name in layout.by_tensor]
    laid_out = lay_out_files(local, max(layout.nbytes, 1))
    (file,) = laid_out.files
    shards = {
        name: {
            "shape": list(layout.tensors[name].shape),
            "boxes": [
                {"offset": list(box.offset), "extent": list(box.extent)}
                for box in (layout.placements[index].shard.box for index in indexes)
            ],
        }
        for name, indexes in layout.by_tensor.items()
    }
    header = _with_metadata(file, {**about, "shards": json.dumps(shards, separators=(",", ":"))})
    longer = len(header) - len(file.header)
    offsets = [0] * len(layout.placements)
    for placement in laid_out.layout.placements:
        position = placement.offset + longer
        for index in layout.by_tensor[placement.shard.tensor]:
            offsets[index] = position
            position += layout.placements[index].nbytes
    return RankFile(header, tuple(offsets), file.nbytes + longer)


def _local_spec(layout: Layout, name: str) -> TensorSpec:
    """A tensor as the rank has it."""
    extents = [layout.placements[index].shard.box.extent for index in layout.by_tensor[name]]
    if len(extents) > 1 and (not extents[0] or len({extent[1:] for extent in extents}) > 1):
        raise LayoutError(f"the boxes of {name} cannot be concatenated along axis 0")
    shape = (sum(extent[0] for extent in extents), *extents[0][1:]) if extents[0] else ()
    return TensorSpec(name, layout.tensors[name].dtype, shape)


def _with_metadata(file: TensorFile, metadata: Mapping[str, str]) -> bytes:
    """A file's header with further entries in ``__metadata__``; data offsets do not count the header."""
    header = json.loads(file.header[8:])
    header["__metadata__"].update(metadata)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_rank_file(
    path: Path,
    file: RankFile,
    layout: Layout,
    stream: Iterable[bytes | memoryview],
    on_progress: Callable[[int, int], None],
) -> None:
    """Write the file from the bytes of the stream; it gets its name when it is complete.

    Raises:
        DataLoss: the stream is shorter or longer than its layout.
    """
    done = 0
    with _replacing(path) as out:
        out.write(file.header)
        pieces = iter(stream)
        piece = memoryview(b"")
        for placement, offset in zip(layout.placements, file.offsets, strict=True):
            out.seek(offset)
            left = placement.nbytes
            while left:
                while not piece:  # a stream may begin with an empty piece
                    following = next(pieces, None)
                    if following is None:
                        raise DataLoss(f"the stream ended after {done} of {layout.nbytes} bytes")
                    piece = memoryview(following)
                count = min(left, len(piece))
                out.write(piece[:count])
                piece = piece[count:]
                left -= count
                done += count
                on_progress(done, layout.nbytes)
        if piece or any(map(len, pieces)):
            raise DataLoss(f"the stream has more than its {layout.nbytes} bytes")


def check_absent(path: Path) -> None:
    """Refuse to write over a file.

    Raises:
        FailedPrecondition: it is there.
    """
    if path.exists():
        raise FailedPrecondition(f"{path} exists", fix="name another folder, or move the file away")


def write_beside(path: Path, content: bytes) -> None:
    """Write a small file that all ranks of one folder share.

    Raises:
        FailedPrecondition: it is there with another content.
    """
    if path.exists():
        if path.read_bytes() != content:
            raise FailedPrecondition(
                f"{path} belongs to another model or version",
                fix="name another folder, or move the file away",
            )
        return
    with _replacing(path) as out:
        out.write(content)


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that gets its name when the block ends, and is gone if it fails."""
    # several ranks may write to one folder at one time
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("xb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        partial.rename(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
