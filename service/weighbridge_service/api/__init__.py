"""Servers of the service, one folder each: `grpc`, `http`, and `lane` (for processes on the same machine). They only
convert requests and responses.

- `bodies`: implementation of each operation, shared by `grpc` and `http`.

May import: all other folders of the service; `grpc` and `http` may import `lane`, and only `server` imports them.
"""
