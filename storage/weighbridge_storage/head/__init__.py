"""Head and history of a model: what it holds, how it changes, and what is kept.

May import: `stores`, `documents`, `weighbridge`.

- `head`: content of `head.json`.
- `head_changes`: transitions of history, refs and rules; pure.
- `open_versions`: transitions of versions that are being received; pure.
- `pins`: versions that adapters keep; pure.
- `requests`: approvals of held versions, and requests to change protected refs; pure.
- `head_store`: conditional reads and writes of heads.
- `history`: versions that a head leads to.
- `history_nodes`: nodes of the tree that holds them.
- `history_tree`: queries and edits of that tree.
- `history_store`: reads and writes of nodes.
- `ledger`: what the models of a namespace hold.
- `repinning`: pins of the bases of adapters, written again.
- `leases`: readers of versions that were taken out of history.
- `retention`: decision which versions are kept; pure.
- `collecting`: collection of what is not kept.
"""
