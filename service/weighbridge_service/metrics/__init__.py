"""Metrics: their declarations, and the instruments that observe them.

The dashboard and the alerts are files of `deploy/`.

May import: `prometheus_client`, and from this repository only the names of parts of steps, so that every part of the
service may define metrics.

- `declared`: declarations of all metrics.
- `instruments`: instruments that parts of the service update as events happen.
"""
