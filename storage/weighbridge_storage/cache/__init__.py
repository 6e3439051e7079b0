"""Cache of blocks of files in a remote store.

May import: `memory`, `stores.objects`, `weighbridge`.

- `block_cache`: reader of remote files through the cache.
- `block_books`: which blocks are there, and which goes next.
- `block_file`: file on disk that holds blocks.
- `strides`: blocks that a strided box lies in; pure.
"""
