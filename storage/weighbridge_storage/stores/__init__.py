"""Object stores behind one interface, with the same guarantees.

May import: `documents`, `threads`, `weighbridge`.

- `objects`: the interface, and the guarantees.
- `outcomes`: outcome of a write whose response was lost (pure functions).
- `local`: a local folder.
- `hidden_folders`: temporary files and locks of a local folder.
- `s3`: a bucket of an S3 server.
- `guarded`: deadlines for a store that may hang.
- `breaker`: circuit breaker of a store.
- `probe`: check of a store's conditional writes.
"""
