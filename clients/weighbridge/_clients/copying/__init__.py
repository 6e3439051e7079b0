"""Copying of shards out of a trainer's tensors: the time of the copy, its source and its destination.

May import: the same modules as `_clients`, but nothing of `_clients` itself.

- `copies`: the copies of one call's shards, which by default are made in the call.
- `ahead`: copies that begin before their destination is known.
- `delivery`: delivery of shards, through granted memory and gRPC.
"""
