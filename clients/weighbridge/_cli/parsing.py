"""Types of arguments: a model with or without a version, sizes, durations, locations of stores."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from weighbridge._core.metadata import (
    Metadata,
    MetadataValue,
    checked_metadata,
    conditions,
    parse_value,
)
from weighbridge._core.references import Reference, parse_reference
from weighbridge._core.text.sizes import parse_size
from weighbridge.errors import InvalidArgument

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_DURATION = re.compile(r"([0-9]{1,15}) ?([A-Za-z]?)", re.ASCII)


def parse_duration(text: str) -> int:
    """Seconds of a time: ``7d``, ``12h``, ``30m``, ``90s`` or ``2w``. A number without a unit could mean anything.

    Raises:
        InvalidArgument: it is not a whole number with such a unit, or less than one second.
    """
    match = _DURATION.fullmatch(text.strip())
    scale = _SECONDS.get(match[2].lower()) if match else None
    seconds = int(match[1]) * scale if match and scale else 0
    if seconds < 1:
        raise InvalidArgument(f"{text!r} is not a time", fix="write it with a unit, like 7d, 12h, 30m or 90s")
    return seconds


def model_at_version(ctx: click.Context, param: click.Parameter, text: str) -> Reference:
    """Callback of an argument ``MODEL@VERSION``."""
    with _misspelt(ctx, param):
        return parse_reference(text)


def model_at_number(ctx: click.Context, param: click.Parameter, text: str) -> Reference:
    """Callback of an argument ``MODEL@NUMBER``; what stands for the number is for the command to judge."""
    with _misspelt(ctx, param):
        return parse_reference(text, by_number=True)


def model_perhaps_at_version(ctx: click.Context, param: click.Parameter, text: str) -> Reference:
    """Callback of an argument ``MODEL[@VERSION]``."""
    with _misspelt(ctx, param):
        return parse_reference(text, need_version=False)


def checked_url(url: str) -> str:
    """The HTTP address of an engine, as its option ``--url`` names it.

    Raises:
        UsageError: it has no scheme.
    """
    if not url.startswith(("http://", "https://")):
        raise click.UsageError(f"--url {url} has no scheme: write http://{url}")
    return url


def ref_of(reference: Reference, named: str | None, default: str) -> str:
    """The ref that a command follows: of ``MODEL@REF``, or of its option ``--ref``.

    Raises:
        UsageError: the two contradict each other, or a version is named by its number.
    """
    ref = reference.version or named or default
    if named is not None and named != ref:
        raise click.UsageError(f"{reference.model}@{ref} names {ref}, and --ref names {named}: name the ref once")
    if ref.isdigit():
        raise click.UsageError(
            f"{reference.model}@{ref} is one version, which never changes: name a ref, such as "
            f"{reference.model}@{default}"
        )
    return ref


def key_values(ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> Metadata:
    """Callback of an option ``KEY=VALUE`` that can be given several times."""
    found: dict[str, MetadataValue] = {}
    with _misspelt(ctx, param):
        for text in texts:
            key, equals, value = text.partition("=")
            if not equals or key in found:
                raise InvalidArgument(
                    f"{text!r} has no value, or gives {key!r} a second one", fix="write it like reward=0.71"
                )
            found[key] = parse_value(value)
        return checked_metadata(found)


def comparisons(ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> tuple[str, ...]:
    """Callback of an option that compares metadata and can be given several times."""
    with _misspelt(ctx, param):
        conditions(texts)
    return texts


def size(ctx: click.Context, param: click.Parameter, text: str) -> int:
    """Callback of an option that is a size in bytes."""
    with _misspelt(ctx, param):
        return parse_size(text)


def size_or(**words: int | None) -> Callable[[click.Context, click.Parameter, str], int | None]:
    """Callback of an option that is a size in bytes, or one of these words."""

    def parse(ctx: click.Context, param: click.Parameter, text: str) -> int | None:
        return words[text] if text in words else size(ctx, param, text)

    return parse


def duration(ctx: click.Context, param: click.Parameter, text: str | None) -> int | None:
    """Callback of an option that is a time, in seconds; None if it is not given."""
    with _misspelt(ctx, param):
        return None if text is None else parse_duration(text)


@contextmanager
def _misspelt(ctx: click.Context, param: click.Parameter) -> Iterator[None]:
    try:
        yield
    except InvalidArgument as error:
        raise click.BadParameter(f"{error.message}: {error.fix}", ctx, param) from error


class WholeNumber(click.IntRange):
    """A whole number within bounds, called so where one is misspelt."""

    name = "integer"


class StoreLocation(click.Path):
    """The location of a store: a folder, or a URL of a kind that `weighbridge_storage.opening` knows.

    Args:
        exists: whether the folder has to be there.
    """

    name = "location"

    def __init__(self, *, exists: bool = False) -> None:
        super().__init__(exists=exists, file_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """A path, or the URL as it is."""
        if isinstance(value, str) and "://" in value:
            from weighbridge_storage.opening import check_url

            try:
                check_url(value)
            except InvalidArgument as error:
                self.fail(error.message, param, ctx)
            return value
        return super().convert(value, param, ctx)
