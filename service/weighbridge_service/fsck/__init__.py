"""Consistency check and repair of a store: heads, histories and folders must agree.

May import: `models`, `weighbridge_storage`, `weighbridge`.

- `survey`: the state of one model's objects; only reads.
- `diagnosis`: findings, and the repaired head; pure.
- `repair`: check of a whole store, and repair by a diagnosis.
- `contents`: comparison of contents with digests.
"""
