"""Clients of the service and of engines, and the execution of pushes and pulls.

May import: all private folders below it, not `_lazy`, `_cli`, `aio`, `follow` or `integrations`.

- `client`: models, versions, refs.
- `operation_methods`: methods of the client that are generated from the table of operations.
- `engine`: the client of an engine rank.
- `connection`: control calls with retries and failover.
- `transport`: lanes and connections for one client's weights.
- `calls`: requests to the service and the handling of its responses, as steps without I/O.
- `pushing`: execution of a push.
- `rank_stream`: the stream of a rank's bytes, which resumes after a failure.
- `copying`: copying of shards out of the trainer's tensors.
- `holding`: how long a push may block its rank, and whether all ranks make it.
- `push_options`: options of a push, such as metadata.
- `push_handle`: progress and cost of a push.
- `push_routes`: the replica to which each part of a push is sent.
- `pulling`: execution of a pull.
- `attempts`: repeated attempts to update to the version that a ref names.
- `filling`: filling a torch model by a pull; `adapter_filling`: filling a peft adapter in it.
"""
