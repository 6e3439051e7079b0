"""Readers of the formats of before, which nothing but a migration of a store uses.

May import: all other folders of `weighbridge_storage`, `weighbridge`.

- `head_format2`: heads of formats 1 and 2.
- `manifest_format1`: manifests of format 1.
- `migrate`: a store of before becomes one of now.
"""
