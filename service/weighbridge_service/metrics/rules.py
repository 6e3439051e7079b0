"""Rules of Prometheus, from the alerts.

YAML as its subset that JSON's strings are in: a text in quotes means the same in both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from weighbridge_service.metrics.alerts import RUNBOOKS, Alert


def rules(alerts: Iterable[Alert], head: str) -> str:
    """A file of alerting rules, with a comment before it."""
    return "".join(f"{line}\n" for line in (f"# {head}", *_lines(alerts)))


def _lines(alerts: Iterable[Alert]) -> Iterator[str]:
    yield from ("groups:", "  - name: weighbridge", "    rules:")
    for alert in alerts:
        yield f"      - alert: {alert.name}"
        yield f"        expr: {json.dumps(alert.expression)}"
        yield f"        for: {alert.lasting}"
        yield "        labels:"
        yield f"          severity: {alert.severity}"
        yield "        annotations:"
        yield f"          summary: {json.dumps(alert.summary)}"
        yield f"          runbook: {json.dumps(f'{RUNBOOKS}#{alert.anchor}')}"
