"""Optional dependencies: what to install if one is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from weighbridge.errors import FailedPrecondition


@contextmanager
def needs_extra(extra: str, what: str = "this command") -> Iterator[None]:
    """Raise an error that names the missing extra if an import in the block fails.

    Args:
        extra: the extra that contains the packages that the block imports.
        what: the feature that needs the packages, for the error.

    Raises:
        FailedPrecondition: a package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise FailedPrecondition(
            f"{error.name} is not installed, and {what} needs it",
            fix=f"pip install 'weighbridge[{extra}]'",
        ) from error
