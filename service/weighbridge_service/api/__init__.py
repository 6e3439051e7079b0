"""Interfaces ("faces") of the service, one folder each: `grpc`, `http`, and `lane` (for processes of the same machine). They only translate.

- `bodies`: implementation of each operation, shared by `grpc` and `http`.

May import: all other folders of the service; `grpc` and `http` may import `lane`, and only `server` imports a face.
"""
