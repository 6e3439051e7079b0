"""Choice of the files of a folder that belong to the model besides its weights. Pure.

Everything is kept but weights, which are pushed as tensors or are there in another format, what a trainer keeps to go on, and what is too
large to be registered. Each file or folder that is left out is named, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from weighbridge._core.file_names import SIGNATURES_FOLDER, is_component, is_file_name
from weighbridge._core.text.sizes import readable_size

MAX_BYTES = 60 << 20
"""Of all files together: a registration is one request, which has 64 MiB at most."""

_NEEDED = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".md", ".py", ".spm", ".bpe")
"""Endings of files that loaders ask for. They are never left out for their size: a registration that is too large says so."""
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
class Found:
    """A file that lies in a folder.

    Attributes:
        name: its path within the folder, with slashes.
        nbytes: its size.
    """

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Choice:
    """The files that are taken, and the others.

    Attributes:
        taken: names of the files, in order.
        left_out: why each other file, or folder with all that lies in it (its name ends with a slash), is not taken.
    """

    taken: tuple[str, ...]
    left_out: Mapping[str, str]


def is_passed_over(component: str) -> bool:
    """Whether a file or folder of this name is of no checkpoint: hidden ones are those of version control, caches and editors."""
    return component.startswith(".") or component == "__pycache__"


def holds_weights(names: Iterable[str]) -> bool:
    """Whether files with these names, which lie side by side, are a checkpoint of their own, or a part of one."""
    return any(_WEIGHTS.search(name.lower()) for name in names)


def choose(found: Iterable[Found], most_bytes: int = MAX_BYTES) -> Choice:
    """Say which files of a folder belong to the model besides its weights.

    A folder in it that has weights beside its files is left out as a whole: ``checkpoint-500``, ``onnx``, ``original``. Of files that no
    loader is known to ask for, the smaller ones are taken first, as far as there is room.

    Args:
        found: the regular files, those in folders too.
        most_bytes: that can be registered together.
    """
    files = sorted(found, key=lambda each: each.name)
    of_folder: dict[str, list[str]] = {}
    for each in files:
        folder, slash, name = each.name.rpartition("/")
        of_folder.setdefault(folder + slash, []).append(name)
    apart = {folder for folder, names in of_folder.items() if folder and holds_weights(names)}.union(_LOGS)
    left_out: dict[str, str] = {}
    kept: list[Found] = []
    for each in files:
        inside = next((folder for folder in _folders(each.name) if folder in apart), None)
        if inside is not None:
            left_out[inside] = "it is of the trainer" if inside in _LOGS else "it holds weights of its own"
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
                f"it has {readable_size(each.nbytes)}, and {readable_size(most_bytes)} can be registered in all"
            )
            continue
        taken.add(each.name)
        room -= each.nbytes
    return Choice(tuple(sorted(taken)), dict(sorted(left_out.items())))


def _folders(name: str) -> Iterator[str]:
    """The folders that a file lies in, the outermost first, each with its slash."""
    return (name[: slash.end()] for slash in re.finditer("/", name))


def _is_own(name: str) -> bool:
    """Whether a file is the weights that are pushed, or what a service has written beside them: a version gets its own."""
    lowered = name.lower()
    if lowered.startswith(f"{SIGNATURES_FOLDER}/"):
        return True
    return "/" not in name and (lowered in _OWN_FILES or lowered.endswith(_OWN_ENDINGS))


def _reason(name: str) -> str:
    last = name.rpartition("/")[2].lower()
    if not is_file_name(name):
        part = next((each for each in name.split("/") if not is_component(each)), name)
        return f"no file of a version can be called {part[:80]!r}"
    if _TRAINING.match(last):
        return "it is of the trainer"
    if last.endswith(_OWN_ENDINGS) or last in _OWN_FILES:
        return "a version has such files of its own"
    if _WEIGHTS.search(last) or _INDEX.search(last):
        return "it holds weights in another format"
    return ""


def _is_needed(name: str) -> bool:
    return name.lower().endswith(_NEEDED)
