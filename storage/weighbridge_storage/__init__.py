"""What is kept, and where: object stores, names, the head of a model, manifests and images.

Modules, lowest first; each imports only from those above it and from `weighbridge`:

- `names`: what models, refs, files and versions may be called, and under which keys they lie.
- `objects`: the port to an object store, and the rules every store keeps.
- `local`: that port on a local folder.
- `breaker`, `call_threads`, `guarded`: that port with deadlines, for what somebody waits for.
- `strict_json`: how a stored JSON document is read without trusting it.
- `document_digests`: the digests by which damage to a document is told from what was written.
- `entries`: versions and refs as objects of stored documents.
- `history_nodes`, `history_tree`: the tree that holds the older versions of a model, its queries and its edits.
- `head`: a model's `head.json`.
- `history`: the versions that a head leads to, and what goes from it into the tree; `history_store` reads and writes the tree's nodes.
- `head_changes`, `head_store`: what may change in a head, and how writers take turns.
- `leases`, `retention`, `collecting`: who is still reading, what is kept, and how the rest goes.
- `migration`: readers of the formats of before.
- `manifest`: a version's `weighbridge.json`.
- `digests`: digests of a version's files and their blocks, and non-finite elements of its tensors.
- `images`: the buffers in which a version is put together.
- `file_bytes`: where the bytes of one file of a version are.
- `block_cache`: a remote store's files, read in blocks; `block_books` says which blocks stay, `block_file` is where they lie, and
  `strides` which of them a slice needs.
- `version_reading`, `version_writing`, `version_verifying`: a version out of a store, into one, and compared with its manifest.
- `torch_dist`: checkpoints of Megatron-core, as layouts of their files, both ways; `torch_dist_metadata` is their ``.metadata``,
  `torch_dist_items` what lies in a file, and `torch_dist_pickles` reads pickles without running them.
"""
