"""What is kept, and where: object stores, names, the head of a model, manifests and images.

Modules, lowest first; each imports only from those above it and from `weighbridge`:

- `names`: what models, refs, files and versions may be called, and under which keys they lie.
- `objects`: the port to an object store, and the rules every store keeps.
- `local`: that port on a local folder.
- `strict_json`: how a stored JSON document is read without trusting it.
- `head`: a model's `head.json`, what may change in it, and how writers take turns.
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
