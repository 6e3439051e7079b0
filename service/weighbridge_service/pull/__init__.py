"""Pull: reads of a version's bytes by engines and trainers.

May import: `replicas`, `catalog`, `models`, `plan`, `weighbridge_storage`, `weighbridge`.

- `serving`: slices for engines and shards for trainers, from the image while it exists, otherwise from the store.
- `reading`: an open version, and the stream of pieces that is read from it.
- `read_ahead`: prefetch of the next part of a stream.
"""
