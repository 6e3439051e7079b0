"""Plan of a conversion: copies of bytes from source files to target files, and omitted entries.

Planning does not write anything and does not read weights. It finds all errors of a folder before the first byte is
copied.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from weighbridge._core.block_scales import SCALE_SUFFIX
from weighbridge._core.boxes import Box, Link
from weighbridge._core.layouts import Layout, TensorSpec
from weighbridge._core.slices import MAX_VOCAB_MULTIPLE
from weighbridge._core.text.counts import counted
from weighbridge._core.text.shortening import readable
from weighbridge._formats import safetensors_files
from weighbridge._formats.folder_weights import tied_copies
from weighbridge._formats.hf_folder import in_dtype_of
from weighbridge._formats.naming.weight_files import check_finished
from weighbridge._formats.side_files.reading import CONFIG, SideFiles
from weighbridge._trainers.torch_dist.folder import (
    FramedFile,
    iterations_in,
    lay_out_torch_dist,
)
from weighbridge._trainers.torch_dist.metadata import COMMON_FILE, CONFIG_FILE, METADATA_FILE, saved
from weighbridge._trainers.torch_dist.noted_values import common_values, trained_arguments
from weighbridge._trainers.torch_dist.rank_files import has_rank_files
from weighbridge.errors import InvalidArgument, LayoutError, NotFound
from weighbridge_service.converting.checkpoint_keys import (
    KeyForm,
    LayerSpec,
    checkpoint_tensors,
)
from weighbridge_service.converting.checkpoint_model import (
    SIDE_FOLDER,
    checkpoint_model,
    model_part,
    side_files_of,
)
from weighbridge_service.converting.named_model import Twin, named_model, read_checkpoint
from weighbridge_service.converting.trained_model import check_trained
from weighbridge_service.families import has_weight_map
from weighbridge_service.models.bridges import Bridge, bridge_for, parse_config
from weighbridge_service.models.library_models import check_library_model
from weighbridge_service.models.model_tensors import tensors_found
from weighbridge_service.models.weight_maps import derive_weight_map
from weighbridge_service.plan.planning import Plan, make_plan
from weighbridge_service.plan.relations import WeightMap

Kind = Literal["hugging_face", "torch_dist", "rank_files"]
"""Kind of a source: a Hugging Face folder; a checkpoint of Megatron-core or torch (DCP); a checkpoint of FSDP with a
file for each rank.
"""

DEFAULT_CHECKPOINT_FILE_BYTES = 2_000_000_000
"""Default size of ``.distcp`` files: smaller than Hugging Face files, so that several can be written concurrently."""
_NAMED = 20


@dataclass(frozen=True)
class ConvertOptions:
    """Options of a conversion.

    Attributes:
        config: Hugging Face folder with the config, tokenizer and similar files of a checkpoint; None if the checkpoint
            contains them.
        keys: form of the keys of a checkpoint that is written.
        spec: naming of its norms.
        vocab_multiple: its vocabulary is padded to a multiple of this.
        max_file_bytes: approximate maximum size of the files that are written.
    """

    config: Path | None = None
    keys: KeyForm = "auto"
    spec: LayerSpec = "te"
    vocab_multiple: int = 128
    max_file_bytes: int | None = None

    def check(self) -> None:
        """Validate the options.

        Raises:
            InvalidArgument: a number is out of range.
        """
        if not 1 <= self.vocab_multiple <= MAX_VOCAB_MULTIPLE:
            raise InvalidArgument(
                f"a vocabulary is padded to a multiple of 1 to {MAX_VOCAB_MULTIPLE}, not of {self.vocab_multiple}"
            )
        if self.max_file_bytes is not None and self.max_file_bytes < 1:
            raise InvalidArgument("the largest file has at least one byte")

    def check_for(self, source: Kind) -> None:
        """Reject options that have no effect for a kind of source.

        Raises:
            InvalidArgument: an option is for conversions in the other direction.
        """
        default = ConvertOptions()
        if source == "hugging_face" and self.config is not None:
            raise InvalidArgument(
                "--config is for checkpoints, and the source is not a checkpoint",
                fix="leave it out: a Hugging Face folder has its own config.json",
            )
        chosen = self.keys, self.spec, self.vocab_multiple
        if source != "hugging_face" and chosen != (default.keys, default.spec, default.vocab_multiple):
            raise InvalidArgument(
                "--keys, --spec and --vocab-multiple are for a torch_dist target, and the source is a checkpoint",
                fix="leave them out: a Hugging Face folder has one form only",
            )


@dataclass(frozen=True)
class Conversion:
    """Plan of a conversion.

    Attributes:
        kind: kind of the source.
        source: folder of the source. Buffers of the plan's source are named like the files in it.
        read: all files of the source, with size in bytes and time of the last change in nanoseconds.
        plan: plan from the source's files to the target's.
        twins: pairs of tensors to compare.
        files: files with tensors to write.
        side_files: name and content of the other files, which are written after them in this order.
        left_out: number of entries of the source that are not converted, by kind.
        shifts: constants that are added to each element of some tensors of the target, by name.
    """

    kind: Kind
    source: Path
    read: Mapping[str, tuple[int, int]]
    plan: Plan
    twins: tuple[Twin, ...]
    files: tuple[FramedFile, ...]
    side_files: Mapping[str, bytes] = field(repr=False)
    left_out: Mapping[str, int] = field(default_factory=dict)
    shifts: Mapping[str, float] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Size of all files that are written."""
        return sum(f.nbytes for f in self.files) + sum(map(len, self.side_files.values()))

    def identity(self) -> str:
        """Digest that identifies this conversion, as hex digits: it covers the state of the source's files and the
        whole plan.
        """
        sides = {name: hashlib.sha256(content).hexdigest() for name, content in self.side_files.items()}
        text = json.dumps(
            [
                str(self.source.resolve()), sorted(self.read.items()), self.plan.source.digest,
                self.plan.target.digest, self.plan.copies, self.plan.zeros, self.twins,
                [(f.name, f.nbytes) for f in self.files], sides,
                *([sorted(self.shifts.items())] if self.shifts else []),
            ]
        )  # fmt: skip
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def kind_of_folder(folder: Path) -> Kind:
    """The kind of the checkpoint in a folder.

    Raises:
        NotFound: the folder does not exist, or does not contain a checkpoint.
    """
    if (folder / METADATA_FILE).exists():
        return "torch_dist"
    if has_rank_files(folder):
        return "rank_files"
    if safetensors_files.has_weights(folder):
        return "hugging_face"
    if not folder.is_dir():
        raise NotFound(f"there is no folder {folder}")
    check_finished(folder, (path.name for path in folder.glob("*")))
    inner = iterations_in(folder) or sorted(path.name for path in folder.iterdir() if has_rank_files(path))
    raise NotFound(
        f"{folder} contains neither safetensors files nor a checkpoint of Megatron-core, torch or FSDP",
        fix=f"give the folder of one checkpoint, such as {', '.join(inner)}"
        if inner
        else (
            "give a folder with *.safetensors, one with .metadata and *.distcp, or one with "
            "model_world_size_*_rank_*.pt"
        ),
    )


def state_of(folder: Path, names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Size in bytes, and time of the last change in nanoseconds, of files in a folder.

    Raises:
        NotFound: a file is missing.
    """
    found = {}
    for name in names:
        try:
            state = (folder / name).stat()
        except FileNotFoundError as error:
            raise NotFound(f"the file {name} is missing in {folder}") from error
        # ctime, not mtime: copying programs set mtime
        found[name] = state.st_size, state.st_ctime_ns
    return found


def plan_conversion(source: Path, options: ConvertOptions) -> Conversion:
    """Inspect a folder and plan its conversion: a Hugging Face folder to torch_dist, or any checkpoint to a Hugging
    Face folder.

    Raises:
        NotFound: the folder does not contain a checkpoint, or the checkpoint does not have a ``config.json``.
        DataLoss: a file of the checkpoint is damaged or truncated.
        InvalidArgument: the tensors are not those that ``config.json`` describes, or cannot be converted without loss.
        LayoutError: a tensor is missing, unknown, duplicated or of the wrong dtype. The error names these tensors.
    """
    options.check()
    kind = kind_of_folder(source)
    options.check_for(kind)
    if kind == "hugging_face":
        return _from_hugging_face(source, options)
    return _from_checkpoint(source, options, kind)


# -- Hugging Face to torch_dist ----------------------------------------------------------------------------------------


def _from_hugging_face(source: Path, options: ConvertOptions) -> Conversion:
    sides = SideFiles.read(source)
    side = sides.files
    mapped = safetensors_files.read_folder(source)
    read = state_of(source, [*mapped.buffers, *side])
    there = mapped.layout
    del mapped
    tied = tied_copies(side["config.json"], there.tensors)
    bridge, tensors = _hugging_face_model(side["config.json"], there, tied)
    wanted = checkpoint_tensors(
        bridge, tensors, keys=options.keys, spec=options.spec, vocab_multiple=options.vocab_multiple
    )
    # every version of Transformer Engine accepts None for "not quantised"; Megatron's own layers accept any value
    content = saved([None])
    laid_out = lay_out_torch_dist(
        wanted.shards,
        wanted.specs,
        options.max_file_bytes or DEFAULT_CHECKPOINT_FILE_BYTES,
        common={"iteration": 0, "checkpoint_version": 3.0},
        objects=dict.fromkeys(wanted.objects, content),
    )
    relation = derive_weight_map(bridge, tensors, {spec.name: spec for spec in wanted.specs})
    twins = (*_tied_twins(there, tied), *_twins(there, relation))
    left_out = {twin.name for twin in twins}
    plan = _planned(
        relation.as_seen(there.without(left_out)), laid_out.layout, relation.inverse_links, relation.padding
    )
    metadata = laid_out.metadata_files
    return Conversion(
        "hugging_face",
        source,
        read,
        plan,
        twins,
        laid_out.files,
        {
            **{f"{SIDE_FOLDER}/{name}": data for name, data in side.items()},
            COMMON_FILE: metadata[COMMON_FILE],
            CONFIG_FILE: metadata[CONFIG_FILE],
            METADATA_FILE: metadata[METADATA_FILE],
        },
        {**({"copies of other tensors": len(twins)} if twins else {}), **sides.kinds()},
        relation.inverse_shifts,
    )


def _hugging_face_model(
    config_json: bytes, there: Layout, tied: Mapping[str, str]
) -> tuple[Bridge, dict[str, TensorSpec]]:
    """The bridge of the model, and the tensors in its files."""
    scaled = [name for name in there.tensors if name.endswith(SCALE_SUFFIX)]
    if scaled or any(spec.dtype.name.startswith("F8") for spec in there.tensors.values()):
        raise InvalidArgument(
            (
                f"the weights are quantised to 8 bits, with {counted(len(scaled), 'tensor')} of "
                "scales: Megatron-core has no keys for these"
            ),
            details=scaled[:_NAMED],
            fix="dequantise them first: weighbridge import --dequantize bf16, then convert the folder of that version",
        )
    config = parse_config(config_json)
    specs = [spec for name, spec in there.tensors.items() if name not in tied]
    found = tensors_found(bridge_for(config_json), config, specs)
    bridge = bridge_for(config_json, found.absent)
    return bridge, {name: there.tensors[name] for name in bridge.hugging_face}


def _tied_twins(there: Layout, tied: Mapping[str, str]) -> Iterable[Twin]:
    placed = {p.shard.tensor: p for p in there.placements}
    return (Twin(copy, placed[copy], placed[original]) for copy, original in tied.items())


def _twins(there: Layout, relation: WeightMap) -> Iterable[Twin]:
    """Copies in the Hugging Face folder. They are not converted, but must equal their originals."""
    links: dict[tuple[str, object], list[Link]] = {}
    for link in relation.links:
        links.setdefault((link.source, link.source_box), []).append(link)
    placed = {p.shard.tensor: p for p in there.placements}
    for copy in relation.copies:
        for link in links[copy.source, copy.source_box]:
            if link.target_box == copy.target_box and copy.target in placed:
                yield Twin(copy.target, placed[copy.target], placed[link.target])


# -- checkpoints to Hugging Face ---------------------------------------------------------------------------------------


def _from_checkpoint(source: Path, options: ConvertOptions, kind: Kind) -> Conversion:
    described = state_of(source, [METADATA_FILE] if kind == "torch_dist" else [])
    checkpoint, named = read_checkpoint(source)
    read = {**state_of(source, checkpoint.file_sizes), **described}
    most = options.max_file_bytes or safetensors_files.DEFAULT_SHARD_BYTES
    sides = side_files_of(source, options.config)
    side = sides.files
    twins: tuple[Twin, ...] = ()
    shifts: Mapping[str, float] = {}
    if named:
        model = named_model(side["config.json"], checkpoint)
        if not has_weight_map(parse_config(side["config.json"])):
            fix = "give the config.json that belongs to the checkpoint (--config), and a checkpoint of the whole model"
            check_library_model(side["config.json"], model.tensors.values(), fix)
        tensors, left_out = model.tensors, {**model.left_out, **_other_files(source, read)}
        twins = model.tied
        files = safetensors_files.lay_out_files(list(tensors.values()), most)
        plan = _planned(model.layout, files.layout, list(model.links))
    else:
        check_trained(side["config.json"], trained_arguments(common_values(source, checkpoint)))
        there, left_out = model_part(checkpoint)
        tensors, relation = checkpoint_model(side["config.json"], there)
        files = safetensors_files.lay_out_files(list(tensors.values()), most)
        target, shifts = relation.as_seen(files.layout), relation.shifts_there
        plan = _planned(there, target, relation.links, relation.padding, relation.copies)
    index = files.index_json
    return Conversion(
        kind,
        source,
        read,
        plan,
        twins,
        tuple(FramedFile(file.name, file.nbytes, ((0, file.header),)) for file in files.files),
        {
            **side,
            CONFIG: in_dtype_of(tensors.values(), side[CONFIG]),
            **({safetensors_files.INDEX_FILE: index} if index is not None else {}),
        },
        {**left_out, **sides.kinds()},
        shifts,
    )


def _other_files(source: Path, taken: Iterable[str]) -> dict[str, int]:
    """Number of files that ranks have saved in addition to the model, by kind."""
    known = frozenset(taken)
    stems = (
        path.name.partition("_world_size_")[0]
        for path in source.glob("*_world_size_*_rank_*.pt")
        if path.name not in known
    )
    return {f"{readable(stem)} (files)": count for stem, count in sorted(Counter(stems).items())}


def _planned(
    source: Layout,
    target: Layout,
    links: Sequence[Link],
    padding: Sequence[tuple[str, Box]] = (),
    copies: Sequence[Link] = (),
) -> Plan:
    try:
        return make_plan(source, target, links, copies=copies, padding=padding, use_all=True)
    except LayoutError as error:
        raise LayoutError(
            f"the folder does not contain every tensor of the model exactly once: {error.message}",
            details=error.details,
            fix="every part of the model must occur exactly once, and an optional part, such as layers for multi-token "
            "prediction, must be complete or absent; check that config.json belongs to the weights",
        ) from error
