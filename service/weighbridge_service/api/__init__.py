"""Faces of the service, one folder each: `grpc`, `http`, and `lane` (processes of the same machine). They translate and decide nothing.

May import: all other folders of the service; `grpc` and `http` may import `lane`, and nothing imports a face but `server`.
"""
