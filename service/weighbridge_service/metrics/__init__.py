"""Metrics: what each is, and what observes them. The dashboard and the alerts are files of `deploy/`.

May import: `prometheus_client` and nothing of this repository, so that every part may keep figures of its own.

- `declared`: every metric, once.
- `instruments`: those that a part observes as things happen.
"""
