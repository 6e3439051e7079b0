"""File of what a long command has done, so that the same command goes on where it was interrupted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from weighbridge.errors import InvalidArgument


class DoneLines:
    """Things that were done, one line each, on disk as soon as they are.

    Args:
        path: of the file; None to remember nothing.

    Raises:
        InvalidArgument: there is a file that was not written so.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._done: set[tuple[object, ...]] = set()
        if path is None or not path.exists():
            return
        try:
            lines = path.read_text().splitlines()
            whole = lines if path.read_bytes().endswith(b"\n") else lines[:-1]
            self._done = {tuple(json.loads(line)) for line in whole}
            if whole != lines:  # the process was killed while it wrote the last one
                path.write_text("".join(f"{line}\n" for line in whole))
        except (ValueError, TypeError) as error:
            raise InvalidArgument(
                f"{path} is not a file of --resume",
                fix="name the one of the interrupted command, or a new one",
            ) from error

    def has(self, thing: Sequence[object]) -> bool:
        """Whether a thing was done before."""
        return tuple(thing) in self._done

    def add(self, thing: Sequence[object]) -> None:
        """A thing is done."""
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(list(thing)) + "\n")

    def end(self) -> None:
        """All is done: the next command begins anew."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
