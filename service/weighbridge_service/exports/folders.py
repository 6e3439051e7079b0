"""Folder of exports: which paths lie in it, and folders in it that are being written."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from weighbridge._core.file_names import ADAPTER_CONFIG, CONFIG
from weighbridge._core.text.shortening import shown
from weighbridge.errors import InvalidArgument, Unavailable
from weighbridge_storage.documents.names import check_component

log = logging.getLogger(__name__)

_MOST_COMPONENTS = 8
_PARTIAL = ".export-"
"""How the names of folders begin that are being written."""
_IN_EACH = (CONFIG, ADAPTER_CONFIG)
"""Files of which each export has one."""
_OWN_NAME = re.compile(r"(.+--.+)--[0-9]+(?:-[0-9]+)?")
"""What `own_name` gives, with what `free_name` may put behind it."""


def inside(root: Path, folder: str) -> Path:
    """The path of a folder within ``root``.

    Raises:
        InvalidArgument: a component cannot be the name of a file in the store, or the folder, links followed, would
            lie somewhere else, or in another export.
    """
    components = folder.split("/")
    if len(components) > _MOST_COMPONENTS:
        raise InvalidArgument(
            f"{shown(folder)} has {len(components)} components", fix=f"use at most {_MOST_COMPONENTS}"
        )
    for component in components:
        try:
            check_component(component)
        except InvalidArgument as error:
            raise InvalidArgument(
                f"{shown(component)} cannot be part of an export's folder",
                fix="name a folder within the folder for exports, e.g. smol-bf16 or smol/17: 1 to 128 letters, digits, "
                "'-', '_' or '.', not starting with '-' or '.', between slashes",
            ) from error
    target = root.joinpath(*components)
    try:
        # no link may stand on the way: where one points can change
        inside = target.resolve() == root.resolve().joinpath(*components)
    except (OSError, RuntimeError):  # a loop of links
        inside = False
    if not inside:
        raise InvalidArgument(f"{shown(folder)} leads through a symbolic link", fix="name another folder")
    for parent in itertools.takewhile(lambda path: path != root, target.parents):
        if parent.exists() and not parent.is_dir():
            raise InvalidArgument(f"{parent} is not a folder", fix="name another folder")
        if any((parent / name).exists() for name in _IN_EACH):
            raise InvalidArgument(
                f"{shown(folder)} leads into another export, which is to stay as it is",
                fix="name another folder",
            )
    return target


def own_name(model: str, number: int) -> str:
    """The name of the folder that a version is written to unless another one is asked for; of the models, it is kept for this one."""
    return f"{model.replace('/', '--')}--{number}"


def check_own(folder: str, model: str) -> None:
    """Raise InvalidArgument if exports of another model are called so: whoever looks for those must not find this model, nor may whether
    there are any be told here."""
    name = _OWN_NAME.fullmatch(folder.partition("/")[0])
    if name is not None and name[1] != model.replace("/", "--"):
        raise InvalidArgument(
            f"{shown(folder)} is what an export of another model is called, and {model} is exported",
            fix=f"name another folder, or none, which makes one that begins with {own_name(model, 0)[:-1]}",
        )


def overlap(folder: Path, others: Iterable[Path]) -> bool:
    """Whether a folder is one of others, lies in one of them, or has one of them in it."""
    return any(folder.is_relative_to(other) or other.is_relative_to(folder) for other in others)


def free_name(root: Path, name: str, taken: Collection[Path]) -> Path:
    """A path in ``root`` that is not there, nor among those that are taken: the name, with a number behind it if need be."""
    suffixes = itertools.chain([""], (f"-{n}" for n in itertools.count(2)))
    candidates = (root / f"{name}{suffix}" for suffix in suffixes)
    return next(path for path in candidates if not overlap(path, taken) and not os.path.lexists(path))


@contextlib.contextmanager
def partial_folder(root: Path, name: str) -> Iterator[Path]:
    """A new folder in ``root``, locked while it is being written; removed if it has not been renamed in the end."""
    root.mkdir(parents=True, exist_ok=True)
    path = root / f"{_PARTIAL}{name}"
    path.mkdir()
    try:
        with _locked(path) as mine:
            if not mine:  # another service has just started, and taken it for abandoned
                raise Unavailable(f"{path} is being removed", fix="export again")
            yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Lock a folder against other processes; whether that succeeded. A process that dies loses its locks."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)


def sweep(root: Path) -> None:
    """Remove what services that died have left half written."""
    for path in root.glob(f"{_PARTIAL}*"):
        with contextlib.suppress(OSError), _locked(path) as abandoned:
            if abandoned:
                log.info("removing %s, which was never finished", path)
                shutil.rmtree(path)
