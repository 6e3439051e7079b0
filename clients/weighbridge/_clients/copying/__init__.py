"""Copying of shards out of a trainer's tensors: when, from where a push then reads them, and where to.

May import: what `_clients` may, and nothing of `_clients` itself.

- `copies`: the copies of what one call pushes; by themselves, made in the call.
- `ahead`: those that are begun before it is known where they go.
- `delivery`: shards on their way, by memory that is lent and by gRPC.
"""
