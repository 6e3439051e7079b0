"""What does a conversion come down to: which bytes of which file go where, and what is left out?

Nothing is written here, and of weights nothing is read. Whatever is wrong with a folder is found before a byte moves.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

from weighbridge import hf_folder, safetensors_files
from weighbridge.dtypes import DType
from weighbridge.errors import InvalidArgument, LayoutError, NotFound
from weighbridge.layouts import Layout, Placement, TensorSpec
from weighbridge_service.bridges import Bridge, bridge_for, parse_config
from weighbridge_service.converting.checkpoint_keys import (
    KeyForm,
    LayerSpec,
    checkpoint_tensors,
    empty_object,
)
from weighbridge_service.model_tensors import SCALE_SUFFIX, tensors_found
from weighbridge_service.planning import Plan, make_plan
from weighbridge_service.relations import Link, WeightMap
from weighbridge_service.weight_maps import derive_weight_map
from weighbridge_storage.torch_dist import TorchDistCheckpoint, lay_out_torch_dist, read_torch_dist
from weighbridge_storage.torch_dist_metadata import COMMON_FILE, CONFIG_FILE, METADATA_FILE

Kind = Literal["hugging_face", "torch_dist"]

SIDE_FOLDER = "hf"
"""Folder inside of a checkpoint in which the model's config, tokenizer and so on are kept."""
DEFAULT_CHECKPOINT_FILE_BYTES = 2_000_000_000
"""Size of ``.distcp`` files unless asked otherwise: smaller than a Hugging Face file, so that several can be written at once."""
_FIRST_KEYS = ("embedding.word_embeddings.weight", "decoder.final_layernorm.weight")
_PREFIXES = ("", "module.", "model.", "module.module.")
"""What may stand before all keys: Megatron-LM, verl and slime write none, NeMo the names of its wrappers."""
_NOT_WEIGHTS = re.compile(
    r"^(?:chained_\d+\.)?(optimizer|opt_param_scheduler|rng_state|rerun_state_machine)\b"
)
_NAMED = 20


@dataclass(frozen=True)
class ConvertOptions:
    """What can be chosen.

    Attributes:
        config: a Hugging Face folder with the config, tokenizer and so on of a torch_dist checkpoint; None where the
            checkpoint has them itself.
        keys: form of the keys of a checkpoint that is written.
        spec: whose names its norms have.
        vocab_multiple: its vocabulary is padded to a multiple of it.
        max_file_bytes: about how large the files that are written may become.
    """

    config: Path | None = None
    keys: KeyForm = "auto"
    spec: LayerSpec = "te"
    vocab_multiple: int = 128
    max_file_bytes: int | None = None

    def check(self) -> None:
        """Refuse what makes no sense.

        Raises:
            InvalidArgument: a number is not positive.
        """
        if self.vocab_multiple < 1 or (self.max_file_bytes is not None and self.max_file_bytes < 1):
            raise InvalidArgument("the vocabulary's multiple and the largest file are at least 1")


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file that is written: name, size in bytes, and what is in it besides tensors, as ``(offset, bytes)``."""

    name: str
    nbytes: int
    framing: tuple[tuple[int, bytes], ...] = field(repr=False)


class Twin(NamedTuple):
    """A tensor of the source that is left out because it has to be the same as another one."""

    name: str
    copy: Placement
    original: Placement


@dataclass(frozen=True)
class Conversion:
    """All that is known before the first byte moves.

    Attributes:
        kind: of the source.
        source: its folder. Buffers of the plan's source are named like files in it.
        read: the source's files, all of them, with size in bytes and time of the last change in nanoseconds.
        plan: from the source's files to the target's.
        twins: what has to be compared.
        files: the files with tensors that are written.
        side_files: name and content of the others, which are written behind them in this order.
        left_out: how many entries of the source are not converted, by kind.
    """

    kind: Kind
    source: Path
    read: Mapping[str, tuple[int, int]]
    plan: Plan
    twins: tuple[Twin, ...]
    files: tuple[NewFile, ...]
    side_files: Mapping[str, bytes] = field(repr=False)
    left_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Size of all files that are written."""
        return sum(f.nbytes for f in self.files) + sum(map(len, self.side_files.values()))

    def identity(self) -> str:
        """What tells this conversion from every other one, as hex digits: the source's files and each byte's way."""
        sides = {name: hashlib.sha256(content).hexdigest() for name, content in self.side_files.items()}
        text = json.dumps(
            [
                str(self.source.resolve()), sorted(self.read.items()), self.plan.source.digest,
                self.plan.target.digest, self.plan.copies, self.plan.zeros, self.twins,
                [(f.name, f.nbytes) for f in self.files], sides,
            ]
        )  # fmt: skip
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def kind_of_folder(folder: Path) -> Kind:
    """Which kind of checkpoint lies in a folder.

    Raises:
        NotFound: neither.
    """
    if (folder / METADATA_FILE).exists():
        return "torch_dist"
    if (folder / safetensors_files.INDEX_FILE).exists() or any(folder.glob("*.safetensors")):
        return "hugging_face"
    if not folder.is_dir():
        raise NotFound(f"there is no folder {folder}")
    inner = sorted(path.parent.name for path in folder.glob(f"*/{METADATA_FILE}"))[-3:]
    raise NotFound(
        f"{folder} holds neither safetensors files nor a torch_dist checkpoint",
        fix=f"give the folder of one iteration, such as {', '.join(inner)}"
        if inner
        else "give a folder with *.safetensors, or one with .metadata and *.distcp",
    )


def state_of(folder: Path, names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Size in bytes, and time of the last change in nanoseconds, of files in a folder.

    Raises:
        NotFound: one is missing.
    """
    found = {}
    for name in names:
        try:
            state = (folder / name).stat()
        except FileNotFoundError as error:
            raise NotFound(f"the file {name} is missing in {folder}") from error
        found[name] = state.st_size, state.st_mtime_ns
    return found


def plan_conversion(source: Path, options: ConvertOptions) -> Conversion:
    """Find out what is in a folder, and plan its conversion to the other kind.

    Raises:
        NotFound: there is no checkpoint, or no ``config.json`` for it.
        DataLoss: a file of it is damaged or cut short.
        InvalidArgument: the tensors are not those that ``config.json`` describes, or cannot be kept as they are.
        LayoutError: some tensor is missing, unknown, there twice or of the wrong dtype; names them.
    """
    options.check()
    if kind_of_folder(source) == "hugging_face":
        return _from_hugging_face(source, options)
    return _from_torch_dist(source, options)


# -- Hugging Face to torch_dist -------------------------------------------------------------------------------------------


def _from_hugging_face(source: Path, options: ConvertOptions) -> Conversion:
    side = hf_folder.side_files(source)
    mapped = safetensors_files.map_folder(source)
    read = state_of(source, [*mapped, *side])
    there = safetensors_files.layout_of_files({name: data.data for name, data in mapped.items()}).layout
    del mapped
    bridge, tensors = _hugging_face_model(side["config.json"], there)
    wanted = checkpoint_tensors(
        bridge, tensors, keys=options.keys, spec=options.spec, vocab_multiple=options.vocab_multiple
    )
    content = empty_object()
    laid_out = lay_out_torch_dist(
        wanted.shards,
        wanted.specs,
        options.max_file_bytes or DEFAULT_CHECKPOINT_FILE_BYTES,
        common={"iteration": 0, "checkpoint_version": 3.0},
        objects=dict.fromkeys(wanted.objects, content),
    )
    relation = derive_weight_map(bridge, tensors, {spec.name: spec for spec in wanted.specs})
    twins = tuple(_twins(there, relation))
    left_out = {twin.name for twin in twins}
    kept = Layout(
        {name: spec for name, spec in there.tensors.items() if name not in left_out},
        tuple(p for p in there.placements if p.shard.tensor not in left_out),
    )
    plan = _planned(kept, laid_out.layout, relation.inverse_links, relation)
    metadata = laid_out.metadata_files
    return Conversion(
        "hugging_face",
        source,
        read,
        plan,
        twins,
        tuple(NewFile(file.name, file.nbytes, file.framing) for file in laid_out.files),
        {
            **{f"{SIDE_FOLDER}/{name}": data for name, data in side.items()},
            COMMON_FILE: metadata[COMMON_FILE],
            CONFIG_FILE: metadata[CONFIG_FILE],
            METADATA_FILE: metadata[METADATA_FILE],
        },
        {**({"copies of other tensors": len(twins)} if twins else {}), **_not_taken(source, read)},
    )


def _hugging_face_model(config_json: bytes, there: Layout) -> tuple[Bridge, dict[str, TensorSpec]]:
    """The model, and the tensors that its files have."""
    scaled = [name for name in there.tensors if name.endswith(SCALE_SUFFIX)]
    if scaled or any(spec.dtype.name.startswith("F8") for spec in there.tensors.values()):
        raise InvalidArgument(
            f"the weights are quantised to 8 bits, with {len(scaled)} tensors of scales: Megatron-core has no keys for these",
            details=scaled[:_NAMED],
            fix="dequantise them first: weighbridge import --dequantize bf16, then convert the folder of that version",
        )
    config = parse_config(config_json)
    specs = list(there.tensors.values())
    found = tensors_found(bridge_for(config_json), config, specs)
    bridge = bridge_for(config_json, found.absent)
    return bridge, {name: there.tensors[name] for name in bridge.hugging_face}


def _twins(there: Layout, relation: WeightMap) -> Iterable[Twin]:
    """What Hugging Face has a second time: not converted, but it must be the same."""
    links: dict[tuple[str, object], list[Link]] = {}
    for link in relation.links:
        links.setdefault((link.source, link.source_box), []).append(link)
    placed = {p.shard.tensor: p for p in there.placements}
    for copy in relation.copies:
        for link in links[copy.source, copy.source_box]:
            if link.target_box == copy.target_box and copy.target in placed:
                yield Twin(copy.target, placed[copy.target], placed[link.target])


# -- torch_dist to Hugging Face -------------------------------------------------------------------------------------------


def _from_torch_dist(source: Path, options: ConvertOptions) -> Conversion:
    described = state_of(source, [METADATA_FILE])
    checkpoint = read_torch_dist(source)
    read = {**state_of(source, checkpoint.file_sizes), **described}
    there, left_out = model_part(checkpoint)
    side = side_files_of(source, options.config)
    tensors, relation = checkpoint_model(side["config.json"], there)
    side = in_dtype_of(tensors.values(), side)
    files = safetensors_files.lay_out_files(
        list(tensors.values()), options.max_file_bytes or safetensors_files.DEFAULT_SHARD_BYTES
    )
    plan = _planned(there, files.layout, relation.links, relation, copies=relation.copies)
    index = files.index_json
    return Conversion(
        "torch_dist",
        source,
        read,
        plan,
        (),
        tuple(NewFile(file.name, file.nbytes, ((0, file.header),)) for file in files.files),
        {**side, **({safetensors_files.INDEX_FILE: index} if index is not None else {})},
        left_out,
    )


def model_part(checkpoint: TorchDistCheckpoint) -> tuple[Layout, dict[str, int]]:
    """A checkpoint's weights, under the keys that Megatron-core gives them, and how much there is besides, by kind.

    Raises:
        NotFound: there are no weights of a model.
    """
    tensors = checkpoint.layout.tensors
    left_out: Counter[str] = Counter()
    for name in checkpoint.others:
        key = name.rpartition("/")[0] or name
        state = _NOT_WEIGHTS.match(key)
        kind = "_extra_state" if key.endswith("._extra_state") else key
        left_out[f"{state[1] if state else kind} (objects)"] += 1
    weights = []
    for name in tensors:
        state = _NOT_WEIGHTS.match(name)
        if state:
            left_out[f"{state[1]} (tensors)"] += 1
        else:
            weights.append(name)
    prefix = next((p for p in _PREFIXES for key in _FIRST_KEYS if p + key in tensors), "")
    keys = {name: name.removeprefix(prefix) for name in weights}
    if len(set(keys.values())) != len(keys):
        twice = sorted(name for name in weights if prefix + name in tensors)
        raise LayoutError(f"keys are there with and without {prefix!r} in front", details=twice[:_NAMED])
    if not keys:
        raise NotFound("the checkpoint has no weights of a model", details=sorted(left_out)[:_NAMED])
    return Layout(
        {key: replace(tensors[name], name=key) for name, key in keys.items()},
        tuple(
            p._replace(shard=p.shard._replace(tensor=keys[p.shard.tensor]))
            for p in checkpoint.layout.placements
            if p.shard.tensor in keys
        ),
    ), dict(sorted(left_out.items()))


def side_files_of(source: Path, config: Path | None) -> dict[str, bytes]:
    """The files of a checkpoint's model besides its weights.

    Args:
        source: the checkpoint.
        config: where they are; None to look in the checkpoint itself.

    Raises:
        NotFound: there are none.
    """
    if config is not None:
        return hf_folder.side_files(config)
    for folder in (source / SIDE_FOLDER, source):
        if (folder / "config.json").is_file():
            found = hf_folder.side_files(folder)
            return {name: data for name, data in found.items() if name != CONFIG_FILE}
    raise NotFound(
        f"{source} has no config.json: a checkpoint of Megatron-core does not say which model it is of",
        fix="name a Hugging Face folder that has it, and the tokenizer, with --config",
    )


def in_dtype_of(tensors: Iterable[TensorSpec], side_files: Mapping[str, bytes]) -> dict[str, bytes]:
    """A model's files with a ``config.json`` that names the dtype of most of its weights: loaders go by that."""
    counted: Counter[DType] = Counter()
    for spec in tensors:
        if spec.dtype.is_float:
            counted[spec.dtype] += spec.nbytes
    if not counted:
        return dict(side_files)
    config = hf_folder.with_dtype(side_files["config.json"], counted.most_common(1)[0][0])
    return {**side_files, "config.json": config}


def _not_taken(source: Path, taken: Iterable[str]) -> dict[str, int]:
    """What lies in a Hugging Face folder and is not converted, by what it is."""
    known = {*taken, safetensors_files.INDEX_FILE, "weighbridge.json"}
    names = sorted(path.name for path in source.iterdir() if path.name not in known)
    return {f"files ({', '.join(names[:_NAMED])})": len(names)} if names else {}


def checkpoint_model(config_json: bytes, there: Layout) -> tuple[dict[str, TensorSpec], WeightMap]:
    """The model's tensors without the optional parts that the checkpoint lacks, in its dtypes, and how they relate.

    Args:
        config_json: which model it is.
        there: the checkpoint's weights.

    Raises:
        InvalidArgument: the config has no map.
        LayoutError: a tensor is unknown, or has another shape than the model's; names them all.
    """
    parse_config(config_json)
    absent: tuple[str, ...] = ()
    while True:
        bridge = bridge_for(config_json, absent)
        tensors, relation = _in_its_dtypes(bridge, there)
        reached = {link.target for link in relation.links}
        # a part's copies are made of tensors that are there anyway: they do not tell
        copied = {link.target for link in relation.copies}
        lacking = [
            part
            for part, names in bridge.parts.items()
            if part not in absent and reached.isdisjoint(names) and not copied.issuperset(names)
        ]
        if not lacking:
            return tensors, relation
        absent = tuple(sorted((*absent, *lacking)))


def _in_its_dtypes(bridge: Bridge, there: Layout) -> tuple[dict[str, TensorSpec], WeightMap]:
    """Hugging Face's tensors in the dtypes of the checkpoint's, and how they relate."""
    by_dtype: dict[DType, dict[str, TensorSpec]] = {}
    for name, spec in there.tensors.items():
        by_dtype.setdefault(spec.dtype, {})[name] = spec
    maps = []
    dtypes: dict[str, DType] = {}
    problems: list[str] = []
    for dtype, declared in by_dtype.items():
        alike = {name: TensorSpec(name, dtype, shape) for name, shape in bridge.hugging_face.items()}
        made = derive_weight_map(bridge, alike, declared)
        maps.append(made)
        problems += [
            f"{target}: one part of it is {dtypes[target]}, another {dtype}"
            for target in {link.target for link in (*made.links, *made.copies)}
            if dtypes.setdefault(target, dtype) != dtype
        ]
    if problems:
        raise LayoutError(
            f"{len(problems)} tensors have parts of different dtypes", details=problems[:_NAMED]
        )
    usual = max(by_dtype, key=lambda dtype: sum(spec.nbytes for spec in by_dtype[dtype].values()))
    tensors = {
        name: TensorSpec(name, dtypes.get(name, usual), shape) for name, shape in bridge.hugging_face.items()
    }
    return tensors, WeightMap(
        there.tensors,
        tensors,
        tuple(link for made in maps for link in made.links),
        tuple(padding for made in maps for padding in made.padding),
        tuple(link for made in maps for link in made.copies),
    )


def _planned(
    source: Layout, target: Layout, links: Sequence[Link], relation: WeightMap, copies: Sequence[Link] = ()
) -> Plan:
    try:
        return make_plan(source, target, links, copies=copies, padding=relation.padding, use_all=True)
    except LayoutError as error:
        raise LayoutError(
            f"the folder does not hold every tensor of the model exactly once: {error.message}",
            details=error.details,
            fix="every part of the model must be there once, and of an optional part such as layers for multi-token "
            "prediction all or nothing; check that config.json belongs to the weights",
        ) from error
