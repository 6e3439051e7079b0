"""Storage: stores, stored documents, heads, versions and images.

May import: `weighbridge`. A folder imports only folders above it here:

- `threads`: pool of threads.
- `documents`: names, keys and text of stored documents.
- `stores`: object stores behind one port; `opening` finds the one that a location stands for.
- `head`: head and history of a model.
- `memory`: images, in which versions are assembled.
- `cache`: blocks of files in a remote store.
- `versions`: a version in a store.
"""
