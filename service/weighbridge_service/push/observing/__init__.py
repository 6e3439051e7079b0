"""Observing: what metrics and traces are told of a push.

May import: `push.machine`, `metrics`, and the values of `weighbridge`; nothing else of `push`.

- `observer`: who is told of each step.
- `push_spans`: the push's spans in this process.
"""
