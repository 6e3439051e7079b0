"""Reports of a service on its work: how far a push is, what a collection has done, what is used of limits.

May import: `_core.json_values`.

- `rank_progress`: how far each rank of a push is, and which of them the others waited for.
- `collection`: result of collecting a model's versions.
- `usage`: limits, and how much of them is used.
"""
