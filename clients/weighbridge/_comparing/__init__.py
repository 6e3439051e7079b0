"""Comparison of two sets of weights, ``weighbridge diff``: which elements have changed, and how far.

May import: `_clients` and folders below it.

- `elements`: changed elements of two runs of bytes, and the largest step between them.
- `differences`: what a comparison finds, by tensor and by layer.
- `sides`: what is compared: versions, and folders.
- `comparing`: the comparison, piece by piece.
- `pictures`: a picture of it.
"""
