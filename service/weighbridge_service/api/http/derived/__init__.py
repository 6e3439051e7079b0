"""Routes and schemas derived from the table of operations and from dataclasses.

May import: `api.bodies`, `api.http.callers`, `api.http.parameters`.

- `operation_routes`: routes of the operations in the table.
- `schemas`: schemas of dataclasses.
"""
