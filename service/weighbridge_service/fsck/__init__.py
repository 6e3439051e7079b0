"""Consistency check and repair of a store: heads, histories and folders must agree.

May import: `models`, `weighbridge_storage`, `weighbridge`.

- `survey`: the state of one model's objects (read-only).
- `diagnosis`: findings, and the repaired head (pure functions).
- `repair`: check of a whole store, and repair according to a diagnosis.
- `contents`: comparison of contents with digests.
"""
