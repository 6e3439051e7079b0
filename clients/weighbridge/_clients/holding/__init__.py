"""Terms of a push: how long it may block the training loop, and whether all of its ranks push.

May import: `_core`, torch's store of a process group, and `errors`.

- `policy`: how long a push may block, and how a failed push is handled; the hold of one call.
- `agreement`: agreement that either all ranks make a push, or none.
"""
