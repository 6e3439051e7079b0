"""Reports of engines to the service, and what an agent so knows of its own.

May import: `_clients`, `_core`.

- `reporter`: the thread that reports, and where the engine is.
- `said`: what is to be reported, and how that has gone; pure.
"""
