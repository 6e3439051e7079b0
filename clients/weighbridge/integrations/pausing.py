"""Pause of engines' generation, around an update of their weights: it ends in any case."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from weighbridge.errors import FailedPrecondition


@contextmanager
def paused(pause: Callable[[], object], resume: Callable[[], object]) -> Iterator[None]:
    """Pause, and resume when the block ends or fails; also if to pause fails, since some engines may have paused.

    Args:
        pause, resume: ask all engines to stop, and to go on.

    Raises:
        FailedPrecondition: engines could not be resumed; says also what failed before, if anything did. An interrupt stays one, with a
            note.
    """
    try:
        pause()
        yield
    except BaseException as error:
        try:
            resume()
        except Exception as another:
            if isinstance(error, Exception):
                raise FailedPrecondition(f"{error}; and generation stands still: {another}") from error
            error.add_note(f"generation stands still: {another}")
        raise
    try:
        resume()
    except Exception as error:
        raise FailedPrecondition(f"generation stands still: {error}") from error
