"""Faces of the service, one folder each: `grpc`, `http`, and `lane` (processes of the same machine). They translate and decide nothing.

- `bodies`: what the service does for each operation, whichever face it is asked by.

May import: all other folders of the service; `grpc` and `http` may import `lane`, and nothing imports a face but `server`.
"""
