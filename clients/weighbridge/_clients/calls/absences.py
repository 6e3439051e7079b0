"""Absences that a watch waits out, in sentences: a model that is not registered yet, one without versions, a ref that does not exist."""

from __future__ import annotations

from collections.abc import Sequence

from weighbridge._clients.calls.operation_calls import ask
from weighbridge._clients.calls.steps import Steps
from weighbridge._clients.calls.version_calls import list_versions
from weighbridge._core.operations import table
from weighbridge._core.resources import REF_LATEST, REF_LIVE
from weighbridge._core.text.counts import counted, named
from weighbridge.errors import NotFound

_ASKED = 3
"""Of how many refs of one watch it is asked what is missing."""


def absences(refs: Sequence[tuple[str, str]]) -> Steps[list[str]]:
    """Sentences about refs, given with their models, that a watch has brought no version of: what each waits for. Of many, about the first."""
    found: list[str] = []
    for model, ref in refs[:_ASKED]:
        said = yield from _absence(model, ref)
        if said and said not in found:
            found.append(said)
    if len(refs) > _ASKED:
        more = len(refs) - _ASKED
        found.append(f"the same watch has brought nothing of {counted(more, 'more ref')}")
    return found


def _absence(model: str, ref: str) -> Steps[str]:
    """A sentence about one ref; empty if it is there."""
    try:
        refs = (yield from ask(table.GET_MODEL, model=model)).refs
    except NotFound as error:
        said, semicolon, meant = error.message.partition(";")
        return f"{said} yet{semicolon}{meant}{' Waiting' if meant.endswith('?') else ': waiting'} for it"
    if ref in refs:
        return ""
    if ref in (REF_LATEST, REF_LIVE):
        newest = yield from list_versions(model, include_invisible=False, limit=1)
        if not newest:
            return f"{model} has no versions yet: waiting for the first one"
        if newest[0].held:
            return (
                f"{model} has no ref {ref!r} yet, as its version {newest[0].number} is held: waiting for it"
            )
    has = f" (it has {named(sorted(refs))})" if refs else ""
    return f"{model} has no ref {ref!r} yet{has}: waiting for it"
