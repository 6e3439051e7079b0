"""Reports of engines to the service, and the service's responses.

May import: `_clients`, `_core`.

- `reporter`: the reporting thread, and the engine's address.
- `said`: state of an engine and of its reports; pure.
"""
