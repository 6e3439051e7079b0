"""Engines that serve versions: values.

May import: `_core.json_values`, `_core.metadata`, `_core.text`, `weighbridge.errors`.

- `facts`: what agents report of engines, and what the service knows of them.
- `golden`: golden prompts, which engines are asked.
- `step_parts`: parts of a step of training, from the opening of a version until an engine goes on with it.
- `status`: how an engine stands, as its agent knows it.
"""
