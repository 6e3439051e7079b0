"""Model in a torch_dist checkpoint: its weights under Megatron-core's keys, and its other files."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from weighbridge._core.dtypes import DType
from weighbridge._core.layouts import Layout, TensorSpec
from weighbridge._core.text.counts import counted
from weighbridge._core.text.shortening import readable
from weighbridge._formats.side_files.reading import SideFiles
from weighbridge._trainers.torch_dist.folder import TorchDistCheckpoint
from weighbridge._trainers.torch_dist.metadata import CONFIG_FILE
from weighbridge.errors import LayoutError, NotFound
from weighbridge_service.models.bridges import Bridge, bridge_for
from weighbridge_service.models.weight_maps import derive_weight_map
from weighbridge_service.plan.relations import WeightMap

SIDE_FOLDER = "hf"
"""Folder in a checkpoint that contains the model's config, tokenizer and similar files."""
_SIDE_FOLDER_OF_VERL = "huggingface"
_FIRST_KEYS = ("embedding.word_embeddings.weight", "decoder.final_layernorm.weight")
_PREFIXES = ("", "module.", "model.", "module.module.")
"""Prefixes that all keys of a checkpoint may have. Megatron-LM, verl and slime do not write a prefix; NeMo writes the
names of its wrappers.
"""
_NOT_WEIGHTS = re.compile(r"^(?:chained_\d+\.)?(optimizer|opt_param_scheduler|rng_state|rerun_state_machine)\b")
_NAMED = 20


def model_part(checkpoint: TorchDistCheckpoint) -> tuple[Layout, dict[str, int]]:
    """Weights of a checkpoint under Megatron-core's keys, and the number of its other entries by kind.

    Raises:
        NotFound: the checkpoint does not contain weights of a model.
        LayoutError: the checkpoint contains keys both with and without a prefix.
    """
    tensors = checkpoint.layout.tensors
    left_out: Counter[str] = Counter()
    for name in checkpoint.others:
        key = name.rpartition("/")[0] or name
        state = _NOT_WEIGHTS.match(key)
        kind = "_extra_state" if key.endswith("._extra_state") else key
        left_out[f"{state[1] if state else readable(kind)} (objects)"] += 1
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
        raise LayoutError(
            f"the checkpoint has keys both with and without the prefix {prefix!r}", details=twice[:_NAMED]
        )
    if not keys:
        raise NotFound("the checkpoint has no weights of a model", details=sorted(left_out)[:_NAMED])
    return checkpoint.layout.renamed(keys), dict(sorted(left_out.items()))


def is_megatron(checkpoint: TorchDistCheckpoint) -> bool:
    """Whether a checkpoint contains weights under Megatron-core's keys."""
    return any(prefix + key in checkpoint.layout.tensors for prefix in _PREFIXES for key in _FIRST_KEYS)


def side_files_of(source: Path, config: Path | None) -> SideFiles:
    """Read the files of a checkpoint's model other than its weights.

    If they are in the checkpoint's own folder, other files there are not reported as omitted, because they belong to
    the checkpoint.

    Args:
        source: folder of the checkpoint.
        config: folder with the files; None to search the checkpoint itself.

    Raises:
        NotFound: ``config.json`` does not exist.
    """
    if config is not None:
        return SideFiles.read(config)
    for folder in (source / SIDE_FOLDER, source / _SIDE_FOLDER_OF_VERL, source):
        if (folder / "config.json").is_file():
            found = SideFiles.read(folder)
            files = {name: data for name, data in found.files.items() if name != CONFIG_FILE}
            return SideFiles(files, {} if folder == source else found.left_out)
    raise NotFound(
        f"{source} has no config.json: a checkpoint does not say which model it is of",
        fix="name a Hugging Face folder that has it, and the tokenizer, with --config",
    )


def checkpoint_model(config_json: bytes, there: Layout) -> tuple[dict[str, TensorSpec], WeightMap]:
    """Tensors of the model in the checkpoint's dtypes, without optional parts that the checkpoint does not contain, and
    their relation to the checkpoint.

    Args:
        config_json: config of the model.
        there: weights of the checkpoint.

    Raises:
        InvalidArgument: no weight map exists for the config.
        LayoutError: tensors are unknown, or their shapes differ from the model's. The error names them all.
    """
    absent: tuple[str, ...] = ()
    while True:
        bridge = bridge_for(config_json, absent)
        tensors, relation = _in_its_dtypes(bridge, there)
        reached = {link.target for link in relation.links}
        # copies are made from tensors that exist without the part, so they do not prove that the part exists
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
    """Hugging Face's tensors in the checkpoint's dtypes, and their relation to its tensors. Raises LayoutError."""
    by_dtype: dict[DType, dict[str, TensorSpec]] = {}
    for name, spec in there.tensors.items():
        by_dtype.setdefault(spec.dtype, {})[name] = spec
    maps = []
    dtypes: dict[str, DType] = {}
    problems: list[str] = []
    for dtype, declared in by_dtype.items():
        alike = {name: TensorSpec(name, dtype, shape) for name, shape in bridge.hugging_face.items()}
        try:
            made = derive_weight_map(bridge, alike, declared)
        except LayoutError as error:
            raise LayoutError(
                f"the checkpoint is not one of this {bridge.model_type} model: {error.message}",
                details=error.details,
                fix="give the config.json that belongs to the checkpoint (--config)",
            ) from error
        maps.append(made)
        problems += [
            f"{target}: one part of it is {dtypes[target]}, another {dtype}"
            for target in {link.target for link in (*made.links, *made.copies)}
            if dtypes.setdefault(target, dtype) != dtype
        ]
    if problems:
        raise LayoutError(
            counted(len(problems), "tensor has", "tensors have") + " parts of different dtypes",
            details=problems[:_NAMED],
        )
    usual = max(by_dtype, key=lambda dtype: sum(spec.nbytes for spec in by_dtype[dtype].values()))
    tensors = {name: TensorSpec(name, dtypes.get(name, usual), shape) for name, shape in bridge.hugging_face.items()}
    return tensors, WeightMap(
        there.tensors,
        tensors,
        tuple(link for made in maps for link in made.links),
        tuple(padding for made in maps for padding in made.padding),
        tuple(link for made in maps for link in made.copies),
        {name: shape for made in maps for name, shape in made.seen.items()},
        {name: shift for made in maps for name, shift in made.shifts.items()},
    )
