"""Object stores behind one port, which keep one set of promises.

May import: `documents`, `threads`, `weighbridge`.

- `objects`: the port, and the promises.
- `outcomes`: outcome of a write whose response was lost; pure.
- `local`: a local folder.
- `hidden_folders`: temporary files and locks of a local folder.
- `s3`: a bucket of an S3 server.
- `guarded`: deadlines for a store that may hang.
- `breaker`: circuit breaker of a store.
- `probe`: whether a store keeps its promises about conditional writes.
"""
