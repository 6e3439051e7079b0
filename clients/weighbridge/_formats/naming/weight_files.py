"""Selects the files of a folder that contain the weights of its model, by the folder's index or by their names. Pure.

If there is an index, its files are the model, unless a ``model.safetensors`` exists that it does not list: transformers
would load that file, vLLM and SGLang those of the index. Without an index, files that are numbered ``-00002-of-00003``
are a series that must be complete; ``model.safetensors`` is a series of a single file. Files of no series have entirely
different names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from weighbridge._core.file_names import ADAPTER_CONFIG, CONFIG, is_adapter
from weighbridge._core.text.counts import counted, first_lines
from weighbridge.errors import DataLoss, InvalidArgument, NotFound

_SERIES = re.compile(r"(?P<stem>.*)-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors")
_WHOLE = "model.safetensors"
_OTHER_FORM = re.compile(r"consolidated(?:[.-].*)?\.safetensors")
"""Files in which Mistral publishes the same weights again, under its own names."""
_ADAPTER = re.compile(r"adapter_model(?:[.-].*)?\.safetensors")
_OF_A_RANK = (
    (re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors"), "torch's HuggingFaceStorageWriter"),
    (re.compile(r"model-rank-\d+-part-\d+\.safetensors"), "vLLM's sharded_state"),
    (re.compile(r"model\d+-mp\d+\.safetensors"), "DeepSeek's convert.py"),
)
ADAPTER_WEIGHTS = "adapter_model.safetensors"
"""peft's name of the file with an adapter's weights."""
CONSOLIDATE = (
    "consolidate them first: consolidate_safetensors_files_on_every_rank or consolidate_safetensors_files of "
    "torch.distributed.checkpoint._consolidate_hf_safetensors; or save with enable_consolidation=True"
)
MERGE_ADAPTER = (
    "merge it first: "
    "AutoPeftModelForCausalLM.from_pretrained(ADAPTER_FOLDER).merge_and_unload().save_pretrained(NEW_FOLDER)"
)
IMPORT_ADAPTER = (
    "or import it as an adapter of its base: weighbridge import ADAPTER_FOLDER MODEL --base "
    "BASE@VERSION, under a model name of its own"
)
_FORMATS_OF_OTHERS = ("tf", "flax")
_NAMED = 20


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The safetensors files of a folder.

    Attributes:
        taken: names of those that contain the model.
        left_out: names of the others.
    """

    taken: tuple[str, ...]
    left_out: tuple[str, ...] = ()


def config_name(files: Collection[str]) -> str:
    """The name of the file that describes the weights."""
    return ADAPTER_CONFIG if is_adapter(files) else CONFIG


def weight_files(there: Collection[str], listed: Iterable[str] | None) -> WeightFiles:
    """Decide which files contain the model.

    Args:
        there: names of all safetensors files of a folder.
        listed: names of the files that its index names; None if there is no index.

    Raises:
        NotFound: a file of a series is missing.
        InvalidArgument: files belong to several models or series, belong to an adapter, or each contain one rank's
            parts of tensors.
    """
    if listed is not None:
        taken = tuple(sorted(set(listed)))
        if _WHOLE in there and _WHOLE not in taken:
            raise InvalidArgument(
                (
                    f"the folder has {_WHOLE} and an index of other files, so it contains two "
                    "models: transformers loads the first one, vLLM and SGLang the other"
                ),
                details=first_lines([_WHOLE, *taken]),
                fix=(
                    f"move away whichever an earlier save left: {_WHOLE}, or the index and its "
                    "files; a new folder for each save avoids this"
                ),
            )
        return WeightFiles(taken, tuple(sorted(set(there).difference(taken))))
    other_form = {name for name in there if _OTHER_FORM.fullmatch(name)}
    taken = tuple(sorted(set(there) - other_form)) or tuple(sorted(there))
    _check_of_ranks(taken)
    adapters = [name for name in taken if _ADAPTER.fullmatch(name)]
    if adapters:
        raise InvalidArgument(
            f"{' and '.join(adapters)} in the folder is an adapter, not the weights of a model",
            fix=f"{MERGE_ADAPTER}; {IMPORT_ADAPTER}; if the folder also has the merged weights, move the adapter away",
        )
    _check_series(taken)
    return WeightFiles(taken, tuple(sorted(set(there).difference(taken))))


def _check_of_ranks(names: Iterable[str]) -> None:
    for name in names:
        for pattern, writer in _OF_A_RANK:
            if pattern.fullmatch(name):
                raise InvalidArgument(
                    f"{name} is a rank's file of {writer}: it holds parts of tensors",
                    fix=CONSOLIDATE if pattern is _OF_A_RANK[0][0] else "name the folder from which they were made",
                )


def _check_series(names: Collection[str]) -> None:
    series: dict[tuple[str, int], set[int]] = {}
    alone = []
    for name in names:
        found = _SERIES.fullmatch(name)
        if found:
            series.setdefault((found["stem"], int(found["count"])), set()).add(int(found["number"]))
        elif name == _WHOLE:
            series[name, 1] = {1}
        else:
            alone.append(name)
    if len(series) > 1 or (series and alone):
        raise InvalidArgument(
            (
                f"the folder has {counted(len(names), 'safetensors file')} of several sets and no "
                "index, so the model's files cannot be identified"
            ),
            details=first_lines(sorted(names)),
            fix=(
                "move the files of other models away, or save the folder with "
                "model.save_pretrained(folder), which writes an index"
            ),
        )
    for (stem, count), numbers in series.items():
        first = 0 if 0 in numbers else 1
        # a name may contain any count
        missing = count - sum(first <= number < first + count for number in numbers)
        if missing:
            have = ", ".join(map(str, sorted(numbers)[:_NAMED]))
            raise NotFound(
                f"of the {count} files {stem}-*-of-*.safetensors {missing} "
                f"{'is' if missing == 1 else 'are'} missing; the folder has "
                f"only number {have}",
                fix="download or save all files of the folder again",
            )


def check_finished(folder: object, there: Iterable[str]) -> None:
    """Refuse the folder of an interrupted or running save: torch and Megatron-core write ``.metadata`` last.

    Args:
        folder: its name in the error.
        there: names of all its entries.

    Raises:
        NotFound: there are ``.distcp`` files, and neither ``.metadata`` nor safetensors files.
    """
    names = frozenset(there)
    endings = {name.rpartition(".")[2] for name in names}
    if "distcp" in endings and "safetensors" not in endings and ".metadata" not in names:
        raise NotFound(
            (
                f"{folder} is a checkpoint whose save has not finished: it has .distcp files, and "
                "no .metadata, which is written last"
            ),
            fix=(
                "wait until the save has finished, or name the checkpoint of an earlier step; if "
                "the folder is a copy, copy hidden files as well"
            ),
        )


def check_listed(listed: Mapping[str, str], there: Collection[str]) -> None:
    """Refuse files that lack tensors which their index lists.

    Args:
        listed: the index: names of tensors, each with the name of its file.
        there: names of the tensors in the files.

    Raises:
        DataLoss: tensors are missing; names each.
    """
    missing = [f"{name} in {file}" for name, file in listed.items() if name not in there]
    if missing:
        raise DataLoss(
            f"the index lists {counted(len(missing), 'tensor')} that the files do not contain",
            details=first_lines(missing),
            fix="download or save all files of the folder again, including the index",
        )


def check_parts(file: str, metadata: Mapping[str, str], offsets: Mapping[str, Collection[int]]) -> None:
    """Refuse a file if its header states that it contains parts of tensors, or tensors of another framework.

    Args:
        file: its name.
        metadata: ``__metadata__`` of its header.
        offsets: offsets of the parts in their tensors, as recorded by torch's HuggingFaceStorageWriter.

    Raises:
        InvalidArgument: the header states this.
    """
    parts = [name for name, offset in offsets.items() if any(offset)]
    if parts:
        raise InvalidArgument(
            (
                f"{file} is a rank's file of torch's HuggingFaceStorageWriter: it holds parts of "
                f"{counted(len(parts), 'tensor')}"
            ),
            details=first_lines(parts),
            fix=CONSOLIDATE,
        )
    if metadata.get("format") in _FORMATS_OF_OTHERS:
        raise InvalidArgument(
            f"{file} holds weights of {metadata['format']}, whose names and axes differ from torch's",
            fix=(
                "load them with transformers' from_pretrained(folder, from_tf=True or "
                "from_flax=True), and save the model again"
            ),
        )
