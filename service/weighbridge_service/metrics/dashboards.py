"""Dashboard of Grafana with a panel for each metric, in rows by what they are about.

A counter is shown as its rate, a histogram as its median and its 95th and 99th percentiles. Source: Grafana's JSON model of dashboards,
schema 39.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from weighbridge_service.metrics.declared import Declared, Kind, Row

_COLUMNS, _WIDTH, _HEIGHT = 24, 8, 7
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_CHOSEN = '{instance=~"$instance"}'
_QUANTILES = (0.5, 0.95, 0.99)


def expressions(metric: Declared) -> list[tuple[str, str]]:
    """What a panel of a metric asks for, in PromQL, with the legend of each."""
    by = ", ".join(("instance", *metric.labels))
    legend = " ".join(f"{{{{{label}}}}}" for label in ("instance", *metric.labels))
    match metric.kind:
        case Kind.COUNTER:
            return [(f"sum by ({by}) (rate({metric.name}{_CHOSEN}[$__rate_interval]))", legend)]
        case Kind.GAUGE:
            return [(f"sum by ({by}) ({metric.name}{_CHOSEN})", legend)]
        case Kind.HISTOGRAM:
            # over all instances: how slow it is, where one looks next
            labels, of = (
                ", ".join((*metric.labels, "le")),
                "".join(f" {{{{{each}}}}}" for each in metric.labels),
            )
            rate = f"sum by ({labels}) (rate({metric.name}_bucket{_CHOSEN}[$__rate_interval]))"
            return [(f"histogram_quantile({q}, {rate})", f"p{q * 100:g}{of}") for q in _QUANTILES]


def dashboard(metrics: Iterable[Declared]) -> dict[str, Any]:
    """The dashboard of metrics."""
    return {
        "uid": "weighbridge",
        "title": "Weighbridge",
        "description": "Every metric of Weighbridge. Generated: `make dashboards`.",
        "tags": ["weighbridge"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_datasource(), _instances()]},
        "panels": [{"id": number, **panel} for number, panel in enumerate(_panels(list(metrics)), start=1)],
    }


def _panels(metrics: list[Declared]) -> Iterator[dict[str, Any]]:
    y = 0
    for row in Row:
        yield {
            "type": "row",
            "title": row.value,
            "collapsed": False,
            "panels": [],
            "gridPos": {"x": 0, "y": y, "w": _COLUMNS, "h": 1},
        }
        y += 1
        x = 0
        for metric in (each for each in metrics if each.row is row):
            if x + _WIDTH > _COLUMNS:
                x, y = 0, y + _HEIGHT
            yield _panel(metric, {"x": x, "y": y, "w": _WIDTH, "h": _HEIGHT})
            x += _WIDTH
        y += _HEIGHT


def _panel(metric: Declared, place: dict[str, int]) -> dict[str, Any]:
    rate = metric.kind is Kind.COUNTER
    units = {"bytes": "binBps" if rate else "bytes", "seconds": "s", "": "ops" if rate else "short"}
    return {
        "type": "timeseries",
        "title": metric.name,
        "description": metric.text,
        "datasource": _DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": units[metric.unit], "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": _DATASOURCE,
                "expr": expression,
                "legendFormat": legend,
            }
            for i, (expression, legend) in enumerate(expressions(metric))
        ],
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _instances() -> dict[str, Any]:
    return {
        "name": "instance",
        "label": "Service",
        "type": "query",
        "datasource": _DATASOURCE,
        "query": "label_values(weighbridge_build_info, instance)",
        "multi": True,
        "includeAll": True,
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
    }
