"""Consistency check of a store: whether heads, histories and folders agree, and how they are made to agree again.

May import: `models`, `weighbridge_storage`, `weighbridge`.

- `survey`: what the objects of one model say; only reads.
- `diagnosis`: what is wrong, and the head that would be right; pure.
- `repair`: carries a diagnosis out; the check of a whole store.
- `contents`: comparison of contents with digests.
"""
