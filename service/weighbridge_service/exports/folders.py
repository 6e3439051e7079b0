"""Folder for exports: validation of paths within it, and partial folders."""

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
"""Prefix of the names of partial folders."""
_IN_EACH = (CONFIG, ADAPTER_CONFIG)
"""Every export contains at least one of these files."""
_OWN_NAME = re.compile(r"(.+--.+)--[0-9]+(?:-[0-9]+)?")
"""Pattern of the names from `own_name`, with the suffix that `free_name` may append."""


def inside(root: Path, folder: str) -> Path:
    """The path of a folder within ``root``.

    Raises:
        InvalidArgument: a component is not a valid name of a file in the store, the path leads through a symbolic link,
            or the folder would be within a file or another export.
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
        # no component may be a symbolic link, because its target can change
        inside = target.resolve() == root.resolve().joinpath(*components)
    except (OSError, RuntimeError):  # a loop of links
        inside = False
    if not inside:
        raise InvalidArgument(f"{shown(folder)} leads through a symbolic link", fix="name a different folder")
    for parent in itertools.takewhile(lambda path: path != root, target.parents):
        if parent.exists() and not parent.is_dir():
            raise InvalidArgument(f"{parent} is not a folder", fix="name a different folder")
        if any((parent / name).exists() for name in _IN_EACH):
            raise InvalidArgument(
                f"{shown(folder)} is inside another export, which must not change",
                fix="name a different folder",
            )
    return target


def own_name(model: str, number: int) -> str:
    """Default name of the folder that a version is exported to.

    Exports of other models may not use it; see `check_own`.
    """
    return f"{model.replace('/', '--')}--{number}"


def check_own(folder: str, model: str) -> None:
    """Raise InvalidArgument if ``folder`` is a default name for exports of another model.

    A user who looks for that model's exports must not find this model's exports. The check uses only the name, so it
    does not reveal whether the other model has exports.
    """
    name = _OWN_NAME.fullmatch(folder.partition("/")[0])
    if name is not None and name[1] != model.replace("/", "--"):
        raise InvalidArgument(
            f"{shown(folder)} is a name for exports of another model, not of {model}",
            fix=f"name a different folder, or none: the default begins with {own_name(model, 0)[:-1]}",
        )


def overlap(folder: Path, others: Iterable[Path]) -> bool:
    """Whether a folder equals, is within, or contains one of the others."""
    return any(folder.is_relative_to(other) or other.is_relative_to(folder) for other in others)


def free_name(root: Path, name: str, taken: Collection[Path]) -> Path:
    """A path in ``root`` that does not exist and does not overlap ``taken``: the name, with a number appended if
    necessary.
    """
    suffixes = itertools.chain([""], (f"-{n}" for n in itertools.count(2)))
    candidates = (root / f"{name}{suffix}" for suffix in suffixes)
    return next(path for path in candidates if not overlap(path, taken) and not os.path.lexists(path))


@contextlib.contextmanager
def partial_folder(root: Path, name: str) -> Iterator[Path]:
    """Create a folder in ``root`` and lock it while the block runs.

    At the end, remove it unless the block has renamed it.

    Raises:
        Unavailable: another service that is starting has locked the folder to remove it.
    """
    root.mkdir(parents=True, exist_ok=True)
    path = root / f"{_PARTIAL}{name}"
    path.mkdir()
    try:
        with _locked(path) as mine:
            if not mine:  # a starting service has mistaken the folder for an abandoned one
                raise Unavailable(f"{path} is being removed", fix="export again")
            yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Lock a folder against other processes, and yield whether that succeeded.

    The kernel releases the locks of a process that dies.
    """
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
    """Remove partial folders that killed services have left."""
    for path in root.glob(f"{_PARTIAL}*"):
        with contextlib.suppress(OSError), _locked(path) as abandoned:
            if abandoned:
                log.info("removing %s, which was never finished", path)
                shutil.rmtree(path)
