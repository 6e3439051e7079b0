"""Agreements of a push, as its ranks see them."""

from __future__ import annotations

from weighbridge_service.plan.declarations import Agreement, Home


def home_of(agreed: Agreement, rank: int) -> Home:
    """The replica where a rank declares, and to which it pushes what belongs to that one's files."""
    spread = agreed.prepared.spread
    return agreed.homes[0 if spread is None else spread.homes[rank]]
