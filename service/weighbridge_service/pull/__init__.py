"""Pull: the bytes of a version, for an engine or a trainer.

May import: `replicas`, `catalog`, `models`, `plan`, `weighbridge_storage`, `weighbridge`.

- `serving`: slices for engines, shards for trainers; from the image while there is one, from the store otherwise.
- `reading`: a version that is open, and the stream of pieces that is read from it.
- `read_ahead`: prefetch of the next part of a stream.
"""
