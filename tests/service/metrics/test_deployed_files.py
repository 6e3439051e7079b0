"""Dashboard and alert rules of `deploy/`: are they about the metrics and labels that there are, does each alert fire
when it should, and is it explained?
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.service.metrics.alert_cases import BUILD, CASES
from tests.support.promtool import promtool
from weighbridge_service.metrics import declared
from weighbridge_service.metrics.declared import DeclaredMetric, Kind

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "metrics.md"
RULES = ROOT / "deploy" / "prometheus" / "weighbridge.rules.yml"
BOARD = json.loads((ROOT / "deploy" / "grafana" / "weighbridge.json").read_text("utf-8"))
(GROUP,) = yaml.safe_load(RULES.read_text("utf-8"))["groups"]
ALERTS: list[dict[str, Any]] = GROUP["rules"]
NAME = re.compile(r"\bweighbridge_\w+")
PARTS = {Kind.HISTOGRAM: ("_bucket", "_sum", "_count")}
SERIES = {each.name + part: each for each in declared.ALL for part in PARTS.get(each.kind, ("",))}
"""Declared metrics by the names under which Prometheus keeps them."""


def targets() -> Iterator[dict[str, str]]:
    return (target for panel in BOARD["panels"] for target in panel.get("targets", ()))


def labels_of(name: str) -> set[str]:
    """Labels of a series as Prometheus keeps it."""
    return {"instance", *SERIES[name].labels} | ({"le"} if name.endswith("_bucket") else set())


def unknown(expression: str) -> Iterator[str]:
    """Metrics and labels of an expression in PromQL that no declaration has."""
    names = NAME.findall(expression)
    yield from (name for name in names if name not in SERIES)
    known = [name for name in names if name in SERIES]
    for name, matchers in re.findall(r"(\w+)\{([^}]*)\}", expression):
        yield from ({*re.findall(r"(\w+)\s*[!=]", matchers)} - labels_of(name) if name in SERIES else ())
    yield from {*grouping(expression)} - {label for name in known for label in labels_of(name)}


def grouping(expression: str) -> list[str]:
    """Labels that an expression groups by."""
    return [label for found in re.findall(r"\bby \(([^)]*)\)", expression) for label in found.split(", ")]


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        ("weighbridge_none > 0", ["weighbridge_none"]),
        ("weighbridge_push_ready_seconds > 0", ["weighbridge_push_ready_seconds"]),
        ('weighbridge_versions{phase="open"} > 0', ["phase"]),
        ("sum by (instance, model) (weighbridge_versions)", ["model"]),
        ('sum by (instance) (weighbridge_versions{state!="ready"}) > 0', []),
    ],
)
def test_an_expression_that_asks_for_what_is_not_declared_is_found(expression: str, found: list[str]) -> None:
    assert [*unknown(expression)] == found


def test_dashboard_and_alerts_ask_for_declared_metrics_and_labels_alone() -> None:
    expressions = [target["expr"] for target in targets()] + [alert["expr"] for alert in ALERTS]
    assert expressions
    assert {each: found for each in expressions if (found := [*unknown(each)])} == {}


def test_the_dashboard_shows_every_declared_metric_by_all_its_labels() -> None:
    shown: dict[str, DeclaredMetric] = {}
    for target in targets():
        (name,) = NAME.findall(target["expr"])
        metric = shown[name] = SERIES[name]
        assert {*grouping(target["expr"])} - {"instance", "le"} == {*metric.labels}
        assert {*re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])} - {"instance"} == {*metric.labels}
        assert ("rate(" in target["expr"]) == (metric.kind is not Kind.GAUGE), target["expr"]
    assert [*shown.values()] == [*declared.ALL]
    assert all(("_bucket" in name) == (metric.kind is Kind.HISTOGRAM) for name, metric in shown.items())


def test_no_panels_of_the_dashboard_lie_on_each_other() -> None:
    places = [panel["gridPos"] for panel in BOARD["panels"]]
    taken = [(p["x"] + x, p["y"] + y) for p in places for x in range(p["w"]) for y in range(p["h"])]
    assert len(taken) == len({*taken})
    assert max(x for x, _ in taken) < 24
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])


def test_summaries_of_alerts_show_labels_that_their_series_have() -> None:
    for alert in ALERTS:
        there = {*grouping(alert["expr"])} or {
            label for name in NAME.findall(alert["expr"]) for label in labels_of(name)
        }
        assert {*re.findall(r"\$labels\.(\w+)", alert["annotations"]["summary"])} <= there, alert["alert"]


def test_names_follow_prometheus_conventions() -> None:
    for metric in declared.ALL:
        assert metric.name.startswith("weighbridge_")
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER), metric.name
        assert metric.kind is not Kind.HISTOGRAM or metric.name.endswith(("_seconds", "_bytes")), metric.name
        assert not re.search(r"_(bucket|count|sum|ms|mb|kb|percent)$", metric.name)


def test_each_metric_is_explained_on_the_page_as_it_is_declared() -> None:
    page = PAGE.read_text("utf-8")
    in_table = re.findall(r"^\| `(weighbridge_\w+)` \| ([^|]*) \| ([^|]*) \|$", page, re.MULTILINE)
    assert in_table == [
        (metric.name, f"{metric.kind}{by and f' by {by}'}", metric.text)
        for metric in declared.ALL
        for by in [", ".join(f"`{label}`" for label in metric.labels)]
    ]
    named = {*SERIES, *(metric.name for metric in declared.ALL)}
    assert {*NAME.findall(page)} - {"weighbridge_service"} <= named


def test_each_alert_has_a_runbook_on_the_page() -> None:
    page = PAGE.read_text("utf-8")
    assert re.findall(r"^### (\w+)$", page, re.MULTILINE) == [alert["alert"] for alert in ALERTS]
    for alert in ALERTS:
        name = alert["alert"]
        section = page.partition(f"### {name}\n")[2].partition("\n#")[0]
        assert f"`{alert['labels']['severity']}`" in section, name
        assert "**What to do:**" in section, name
        # as GitHub and mkdocs make anchors of headings
        assert alert["annotations"]["runbook"] == f"docs/metrics.md#{name.lower()}"


def test_alerts_stand_in_the_order_of_their_severity() -> None:
    order = ["critical", "warning", "info"]
    severities = [order.index(alert["labels"]["severity"]) for alert in ALERTS]
    assert severities == sorted(severities)


@pytest.mark.process
def test_prometheus_takes_the_rules() -> None:
    assert f"{len(ALERTS)} rules found" in promtool("check", "rules", str(RULES))


def test_each_alert_has_a_case() -> None:
    assert [*CASES] == [alert["alert"] for alert in ALERTS]


@pytest.mark.process
@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_fires_when_it_should_and_not_otherwise(alert: dict[str, Any], tmp_path: Path) -> None:
    name = alert["alert"]
    case = CASES[name]

    def group(series: Mapping[str, str], *, fires: bool) -> dict[str, object]:
        labels = {**case.labels, "severity": alert["labels"]["severity"]}
        # the value that the summary shows is in no label, and the alert's annotations are not compared
        return {
            "interval": "1m",
            "input_series": [{"series": each, "values": values} for each, values in series.items()],
            "promql_expr_test": [
                {
                    "expr": (
                        f"count by ({', '.join(['alertname', *labels])}) "
                        f'(ALERTS{{alertname="{name}", alertstate="firing"}})'
                    ),
                    "eval_time": f"{case.at}m",
                    "exp_samples": [{"labels": _selector({"alertname": name, **labels}), "value": 1}] if fires else [],
                }
            ],
        }

    tests = [group(case.fires, fires=True), group({**BUILD, **case.quiet}, fires=False)]
    spec = {"rule_files": [str(RULES)], "evaluation_interval": "30s", "tests": tests}
    file = tmp_path / "test.yml"
    file.write_text(json.dumps(spec))  # JSON is YAML
    assert "SUCCESS" in promtool("test", "rules", str(file))


def _selector(labels: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{name}={json.dumps(value)}" for name, value in labels.items()) + "}"
