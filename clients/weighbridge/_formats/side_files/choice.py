"""Selection of a folder's files, other than weights, that belong to the model. Pure.

All files are included except weights (which are pushed as tensors, or exist in another format), a trainer's state for
resuming, and files that are too large to register. Each excluded file or folder is reported with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from weighbridge._core.file_names import SIGNATURES_FOLDER, is_component, is_file_name
from weighbridge._core.text.sizes import readable_size

MAX_BYTES = 60 << 20
"""Limit for all files together: a registration is one request of at most 64 MiB."""

_NEEDED = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".md", ".py", ".spm", ".bpe")
"""Suffixes of files that loaders request.

They are never excluded for their size; a registration that is too large fails with an error.
"""
_OWN_FILES = ("weighbridge.json",)
_OWN_ENDINGS = (".safetensors", ".safetensors.index.json", ".blake3")
_WEIGHTS = re.compile(
    r"\.(?:safetensors|bin|pt|pth|ckpt|h5|hdf5|keras|msgpack|onnx|onnx_data|ot|gguf|ggml|npy|npz|pb|tflite|mlmodel|mlpackage|pkl|pickle|joblib|"
    r"distcp|nemo|llamafile|engine)$"
)
_INDEX = re.compile(r"\.(?:bin|h5|msgpack|safetensors)\.index(?:\.[\w-]+)?\.json$")
_LOGS = ("runs/", "wandb/", "mlruns/")
_TRAINING = re.compile(
    r"(?:trainer_state\.json|training_args\.(?:bin|json)|(?:optimizer|scheduler|scaler|rng_state|random_states)\w*\.(?:pt|pth|bin|pkl)|latest|zero_to_fp32\.py|"
    r"events\.out\.tfevents\..*)$"
)


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file in a folder.

    Attributes:
        name: its path within the folder, with slashes.
        nbytes: its size.
    """

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Choice:
    """The included files, and the excluded ones.

    Attributes:
        taken: names of the included files, in order.
        left_out: the reason for each excluded file or folder. The name of a folder ends with a slash and covers its
            whole content.
    """

    taken: tuple[str, ...]
    left_out: Mapping[str, str]


def is_passed_over(component: str) -> bool:
    """Whether a file or folder with this name is not part of a checkpoint: hidden ones belong to version control,
    caches and editors.
    """
    return component.startswith(".") or component == "__pycache__"


def holds_weights(names: Iterable[str]) -> bool:
    """Whether files with these names in one folder are a separate checkpoint, or a part of one."""
    return any(_WEIGHTS.search(name.lower()) for name in names)


def choose(found: Iterable[FoundFile], most_bytes: int = MAX_BYTES) -> Choice:
    """Select the files of a folder, other than weights, that belong to the model.

    A subfolder that contains weights is excluded as a whole: ``checkpoint-500``, ``onnx``, ``original``. Files that no
    known loader requests are included up to the limit, smaller ones first.

    Args:
        found: the regular files, including those in subfolders.
        most_bytes: maximum bytes that can be registered together.
    """
    files = sorted(found, key=lambda each: each.name)
    of_folder: dict[str, list[str]] = {}
    for each in files:
        folder, slash, name = each.name.rpartition("/")
        of_folder.setdefault(folder + slash, []).append(name)
    apart = {folder for folder, names in of_folder.items() if folder and holds_weights(names)}.union(_LOGS)
    left_out: dict[str, str] = {}
    kept: list[FoundFile] = []
    for each in files:
        inside = next((folder for folder in _folders(each.name) if folder in apart), None)
        if inside is not None:
            left_out[inside] = "it belongs to the trainer" if inside in _LOGS else "it holds weights of its own"
        elif not _is_own(each.name):
            reason = _reason(each.name)
            if reason:
                left_out[each.name] = reason
            else:
                kept.append(each)
    room = most_bytes - sum(each.nbytes for each in kept if _is_needed(each.name))
    taken = {each.name for each in kept if _is_needed(each.name)}
    for each in sorted(kept, key=lambda file: (file.nbytes, file.name)):
        if each.name in taken:
            continue
        if each.nbytes > room:
            left_out[each.name] = (
                f"it has {readable_size(each.nbytes)}, and at most {readable_size(most_bytes)} "
                "can be registered in total"
            )
            continue
        taken.add(each.name)
        room -= each.nbytes
    return Choice(tuple(sorted(taken)), dict(sorted(left_out.items())))


def _folders(name: str) -> Iterator[str]:
    """The folders that contain a file, outermost first, each with a trailing slash."""
    return (name[: slash.end()] for slash in re.finditer("/", name))


def _is_own(name: str) -> bool:
    """Whether a file contains the pushed weights, or was written next to them by a service, which writes new ones for
    each version.
    """
    lowered = name.lower()
    if lowered.startswith(f"{SIGNATURES_FOLDER}/"):
        return True
    return "/" not in name and (lowered in _OWN_FILES or lowered.endswith(_OWN_ENDINGS))


def _reason(name: str) -> str:
    last = name.rpartition("/")[2].lower()
    if not is_file_name(name):
        part = next((each for each in name.split("/") if not is_component(each)), name)
        return f"{part[:80]!r} is not a valid file name in a version"
    if _TRAINING.match(last):
        return "it belongs to the trainer"
    if last.endswith(_OWN_ENDINGS) or last in _OWN_FILES:
        return "a version has such files of its own"
    if _WEIGHTS.search(last) or _INDEX.search(last):
        return "it holds weights in another format"
    return ""


def _is_needed(name: str) -> bool:
    return name.lower().endswith(_NEEDED)
