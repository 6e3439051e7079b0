"""Catalog of models, versions and refs, from the store's heads and the memory of this process.

May import: `models`, `plan`, `runtime`, `weighbridge_storage`, `weighbridge`.

- `catalog`: queries, registrations and stored values.
- `bases`: versions of models that adapters are based on.
- `known_models`: registrations that this process remembers.
- `questions`: conditions that callers wait for, and their current answers.
- `snapshots`: states of versions that only this process knows, not the store.
- `head_versions`: versions and refs from a head; pure.
- `holding`: reasons to hold a version before it is in history; pure.
- `gate`: held versions, protected refs, and approvals of both.
- `signatures`: signatures of versions.
- `changes`: notifications of changed models.
- `store_readers`: leases of versions that are being read.
- `collection_loop`: collection, on request and periodically, and deletion of versions and models.
"""
