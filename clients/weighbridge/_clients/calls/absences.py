"""Sentences that describe what a watch waits for: a model that is not registered yet, a model without versions, or a
ref that does not exist.
"""

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
"""Maximum number of refs of one watch for which the client asks the service what is missing."""


def absences(refs: Sequence[tuple[str, str]]) -> Steps[list[str]]:
    """Return sentences that describe what the watch waits for, for refs without a version so far. ``refs`` are pairs of
    model and ref. If there are many, only the first are described.
    """
    found: list[str] = []
    for model, ref in refs[:_ASKED]:
        said = yield from _absence(model, ref)
        if said and said not in found:
            found.append(said)
    if len(refs) > _ASKED:
        more = len(refs) - _ASKED
        found.append(f"{counted(more, 'more ref')} of the same watch {'has' if more == 1 else 'have'} no version yet")
    return found


def _absence(model: str, ref: str) -> Steps[str]:
    """Return a sentence about one ref; empty if the ref exists."""
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
            return f"{model} has no ref {ref!r} yet, as its version {newest[0].number} is held: waiting for it"
    has = f" (it has {named(sorted(refs))})" if refs else ""
    return f"{model} has no ref {ref!r} yet{has}: waiting for it"
