"""Cache of blocks of files in a remote store.

May import: `memory`, `stores.objects`, `weighbridge`.

- `block_cache`: reader of remote files through the cache.
- `block_books`: cached blocks, and the order of eviction.
- `block_file`: file on disk that holds blocks.
- `strides`: blocks that contain a strided box (pure functions).
"""
