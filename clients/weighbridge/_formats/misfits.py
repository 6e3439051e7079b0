"""Messages about misfits between given tensors and those of a model. Tensors with the same problem share a line.

Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from weighbridge.errors import LayoutError

_LIKE = 3
"""Number of tensors with the same problem from which they share a line."""


class Misfit(NamedTuple):
    """Problem of one tensor.

    Attributes:
        text: message, with the tensor's name.
        alike: message for several tensors, which follows their names; empty if each tensor needs its own message.
        name: name of the tensor.
    """

    text: str
    alike: str = ""
    name: str = ""


def told(misfits: Iterable[Misfit]) -> list[str]:
    """Lines for misfits, in order; misfits with the same problem share a line."""
    found = list(misfits)
    groups: dict[str, list[str]] = {}
    for misfit in found:
        if misfit.alike:
            groups.setdefault(misfit.alike, []).append(misfit.name)
    lines: dict[str, None] = {}
    for misfit in found:
        names = groups.get(misfit.alike, [])
        several = len(names) >= _LIKE
        lines[f"{names[0]} and {len(names) - 1} more {misfit.alike}" if several else misfit.text] = None
    return list(lines)


def common_prefix(names: Iterable[str], model: Collection[str]) -> str | None:
    """Common prefix of the given names before the model's names; None if there is none, or several."""
    found: set[str] = set()
    for parts in (name.split(".") for name in names):
        ends = (end for end in range(1, len(parts)) if ".".join(parts[end:]) in model)
        found.update(".".join(parts[:end]) + "." for end in itertools.islice(ends, 1))
    return found.pop() if len(found) == 1 else None


def check_prefix(unknown: Sequence[str], model: Collection[str]) -> None:
    """Refuse names that differ from the model's only by a common prefix, in the given names or in the model's.

    Args:
        unknown: names that the model does not have.
        model: its names.

    Raises:
        LayoutError: the names differ by a prefix; states the prefix.
    """
    if len(unknown) < _LIKE:
        return
    given = common_prefix(unknown, model)
    if given is not None and all(each.startswith(given) and each.removeprefix(given) in model for each in unknown):
        raise LayoutError(
            f"{len(unknown)} names begin with {given!r}, but the model's names do not",
            details=[f"{unknown[0]} is the model's {unknown[0].removeprefix(given)}"],
            fix=f"remove the prefix: {{name.removeprefix({given!r}): tensor for name, tensor in state_dict.items()}}",
        )
    there = common_prefix(model, frozenset(unknown))
    if there is not None and all(there + each in model for each in unknown):
        raise LayoutError(
            f"{len(unknown)} names lack the model's prefix {there!r}",
            details=[f"{unknown[0]} is the model's {there}{unknown[0]}"],
            fix=f"add the prefix: {{{there!r} + name: tensor for name, tensor in state_dict.items()}}",
        )
