"""Routes and schemas that follow from the table of operations and from values.

May import: `api.bodies`, `api.http.callers`, `api.http.parameters`.

- `operation_routes`: routes of the operations in the table.
- `schemas`: schemas of values.
"""
