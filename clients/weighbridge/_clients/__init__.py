"""Client of the service and of engines, and the runs of a push and of a pull.

May import: all private folders below it, not `_lazy`, `_cli`, `aio`, `follow` or `integrations`.

- `client`: models, versions, refs.
- `operation_methods`: its methods that the table of operations gives.
- `engine`: the client of an engine rank.
- `connection`: control calls with retries and failover.
- `transport`: what carries one client's weights.
- `calls`: what is asked of the service, and what the answers mean, as steps without I/O.
- `pushing`: the run of a push.
- `rank_stream`: the stream of a rank's bytes, resumed where it breaks.
- `copying`: how shards are copied out of the trainer's tensors, and where to.
- `holding`: for how long a push may hold its rank, and whether all ranks make it.
- `push_options`: what a trainer says of a version beside its weights.
- `push_handle`: its progress and cost.
- `push_routes`: which part of a push goes to which replica.
- `pulling`: the run of a pull.
- `attempts`: attempts at a version that a ref names.
- `filling`: a torch model that a pull fills; `adapter_filling`: an adapter of peft in it.
"""
