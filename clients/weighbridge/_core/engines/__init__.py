"""Engines that serve versions: values.

May import: `_core.json_values`, `_core.metadata`, `_core.text`, `weighbridge.errors`.

- `facts`: the reports of agents about engines, and the service's view of engines.
- `golden`: golden prompts, which agents send to engines.
- `step_parts`: parts of a training step, from the opening of a version until an engine continues with it.
- `status`: status of an engine, as its agent knows it.
"""
