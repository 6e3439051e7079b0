"""Catalog: models, versions and refs, as the store's heads and this process know them.

May import: `models`, `plan`, `runtime`, `weighbridge_storage`, `weighbridge`.

- `catalog`: queries and changes.
- `bases`: versions of models that adapters are on.
- `known_models`: the registrations that this process remembers.
- `questions`: what somebody waits for to be so, and whether it is.
- `snapshots`: what this process knows of versions beyond the store.
- `head_versions`: versions and refs as a head has them; pure.
- `holding`: why a version is held that is not in history yet; pure.
- `gate`: which versions are held and which refs protected, and approval of either.
- `signatures`: signatures of versions.
- `changes`: news of models for those that follow them.
- `store_readers`: leases of versions that are being read.
- `collection_loop`: collection, when asked for and by itself.
"""
