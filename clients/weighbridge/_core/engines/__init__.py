"""Engines that serve versions: values.

May import: `_core.json_values`, `_core.text`.

- `facts`: what agents report of engines, and what the service knows of them.
- `status`: how an engine stands, as its agent knows it.
"""
