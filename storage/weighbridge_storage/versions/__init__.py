"""Versions in a store: manifest, digests and files.

May import: `head`, `cache`, `memory`, `stores`, `documents`, `weighbridge`.

- `manifest`: content of `weighbridge.json`.
- `digests`: digests of a file, computed in one pass.
- `writing`: writes of a version's objects, in crash-safe order.
- `reading`: reader of a durable version.
- `signatures`: signatures next to a version's folder.
- `verifying`: comparison of files with the manifest.
"""
