"""Metrics and traces of a push.

May import: `push.machine`, `metrics`, and the values of `weighbridge`; nothing else of `push`.

- `observer`: reports each step to metrics and traces.
- `push_spans`: spans of the push in this process.
"""
