"""Reads the files of a model's folder other than weights, and reports those that are left out."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from weighbridge._core.file_names import ADAPTER_CONFIG, MOST_LEVELS
from weighbridge._core.text.shortening import readable
from weighbridge._core.text.sizes import readable_size
from weighbridge._formats.naming.weight_files import IMPORT_ADAPTER, MERGE_ADAPTER
from weighbridge._formats.side_files.choice import FoundFile, choose, is_passed_over
from weighbridge._formats.side_files.regular import fault_of, read_regular
from weighbridge.errors import DataLoss, InvalidArgument, NotFound, WeighbridgeError

log = logging.getLogger(__name__)

CONFIG = "config.json"
_MOST_FILES = 10_000
_MOST_BYTES = 256 << 20
"""Maximum bytes of all files together: several times the limit for registration, but small enough for memory."""
_NAMED = 20
_REASONS: dict[type[WeighbridgeError], str] = {
    NotFound: "it is a dangling link",
    DataLoss: "it is not a regular file",
    InvalidArgument: "it is a link out of the folder",
}


@dataclass(frozen=True)
class SideFiles:
    """The files of a folder, other than weights, that belong to the model.

    Attributes:
        files: content by name; names of files in folders contain slashes. ``config.json`` is included.
        left_out: reason for each excluded file or folder, by name. Weights and hidden files are not listed.
    """

    files: dict[str, bytes] = field(repr=False)
    left_out: Mapping[str, str]

    @staticmethod
    def read(folder: Path) -> SideFiles:
        """Read the files of a folder and its subfolders.

        Raises:
            NotFound: the folder does not exist, or contains no ``config.json``.
            DataLoss: ``config.json`` is not a regular file.
            InvalidArgument: it is a link out of the folder, a file is not readable, or the folder has more files or
                bytes than any checkpoint.
        """
        if not folder.is_dir():
            raise NotFound(f"there is no folder {folder}", fix="name one that model.save_pretrained() has written")
        if not os.path.lexists(folder / CONFIG):
            if (folder / ADAPTER_CONFIG).is_file():
                raise NotFound(f"{folder} is a PEFT adapter, not a model", fix=f"{MERGE_ADAPTER}; {IMPORT_ADAPTER}")
            raise NotFound(
                f"there is no {CONFIG} in {folder}",
                fix="name a folder that model.save_pretrained() has written",
            )
        fault = fault_of(folder / CONFIG, folder)
        if fault is not None:
            raise fault
        found, elsewhere = _files_of(folder)
        chosen = choose(found)
        taken = frozenset(chosen.taken)
        _check_size(folder, [each for each in found if each.name in taken])
        files = {name: read_regular(folder / name, folder) for name in chosen.taken}
        return SideFiles(files, dict(sorted({**chosen.left_out, **elsewhere}.items())))

    def kinds(self) -> dict[str, int]:
        """Number of excluded files and folders, under their description in conversion reports; empty if there are
        none.
        """
        names = [readable(name.removesuffix("/")) for name in self.left_out]
        return {f"files ({', '.join(names[:_NAMED])})": len(names)} if names else {}

    def tell(self, model: str, folder: str | Path) -> None:
        """Log the excluded files."""
        for name, reason in list(self.left_out.items())[:_NAMED]:
            log.warning("%s: %s of %s is left out: %s", model, readable(name), folder, reason)
        if len(self.left_out) > _NAMED:
            log.warning("%s: %d more of %s are left out", model, len(self.left_out) - _NAMED, folder)


def _check_size(folder: Path, files: Sequence[FoundFile]) -> None:
    total = sum(each.nbytes for each in files)
    if total > _MOST_BYTES:
        largest = max(files, key=lambda each: each.nbytes)
        raise InvalidArgument(
            f"the files other than the weights in {folder} have {readable_size(total)}, of "
            f"which {readable(largest.name)} has "
            f"{readable_size(largest.nbytes)}; the limit for a model is {readable_size(_MOST_BYTES)}",
            fix="move what does not belong to the model out of the folder",
        )


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise InvalidArgument(
            f"{folder} cannot be read: {error.strerror}", fix="let this user read it, or remove it"
        ) from error


def _files_of(folder: Path) -> tuple[list[FoundFile], dict[str, str]]:
    """All regular, visible files in a folder, and the reasons why others were excluded."""
    found: list[FoundFile] = []
    elsewhere: dict[str, str] = {}
    waiting = [""]
    while waiting:
        prefix = waiting.pop()
        if prefix.count("/") >= MOST_LEVELS:
            elsewhere[prefix] = "it is nested too deeply"
            continue
        for entry in _entries(folder / prefix):
            name = prefix + entry.name
            if is_passed_over(entry.name):
                continue
            if entry.is_dir(follow_symlinks=False):
                waiting.append(f"{name}/")
                continue
            if len(found) + len(elsewhere) >= _MOST_FILES:
                raise InvalidArgument(
                    f"{folder} has more than {_MOST_FILES} files", fix="name the folder of one checkpoint"
                )
            fault = fault_of(Path(entry.path), folder)
            if fault is None:
                found.append(FoundFile(name, entry.stat().st_size))
            else:
                elsewhere[name] = "it is a link to a folder" if os.path.isdir(entry.path) else _REASONS[type(fault)]
    return found, elsewhere
