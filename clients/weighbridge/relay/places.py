"""Places of step folders: each appears complete, is marked last, and is removed as a whole, even if the process is
killed in between.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from weighbridge.errors import FailedPrecondition, InvalidArgument
from weighbridge.relay.steps import STEPS, StepNames

_LABEL = ".weighbridge"
"""File in each folder that is placed here: the label of its weights. It is written before the folder gets its name, so
a folder without it is not ours."""
_SCRATCH = ".weighbridge-"
_LOCK = ".weighbridge.lock"


@dataclass(frozen=True)
class StepPlaces:
    """A folder of step folders that one process fills. Folders of other programs in it are left alone.

    Attributes:
        root: the folder; it need not exist.
        names: names of the folders in it.
        keep: number of placed folders that are kept.

    Raises:
        InvalidArgument: ``keep`` is below 1.
    """

    root: Path
    names: StepNames = STEPS
    keep: int = 3

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise InvalidArgument(f"{self.keep} folders cannot be kept", fix="keep 1 or more")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the root, and remove what a killed process has left in it.

        Raises:
            FailedPrecondition: another process holds it.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / _LOCK).open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise FailedPrecondition(
                    f"another process places folders in {self.root}",
                    fix="end it first, or name another folder",
                ) from error
            for left in self.root.glob(f"{_SCRATCH}*"):
                shutil.rmtree(left, ignore_errors=True)
            yield

    def label(self, step: int) -> str | None:
        """Label of the weights that were placed as a step; None if there are none, or the step is not complete."""
        if not self.names.marker_of(self.root, step).exists():
            return None
        with suppress(FileNotFoundError):
            return (self.names.path(self.root, step) / _LABEL).read_text("utf-8")
        return None

    def put(self, step: int, label: str, write: Callable[[Path], None]) -> None:
        """Place a step: its files are on disk before its folder gets its name, and its folder before it is marked.

        Placed folders of later steps are removed, as the trainer has gone back; so are the oldest beyond `keep`. Each
        loses its marker first.

        Args:
            step: the training step.
            label: label of its weights.
            write: fills a folder that does not exist yet.

        Raises:
            FailedPrecondition: a folder that was not placed here is in the way, and is not empty or is marked.
            OSError: the file system refuses.
            Exception: any error of ``write``; the present folders are left as they are.
        """
        target, marker = self.names.path(self.root, step), self.names.marker_of(self.root, step)
        self._check_free(step)
        scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=self.root))
        try:
            new = scratch / "new"
            write(new)
            (new / _LABEL).write_text(label, "utf-8")
            for path in (*new.rglob("*"), new):
                _flush(path)
            self._check_free(step)  # writing takes long
            for placed in self._steps():
                if placed >= step:
                    self._withdraw(placed, scratch)
            target.parent.mkdir(parents=True, exist_ok=True)
            new.rename(target)  # fails if there is a folder that is not empty
            _flush(target.parent)
            _flush(self.root)
            marker.touch()
            _flush(marker)
            _flush(marker.parent)
            for old in self._steps()[self.keep :]:
                self._withdraw(old, scratch)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _check_free(self, step: int) -> None:
        """Raise FailedPrecondition if another program has files where a step is to be placed."""
        target, marker = self.names.path(self.root, step), self.names.marker_of(self.root, step)
        if not self._placed(step) and (marker.exists() or (target.exists() and any(target.iterdir()))):
            raise FailedPrecondition(
                f"{target} was not placed by weighbridge", fix="move it away, or name another folder"
            )

    def _placed(self, step: int) -> bool:
        return (self.names.path(self.root, step) / _LABEL).exists()

    def _steps(self) -> list[int]:
        """The steps that were placed here, the newest first."""
        return [step for step in self.names.steps(self.root) if self._placed(step)]

    def _withdraw(self, step: int, scratch: Path) -> None:
        """Remove the folder of a step that was placed here, the marker first; processes that have its files open can
        still read them.
        """
        target, marker = self.names.path(self.root, step), self.names.marker_of(self.root, step)
        if marker.exists():
            marker.unlink()
            _flush(marker.parent)
        target.rename(scratch / f"old-{step}")
        if target.parent != self.root:
            with suppress(OSError):  # it may hold files that are not ours
                target.parent.rmdir()


def _flush(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
