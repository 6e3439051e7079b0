"""Head and history of a model: their contents, their changes, and retention.

May import: `stores`, `documents`, `weighbridge`.

- `head`: content of `head.json`.
- `head_changes`: transitions of history, refs and rules: a version is published, retired or deleted (pure functions).
- `open_versions`: transitions of versions until they are published or given up (pure functions).
- `pins`: versions that adapters keep (pure functions).
- `requests`: approvals of held versions, and requests to change protected refs (pure functions).
- `head_store`: conditional reads and writes of heads.
- `history`: versions that a head leads to.
- `history_nodes`: nodes of the tree that contains them.
- `history_tree`: queries and edits of that tree.
- `history_store`: reads and writes of nodes.
- `ledger`: stored bytes of the models of a namespace.
- `repinning`: rewrite of the pins of the bases of adapters.
- `leases`: leases of readers of versions that were removed from history.
- `retention`: decision which versions are kept (pure functions).
- `collecting`: collection of objects that are not kept.
"""
