"""Names of step folders, as trainers write them, and the marker of a complete one."""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
from dataclasses import dataclass, field
from pathlib import Path

from weighbridge._formats.safetensors_files import INDEX_FILE
from weighbridge.errors import InvalidArgument

_NAME = re.compile(r"([^{}]*)\{step(?::0[1-9]d)?\}([^{}]*)")


@dataclass(frozen=True, slots=True)
class StepNames:
    """Naming scheme of a trainer's folders.

    Attributes:
        folder: folder of a step, relative to the folder of all: ``{step}``, or ``{step:07d}`` with leading zeros, once
            in its first part; further parts lead from there to the weights, as in ``step_{step}/weight``.
        marker: the file that is written last, relative to the weights, as in ``STABLE`` or ``../STABLE``.

    Raises:
        InvalidArgument: a folder without a step, or a marker beyond the step's folder.
    """

    folder: str = "step_{step}"
    marker: str = "STABLE"
    _pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        first, *rest = self.folder.split("/")
        name = _NAME.fullmatch(first)
        if name is None or any(part in ("", ".", "..") or "{" in part or "}" in part for part in rest):
            raise InvalidArgument(
                f"{self.folder!r} does not describe the name of a step's folder",
                fix="write it like step_{step}, or step_{step}/weight if the weights are in a subfolder",
            )
        marker = posixpath.normpath(posixpath.join(self.folder, self.marker))
        if not self.marker or marker == self.folder or not marker.startswith(f"{first}/"):
            raise InvalidArgument(
                f"{self.marker!r} does not name a file in the folder of a step",
                fix="write it relative to the weights, like STABLE or ../STABLE",
            )
        before, after = name.groups()
        pattern = re.compile(re.escape(before) + r"(\d{1,18})" + re.escape(after), re.ASCII)
        object.__setattr__(self, "_pattern", pattern)

    def path(self, root: Path, step: int) -> Path:
        """The folder of a step's weights."""
        return root / self.folder.format(step=step)

    def marker_of(self, root: Path, step: int) -> Path:
        """The file that marks a step as complete."""
        return Path(os.path.normpath(self.path(root, step) / self.marker))

    def steps(self, root: Path) -> list[int]:
        """The steps that have a folder, complete or not, the newest first; empty if there is no root yet. Names with
        other leading zeros are skipped.

        Raises:
            OSError: the file system refuses.
        """
        try:
            names = os.listdir(root)
        except FileNotFoundError:
            return []
        first = self.folder.partition("/")[0]
        matches = [match for match in map(self._pattern.fullmatch, names) if match]
        found = [int(match[1]) for match in matches if first.format(step=int(match[1])) == match[0]]
        return sorted((step for step in found if self.path(root, step).is_dir()), reverse=True)

    def newest_complete(self, root: Path) -> int | None:
        """The newest complete step; None if there is none.

        Raises:
            OSError: the file system refuses.
        """
        steps = self.steps(root)
        return next((step for step in steps if self.marker_of(root, step).exists()), None)


STEPS = StepNames()
"""Names of prime-rl's broadcasts."""


def contents(folder: Path, marker: Path) -> str:
    """Digest of the names, sizes and times of a step's weights and of its marker, which changes when any of them is
    rewritten.

    Raises:
        FileNotFoundError: the folder, or a file of it, is gone, or is a dangling link.
        OSError: the file system refuses.
    """
    files = [each for each in folder.iterdir() if each.suffix == ".safetensors" or each.name == INDEX_FILE]
    found = hashlib.sha256()
    for path in (*sorted(files), marker):
        stat = path.stat()
        found.update(f"{path.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ino}\n".encode())
    return found.hexdigest()[:32]
