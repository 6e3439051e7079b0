"""Storage: stores, stored documents, heads, versions and images.

May import: `weighbridge`. A folder imports only folders that precede it in this list:

- `threads`: pool of threads.
- `documents`: names, keys and contents of stored documents.
- `stores`: object stores behind one interface; `opening` opens the store at a location.
- `head`: head and history of a model.
- `memory`: images, the memory in which versions are assembled.
- `cache`: blocks of files in a remote store.
- `versions`: a version in a store.
"""
