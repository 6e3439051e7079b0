"""Dashboards and alert rules: are they those of the metrics that there are, does each alert fire when it should, and is it explained?"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.service.metrics.alert_cases import BUILD, CASES
from tests.support.promtool import promtool
from weighbridge_service.metrics import declared, generated
from weighbridge_service.metrics.alerts import ALERTS, Alert
from weighbridge_service.metrics.declared import Kind

ROOT = Path(__file__).parents[3]
DEPLOY, PAGE = ROOT / "deploy", ROOT / "docs" / "metrics.md"
RULES = "prometheus/weighbridge.rules.yml"
NAMES = {name for metric in declared.ALL for name in metric.series}


def test_the_files_in_deploy_are_what_make_dashboards_writes() -> None:
    there = {
        str(path.relative_to(DEPLOY)): path.read_text("utf-8")
        for folder in ("grafana", "prometheus")
        for path in (DEPLOY / folder).iterdir()
    }
    assert there == generated.files(), "run `make dashboards`"


@pytest.mark.parametrize("name", generated.files())
def test_no_expression_names_a_metric_that_does_not_exist(name: str) -> None:
    asked = re.findall(r"\bweighbridge_\w+", (DEPLOY / name).read_text("utf-8"))
    titles = {metric.name for metric in declared.ALL}
    assert asked
    assert {*asked} <= NAMES | titles


def test_the_dashboard_shows_every_series_of_counters_and_gauges_and_the_buckets_of_histograms() -> None:
    board = json.loads((DEPLOY / "grafana/weighbridge.json").read_text("utf-8"))
    asked = {
        name
        for panel in board["panels"]
        for target in panel.get("targets", ())
        for name in re.findall(r"\bweighbridge_\w+", target["expr"])
    }
    assert asked == {metric.series[0] for metric in declared.ALL}
    places = [panel["gridPos"] for panel in board["panels"]]
    taken = [(p["x"] + x, p["y"] + y) for p in places for x in range(p["w"]) for y in range(p["h"])]
    assert len(taken) == len({*taken}), "panels lie on each other"
    assert max(x for x, _ in taken) < 24
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_names_follow_prometheus_conventions() -> None:
    for metric in declared.ALL:
        assert metric.name.startswith("weighbridge_")
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER), metric.name
        assert metric.kind is not Kind.HISTOGRAM or metric.unit, metric.name
        assert not re.search(r"_(bucket|count|sum|ms|mb|kb|percent)$", metric.name)


def test_each_metric_and_each_alert_is_explained_on_the_page() -> None:
    page = PAGE.read_text("utf-8")
    in_table = re.findall(r"^\| `(weighbridge_\w+)`", page, re.MULTILINE)
    assert in_table == [metric.name for metric in declared.ALL]
    headings = re.findall(r"^### (\w+)$", page, re.MULTILINE)
    assert headings == [alert.name for alert in ALERTS]
    assert {*re.findall(r"\bweighbridge_\w+", page)} - {"weighbridge_service"} <= NAMES | {*in_table}
    for alert in ALERTS:
        section = page.partition(f"### {alert.name}\n")[2].partition("\n#")[0]
        assert f"`{alert.severity}`" in section, alert.name
        assert "**What to do:**" in section, alert.name


def test_every_alert_has_a_runbook_on_that_page() -> None:
    links = re.findall(r'runbook: "docs/metrics\.md#(\w+)"', (DEPLOY / RULES).read_text("utf-8"))
    # as GitHub and mkdocs make anchors of headings
    anchors = {
        heading.lower() for heading in re.findall(r"^### (\w+)$", PAGE.read_text("utf-8"), re.MULTILINE)
    }
    assert len(links) == len(ALERTS)
    assert {*links} <= anchors


@pytest.mark.process
def test_prometheus_takes_the_rules() -> None:
    assert f"{len(ALERTS)} rules found" in promtool("check", "rules", str(DEPLOY / RULES))


def test_each_alert_has_a_case() -> None:
    assert [*CASES] == [alert.name for alert in ALERTS]


@pytest.mark.process
@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_an_alert_fires_when_it_should_and_not_otherwise(alert: Alert, tmp_path: Path) -> None:
    case = CASES[alert.name]

    def group(series: Mapping[str, str], *, fires: bool) -> dict[str, object]:
        labels = {**case.labels, "severity": str(alert.severity)}
        # the value that the summary shows is in no label, and the alert's annotations are not compared
        return {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "promql_expr_test": [
                {
                    "expr": f'count by ({", ".join(["alertname", *labels])}) (ALERTS{{alertname="{alert.name}", alertstate="firing"}})',
                    "eval_time": f"{case.at}m",
                    "exp_samples": [{"labels": _selector({"alertname": alert.name, **labels}), "value": 1}]
                    if fires
                    else [],
                }
            ],
        }

    tests = [group(case.fires, fires=True), group({**BUILD, **case.quiet}, fires=False)]
    spec = {"rule_files": [str(DEPLOY / RULES)], "evaluation_interval": "30s", "tests": tests}
    file = tmp_path / "test.yml"
    file.write_text(json.dumps(spec))  # JSON is YAML
    assert "SUCCESS" in promtool("test", "rules", str(file))


def _selector(labels: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{name}={json.dumps(value)}" for name, value in labels.items()) + "}"
