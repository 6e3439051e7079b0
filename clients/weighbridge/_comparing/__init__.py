"""Comparison of two sets of weights, ``weighbridge diff``: changed elements, and the largest step between them.

May import: `_clients` and folders below it.

- `elements`: changed elements of two runs of bytes, and the largest step between them.
- `differences`: results of a comparison, by tensor and by layer.
- `sides`: sides of a comparison: versions, and folders.
- `comparing`: the comparison, piece by piece.
- `pictures`: a picture of it.
"""
