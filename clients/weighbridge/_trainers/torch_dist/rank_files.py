"""FSDP checkpoints in which each rank has saved its state dict with ``torch.save``, as verl's ``FSDPCheckpointManager``
does.

A folder contains the files ``model_world_size_<ranks>_rank_<rank>.pt``; `optimizer_rank_files` reads the files of
optimizers (``optim_...``). Each file contains a dict of DTensors (FSDP2, and FSDP1 over a device mesh), ShardedTensors
(FSDP1), and plain tensors, which all ranks have whole. Each tensor describes which part of the whole tensor it is, so
the files form a `Layout`. They are read as data, whichever classes they name: their code is not executed, and their
tensors are not loaded. Sources: verl 0.9 (``verl/utils/checkpoint/fsdp_checkpoint_manager.py``);
``torch.distributed.tensor``, ``device_mesh`` and ``_shard`` of torch 2.13.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from weighbridge._core import dtypes
from weighbridge._core.boxes import Box
from weighbridge._core.layouts import MAX_RANK, Layout, Placement, Shard, TensorSpec, check_spec
from weighbridge._core.text.counts import counted, first_lines
from weighbridge._core.text.shortening import shown
from weighbridge._formats.dtensors import Cut, boxes_of, runs_after
from weighbridge._trainers.torch_dist.archives import Archive
from weighbridge._trainers.torch_dist.folder import TorchDistCheckpoint, open_file
from weighbridge._trainers.torch_dist.items import (
    DescribedTensor,
    described,
    located,
)
from weighbridge._trainers.torch_dist.names import KNOWN
from weighbridge._trainers.torch_dist.pickles import Instance, PickledName, are_sizes, read_pickle
from weighbridge.errors import DataLoss, InvalidArgument, LayoutError, NotFound

_FILE = re.compile(r"(model|optim|extra_state)_world_size_(\d{1,7})_rank_(\d{1,7})\.pt")
_MAX_PICKLE = 64 << 20
"""Maximum size of a pickle that is read. A pickle of 20,000 tensors has about 20 MB. The values that a pickle describes
need up to 26 times as much memory.
"""
_MOST_TIED = 4
"""Maximum number of names that a byte of a file may have on average, because of tied tensors."""
_MAX_DIRECTORY = 64 << 20
_FROM_TYPE, _WRAPPER = "torch._tensor._rebuild_from_type_v2", "torch._utils._rebuild_wrapper_subclass"
_PARAMETER = "torch._utils._rebuild_parameter"
_SHARDED = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"
_NAMED = 20


class _Piece(NamedTuple):
    """A box of a tensor, and the offset of its first element in the local tensor.

    The elements of the box are contiguous there.
    """

    box: Box
    local: DescribedTensor
    first: int


class _Most(NamedTuple):
    """Limits for a tensor of a checkpoint: the number of ranks over which it is spread, and its bytes."""

    ranks: int
    nbytes: int


def has_rank_files(folder: Path) -> bool:
    """Whether a folder contains files of ranks."""
    return any(_FILE.fullmatch(path.name) for path in folder.glob("model_world_size_*_rank_*.pt"))


def read_rank_files(folder: Path) -> TorchDistCheckpoint:
    """Find all tensors of a checkpoint, trusting nothing in it and reading no weights.

    If several ranks hold equal boxes, those of the first rank are used. Entries that are not tensors are among
    `others`, without a place.

    Raises:
        NotFound: the folder does not exist, or the file of a rank is missing.
        DataLoss: a file is damaged, cut short, or contains names that do not belong in such a checkpoint.
        InvalidArgument: a tensor has an unsupported dtype or name, or the folder contains checkpoints of several
            numbers of ranks.
        LayoutError: ranks disagree about a tensor, or the part that a rank holds is not known (names each tensor).
    """
    return read_files(folder, files_of(folder), lambda root: root)


def read_files(folder: Path, files: Sequence[str], entries_of: Callable[[Any], Any]) -> TorchDistCheckpoint:
    """Find all tensors in the files of ranks, which are given in the order of ranks.

    Args:
        folder: folder of the files.
        files: names of the files.
        entries_of: returns the values by name from the content of a file.

    Raises:
        The errors of `read_rank_files`.
    """
    specs: dict[str, TensorSpec] = {}
    others: dict[str, None] = {}
    placed: dict[Shard, Placement] = {}
    sizes: dict[str, int] = {}
    problems: dict[str, str] = {}
    most = _Most(len(files), sum((folder / file).stat().st_size for file in files))
    for file in files:
        with open_rank_file(folder, file) as (archive, root):
            sizes[file] = archive.length
            entries = entries_of(root)
            if type(entries) is not dict or any(type(name) is not str for name in entries):
                raise DataLoss(f"{file} in {folder}: it does not contain a state dict")
            lies: list[tuple[int, int, str]] = []
            for name, value in entries.items():
                try:
                    found = _tensor(name, value, most)
                    if found is None:
                        others[name] = None
                        continue
                    spec, pieces = found
                    known = specs.setdefault(name, spec)
                    if known != spec:
                        raise LayoutError(f"{file} has {spec}, and an earlier file has {known}")
                    for piece in pieces:
                        shard = Shard(name, piece.box)
                        place = _placement(shard, spec, piece, archive, file)
                        lies.append((place.offset, place.offset + place.nbytes, name))
                        placed.setdefault(shard, place)
                except (LayoutError, DataLoss) as error:
                    problems.setdefault(name, f"{shown(name)} in {file}: {error.message}")
            for one, other in _overlapping(lies):
                problems.setdefault(
                    other, f"{shown(other)} in {file}: it shares some of its elements with {shown(one)}"
                )
    if problems:
        raise LayoutError(
            f"{counted(len(problems), 'tensor')} of {folder} cannot be read",
            details=first_lines(list(problems.values())),
            fix="save DTensors that are Shard or Replicate, and all ranks in one step",
        )
    nbytes = sum(spec.nbytes for spec in specs.values())
    if nbytes > _MOST_TIED * most.nbytes:
        raise DataLoss(f"the tensors of {folder} have {nbytes} bytes, but its files together have {most.nbytes}")
    layout = Layout(MappingProxyType(specs), tuple(placed.values()))
    return TorchDistCheckpoint(layout, others, {}, MappingProxyType(sizes))


@contextmanager
def open_rank_file(folder: Path, file: str) -> Iterator[tuple[Archive, Any]]:
    """Open the file of a rank, and yield its archive and the value that its pickle describes.

    Args:
        folder: folder of the file.
        file: name of the file.

    Raises:
        NotFound: the file does not exist.
        DataLoss: the file is damaged, cut short, or contains other names.
    """
    with open_file(folder, file) as (fd, size):
        try:
            archive = Archive(fd, 0, size, _MAX_DIRECTORY)
            root = read_pickle(archive.pickle(_MAX_PICKLE), KNOWN, "its pickle")
        except DataLoss as error:
            raise DataLoss(f"{file} in {folder}: {error.message}", fix=error.fix) from error
        yield archive, root


def sharded_parameters(folder: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Return the tensors of a module that ranks share as DTensors, with their shapes, in the module's order; and other
    names of tied tensors, each with the first name.

    Raises:
        The errors of `read_rank_files`.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    tied: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    with open_rank_file(folder, files_of(folder)[0]) as (_, root):
        for name, value in _mapping(root).items():
            if not is_dtensor(value):
                continue
            _, _, made_of, state = _items(value.args, 4)
            shape = tuple(_list(_items(made_of, 3)[2]))
            local = described(_fields_of(state).get("_local_tensor"))
            kept = first.setdefault((local.key, local.begin, shape), name)
            if kept == name:
                shapes[name] = shape
            else:
                tied[name] = kept
    return shapes, tied


def is_dtensor(value: Any) -> bool:
    """Whether a value from a pickle is a DTensor."""
    if type(value) is not Instance or value.kind != _FROM_TYPE:
        return False
    kind = _items(value.args, 2)[1]
    return type(kind) is PickledName and kind.name.endswith(".DTensor")


def _mapping(root: Any) -> Mapping[str, Any]:
    if type(root) is not dict or any(type(name) is not str for name in root):
        raise DataLoss("a file of a rank does not contain a state dict")
    return root


def _overlapping(lies: list[tuple[int, int, str]]) -> Iterator[tuple[str, str]]:
    """Yield pairs of tensors that share some but not all of their bytes. (Tied tensors share all.)"""
    before = (0, 0, "")
    for place in sorted(lies):
        if place[0] < before[1] and place[:2] != before[:2]:
            yield before[2], place[2]
        before = max(before, place, key=lambda each: each[1])


def files_of(folder: Path, kind: Literal["model", "optim", "extra_state"] = "model") -> list[str]:
    """Return the names of the files of a kind, by rank.

    Raises:
        NotFound: the folder does not exist, it does not contain files of that kind, or the file of a rank is missing.
        InvalidArgument: the folder contains two files of one rank, or files of several numbers of ranks.
    """
    if not folder.is_dir():
        raise NotFound(f"there is no folder {folder}")
    found: dict[int, dict[int, str]] = {}
    for path in folder.iterdir():
        match = _FILE.fullmatch(path.name)
        if match and match[1] == kind:
            other = found.setdefault(int(match[2]), {}).setdefault(int(match[3]), path.name)
            if other != path.name:
                raise InvalidArgument(
                    f"{folder} has two files of rank {int(match[3])}: {', '.join(sorted((other, path.name)))}",
                    fix="keep the one that belongs to the others",
                )
    if not found:
        raise NotFound(f"{folder} has no files of the form {kind}_world_size_4_rank_0.pt")
    if len(found) > 1:
        raise InvalidArgument(
            f"{folder} has checkpoints of {' and of '.join(map(str, sorted(found)))} ranks",
            fix="keep one of them in a folder",
        )
    ((ranks, files),) = found.items()
    missing = [rank for rank in itertools.islice(range(ranks), len(files) + _NAMED) if rank not in files]
    if missing:
        raise NotFound(
            f"{folder} has the files of {len(files)} of {counted(ranks, 'rank')}",
            details=[f"{kind}_world_size_{ranks}_rank_{rank}.pt is missing" for rank in missing[:_NAMED]],
            fix="copy the files of all ranks into one folder",
        )
    return [files[rank] for rank in range(ranks)]


def _tensor(name: str, value: Any, most: _Most) -> tuple[TensorSpec, Sequence[_Piece]] | None:
    """Return a tensor of a state dict and the pieces of it that this rank has; None if the value is not a tensor."""
    if type(value) is not Instance:
        return None
    if value.kind == _PARAMETER:
        value = _items(value.args, 1)[0]
    if type(value) is not Instance or value.kind != _FROM_TYPE:
        whole = described(value)
        return _spec(name, whole.dtype, whole.shape), [_Piece(Box.whole(whole.shape), whole, 0)]
    make, kind, made_of, state = _items(value.args, 4)
    if type(make) is not PickledName or make.name != _WRAPPER or type(kind) is not PickledName:
        raise DataLoss("it is a tensor of an unknown class")
    dtype, shape = _items(made_of, 3)[1:3]
    if type(dtype) is not PickledName or not are_sizes(shape):
        raise DataLoss("it does not contain its dtype and shape")
    spec = _spec(name, dtype.name.removeprefix("torch."), shape)
    if not spec.nbytes:
        return spec, []
    if spec.nbytes > most.nbytes:
        raise DataLoss(f"it has {spec.nbytes} bytes, but all files together have {most.nbytes}")
    pieces = _of_sharded(state) if kind.name == _SHARDED else _of_dtensor(shape, state, most.ranks)
    return spec, [piece for piece in pieces if piece.box.volume]


def _spec(name: str, dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    try:
        spec = TensorSpec(name, dtypes.parse(dtype), shape)
    except InvalidArgument as error:
        raise InvalidArgument(f"{shown(name)}: {error.message}", fix=error.fix) from error
    check_spec(spec)
    return spec


def _placement(shard: Shard, spec: TensorSpec, piece: _Piece, archive: Archive, file: str) -> Placement:
    stored = located(piece.local, archive)
    if stored.dtype != spec.dtype.torch_name:
        raise DataLoss(f"a part of it is {stored.dtype}, not {spec.dtype.torch_name}")
    size = spec.dtype.itemsize
    return Placement(shard, file, stored.offset + piece.first * size, piece.box.volume * size)


# -- ShardedTensor -----------------------------------------------------------------------------------------------------


def _of_sharded(state: Any) -> Iterator[_Piece]:
    """Yield the pieces of a ``ShardedTensor``, whose state begins with its local shards."""
    for shard in _list(_items(state, 1)[0]):
        fields = _fields(shard)
        local = described(fields.get("tensor"))
        metadata = _fields(fields.get("metadata"))
        offset, extent = (tuple(_list(metadata.get(key))) for key in ("shard_offsets", "shard_sizes"))
        if not (are_sizes(offset) and are_sizes(extent)) or extent != local.shape:
            raise DataLoss("a shard of it does not have its declared size")
        yield _Piece(Box(offset, extent), local, 0)


# -- DTensor -----------------------------------------------------------------------------------------------------------


def _of_dtensor(shape: tuple[int, ...], state: Any, most: int) -> Iterator[_Piece]:
    """Yield the pieces of a DTensor, which follow from its placements and the coordinate of its rank in the mesh."""
    fields = _fields_of(state)
    local = described(fields.get("_local_tensor"))
    spec = _fields(fields.get("_spec"))
    mesh = _fields(spec.get("mesh"))
    coordinate = mesh.get("_coordinate_on_dim")
    if coordinate is None:
        raise LayoutError("its mesh does not contain the position of this rank")
    where = tuple(_list(coordinate))
    extents, placements = _mesh_shape(mesh), _items(spec.get("placements"), 0)
    if not are_sizes(where) or not len(where) == len(extents) == len(placements) <= MAX_RANK:
        raise DataLoss("its mesh and its placements have different numbers of axes")
    for order in _list(spec.get("shard_order") or ()):
        over = _items(getattr(order, "args", None), 2)[1]
        if not are_sizes(over) or list(over) != sorted(over):
            raise LayoutError("one of its axes is sharded over the axes of the mesh in a different order")
    cuts: list[list[Cut]] = [[] for _ in shape]
    parts = 1
    for placement, ranks, rank in zip(placements, extents, where, strict=True):
        kind = getattr(placement, "kind", "").rpartition(".")[2]
        if kind == "Replicate":
            continue
        if kind not in ("Shard", "_StridedShard"):
            raise LayoutError(f"its placement is {kind or 'unknown'}: its parts have not been summed")
        says = _fields(placement)
        axis, pieces = says.get("dim", -1), says.get("split_factor", 1)
        if not are_sizes((axis, pieces)) or axis >= len(shape) or not (rank < ranks <= most and 0 < pieces <= most):
            raise DataLoss("one of its placements is invalid")
        parts *= pieces
        if parts > most**2:  # each part belongs to the ranks on other axes of the mesh
            raise DataLoss("its placements split it into more parts than its ranks can have")
        cuts[axis].append(Cut(ranks, rank, pieces))
    runs = [runs_after(length, tuple(each)) for length, each in zip(shape, cuts, strict=True)]
    extent = tuple(sum(stop - start for start, stop in of_axis) for of_axis in runs)
    if extent != local.shape:
        raise DataLoss(f"its local tensor is {list(local.shape)}, and by its placements it is {list(extent)}")
    if any(len(of_axis) > 1 for of_axis in runs[1:]):
        raise LayoutError("a rank's part of it is not contiguous along an axis other than the first")
    row = math.prod(extent[1:])
    for box, where in boxes_of(runs):
        yield _Piece(box, local, where[0].start * row if where else 0)


def _mesh_shape(mesh: Mapping[Any, Any]) -> tuple[int, ...]:
    """Return the shape of a ``DeviceMesh``: until torch 2.8 from the tensor of its ranks, later from its layout, which
    in torch 2.13 has an entry for each axis.
    """
    ranks = mesh.get("mesh")
    if ranks is not None:
        return described(ranks).shape
    layout = _fields(mesh.get("_layout"))
    axes = layout.get("axes")
    if axes is None:
        shape = layout.get("shape")
        shape = shape if type(shape) is tuple else (shape,)
    else:
        shape = tuple(_fields(axis).get("shape") for axis in _items(axes, 0))
    extents = tuple(math.prod(each) if are_sizes(each) and len(each) <= MAX_RANK else each for each in shape)
    if not are_sizes(extents):
        raise DataLoss("its mesh does not contain the number of ranks on each axis")
    return extents


# -- what pickles hold -------------------------------------------------------------------------------------------------


def _items(value: Any, least: int) -> tuple[Any, ...]:
    if type(value) is not tuple or len(value) < least:
        raise DataLoss("its pickle contains another value where a tuple is expected")
    return value


def _list(value: Any) -> Sequence[Any]:
    if type(value) not in (list, tuple):
        raise DataLoss("its pickle contains another value where a list is expected")
    found: Sequence[Any] = value
    return found


def _fields(value: Any) -> Mapping[Any, Any]:
    """Return the attributes of an instance."""
    if type(value) is not Instance:
        raise DataLoss("its pickle contains another value where an object is expected")
    return _fields_of(value.state)


def _fields_of(state: Any) -> Mapping[Any, Any]:
    """Return the attributes in a state.

    For classes with slots the state is a pair, and its second item contains the attributes in slots.
    """
    if type(state) is tuple and len(state) == 2:
        state = state[1]
    if type(state) is not dict:
        raise DataLoss("its pickle contains another value where attributes are expected")
    return state
