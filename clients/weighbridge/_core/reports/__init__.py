"""Reports of a service about its work: progress of a push, result of a collection, usage of limits.

May import: `_core.json_values`.

- `rank_progress`: progress of each rank of a push, and the rank that the others waited for.
- `collection`: result of collecting a model's versions.
- `usage`: limits and their usage.
"""
