"""Engines that serve versions: values.

May import: `_core.json_values`, `_core.text`.

- `facts`: what agents report of engines, and what the service knows of them.
- `step_parts`: parts of a step of training, from the opening of a version until an engine goes on with it.
- `status`: how an engine stands, as its agent knows it.
"""
