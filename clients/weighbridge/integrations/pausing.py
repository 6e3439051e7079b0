"""Pause of engines' generation around a weight update. The engines are always resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from weighbridge.errors import FailedPrecondition


@contextmanager
def paused(pause: Callable[[], object], resume: Callable[[], object]) -> Iterator[None]:
    """Pause, and resume when the block ends or fails.

    Also resumes if pausing fails, because some engines may have paused.

    Args:
        pause, resume: ask all engines to pause, and to resume.

    Raises:
        FailedPrecondition: engines could not be resumed; also states an earlier failure. An interrupt is raised
            unchanged, with a note.
    """
    try:
        pause()
        yield
    except BaseException as error:
        try:
            resume()
        except Exception as another:
            if isinstance(error, Exception):
                raise FailedPrecondition(f"{error}; and generation is still paused: {another}") from error
            error.add_note(f"generation is still paused: {another}")
        raise
    try:
        resume()
    except Exception as error:
        raise FailedPrecondition(f"generation is still paused: {error}") from error
