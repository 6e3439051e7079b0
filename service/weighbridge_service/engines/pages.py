"""Pages of a list of engines. All functions are pure.

A page token contains the sort key of the last engine of a page, so that additions and removals do not make a listing
skip engines.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence

from weighbridge.errors import InvalidArgument
from weighbridge_service.engines.entries import EngineEntry, Order

LARGEST_PAGE = 1000


def page_of(entries: Sequence[EngineEntry], after: str, limit: int) -> tuple[list[EngineEntry], str]:
    """A page of a list, and the token of the next page. The token is empty after the last page.

    Args:
        entries: the sorted list.
        after: token of the page; empty for the first.
        limit: maximum number of entries.

    Raises:
        InvalidArgument: ``after`` is not a page token.
    """
    behind = _read(after) if after else None
    left = [entry for entry in entries if behind is None or entry.order > behind]
    page = left[:limit]
    return page, _token(page[-1].order) if len(left) > limit else ""


def _token(order: Order) -> str:
    return base64.urlsafe_b64encode(json.dumps(order, separators=(",", ":")).encode()).decode()


def _read(token: str) -> Order:
    try:
        model, address, engine_id, identity = json.loads(base64.urlsafe_b64decode(token.encode()))
    except (ValueError, TypeError, RecursionError):
        model = None
    if not isinstance(model, str) or not all(isinstance(each, str) for each in (address, engine_id, identity)):
        raise InvalidArgument(
            f"{token[:40]!r} is not a page token", fix="pass the token that the previous page returned"
        )
    return model, address, engine_id, identity
