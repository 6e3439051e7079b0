"""Safetensors file of one rank's slices or shards.

Tensors have the names of the layout that they come from, and the shape of the rank's part. A tensor of which the rank
holds several boxes (gate and up) is those boxes, concatenated in order along the axis on which they lie apart, as the
rank's own parameter is. The header's ``__metadata__`` has, under ``shards``, the JSON text
``{name: {"shape": [...], "boxes": [{"offset": [...], "extent": [...]}, ...]}}``: the tensor's global shape, and where
in it the boxes lie.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO

from weighbridge._core.layouts import Layout, TensorSpec
from weighbridge._core.slices import TensorParallel
from weighbridge._formats.safetensors_files import TensorFile, lay_out_files
from weighbridge.errors import DataLoss, FailedPrecondition, LayoutError


@dataclass(frozen=True, slots=True)
class Runs:
    """Position of a shard's bytes in a file: runs of equal length at a constant distance.

    Attributes:
        offset: offset of the first run in bytes.
        run: bytes of a run.
        distance: bytes from the beginning of a run to the beginning of the next.
    """

    offset: int
    run: int
    distance: int


@dataclass(frozen=True)
class RankFile:
    """Layout of a stream's shards in a file.

    Attributes:
        header: the file's first bytes.
        places: position of each placement of the stream in the file.
        nbytes: size of the file.
    """

    header: bytes
    places: tuple[Runs, ...]
    nbytes: int


def describe(part: TensorParallel, dtype: str | None) -> tuple[str, dict[str, str]]:
    """Name of the file of an engine's rank, and the entries of its ``__metadata__`` about the rank.

    Args:
        part: what the rank holds.
        dtype: what its floating-point tensors were cast to, if they were.
    """
    name = f"model-tp{part.rank}-of-{part.size}"
    about = {"tensor_parallel_size": str(part.size), "tensor_parallel_rank": str(part.rank)}
    if part.experts is not None:
        experts = part.experts
        name += f"-ep{experts.rank}-of-{experts.size}"
        about |= {"expert_parallel_size": str(experts.size), "expert_parallel_rank": str(experts.rank)}
        if experts.tp_size > 1:
            name += f"-etp{experts.tp_rank}-of-{experts.tp_size}"
        about |= {
            "expert_tensor_parallel_size": str(experts.tp_size),
            "expert_tensor_parallel_rank": str(experts.tp_rank),
        }
    if part.layers is not None:
        name += "-layers{}-{}".format(*part.layers)
        about["layers"] = "{}:{}".format(*part.layers)
    if part.vocab_multiple > 1:
        about["vocab_multiple"] = str(part.vocab_multiple)
    if dtype is not None:
        about["cast_to"] = dtype
    return f"{name}.safetensors", about


def lay_out_rank_file(layout: Layout, about: Mapping[str, str]) -> RankFile:
    """Lay the shards of a stream out in one file.

    Args:
        layout: the stream.
        about: further entries of ``__metadata__``.

    Raises:
        LayoutError: the boxes of one tensor cannot be concatenated.
    """
    axes = {name: _axis(layout, name) for name in layout.by_tensor}
    local = [_local_spec(layout, name, axis) for name, axis in axes.items()]
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
    places = [Runs(0, 0, 0)] * len(layout.placements)
    for placement in laid_out.layout.placements:
        name = placement.shard.tensor
        rows = prod(placement.shard.box.extent[: axes[name]])
        position, distance = placement.offset + longer, placement.nbytes // max(rows, 1)
        for index in layout.by_tensor[name]:
            run = layout.placements[index].nbytes // max(rows, 1)
            places[index] = Runs(position, run, distance)
            position += run
    return RankFile(header, tuple(places), file.nbytes + longer)


def _axis(layout: Layout, name: str) -> int:
    """The axis along which the boxes of a tensor are concatenated."""
    boxes = [layout.placements[index].shard.box for index in layout.by_tensor[name]]
    apart = [axis for axis in range(len(boxes[0].offset)) if len({box.offset[axis] for box in boxes}) > 1]
    axis = apart[0] if apart else 0
    shapes = {box.extent[:axis] + box.extent[axis + 1 :] for box in boxes}
    if len(boxes) > 1 and (len(apart) != 1 or len(shapes) > 1):
        raise LayoutError(f"the boxes of {name} cannot be concatenated along one axis")
    return axis


def _local_spec(layout: Layout, name: str, axis: int) -> TensorSpec:
    """A tensor as the rank has it."""
    extents = [layout.placements[index].shard.box.extent for index in layout.by_tensor[name]]
    shape = list(extents[0])
    if shape:
        shape[axis] = sum(extent[axis] for extent in extents)
    return TensorSpec(name, layout.tensors[name].dtype, tuple(shape))


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
        for placement, place in zip(layout.placements, file.places, strict=True):
            written = 0
            while written < placement.nbytes:
                while not piece:  # a stream may begin with an empty piece
                    following = next(pieces, None)
                    if following is None:
                        raise DataLoss(f"the stream ended after {done} of {layout.nbytes} bytes")
                    piece = memoryview(following)
                    on_progress(done, layout.nbytes)
                row, into = divmod(written, place.run)
                out.seek(place.offset + row * place.distance + into)
                count = min(place.run - into, len(piece))
                out.write(piece[:count])
                piece = piece[count:]
                written += count
                done += count
        on_progress(done, layout.nbytes)
        if piece or any(map(len, pieces)):
            raise DataLoss(f"the stream has more than its {layout.nbytes} bytes")


def check_absent(path: Path) -> None:
    """Refuse to write over a file.

    Raises:
        FailedPrecondition: the file exists.
    """
    if path.exists():
        raise FailedPrecondition(f"{path} exists", fix="name another folder, or move the file away")


def write_beside(path: Path, content: bytes) -> None:
    """Write a small file that all ranks of one folder share.

    Raises:
        FailedPrecondition: the file exists with another content.
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
