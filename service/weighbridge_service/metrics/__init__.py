"""Metrics: what each is, and the dashboards and alert rules that are made from that.

May import: `prometheus_client` and nothing of this repository, so that every part may keep figures of its own.

- `declared`: every metric, once.
- `instruments`: those that a part observes as things happen.
- `alerts`: when an operator is called, and what the runbook is.
- `dashboards`: Grafana's dashboard of all metrics.
- `rules`: Prometheus' rules.
- `generated`: the files that are kept in `deploy/`.
"""
