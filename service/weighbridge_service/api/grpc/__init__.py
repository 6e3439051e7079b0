"""gRPC server: control calls on an event loop, streams of weights in threads.

May import: `api.bodies`, `api.lane`, `core`, and folders below.

- `server`: the ports and their services.
- `method`: steps around every call, at both ports: authentication, errors, counting, audit.
- `methods`: reads a request on the loop, runs its handler, sends the response.
- `requests`: limits of requests while they are received.
- `asking`: the verb, models and refs of a request.
- `call`: a call as handlers see it: deadline, end, and the caller, whose credentials are checked while it lasts.
- `errors`: errors as ``google.rpc`` status details.
- `event_loop`: event loop in a thread of its own.
- `watches`: watches of refs and waits for states.
- `bulk_server`: the port for streams of weights.
- `bulk_streams`: messages with weights, within a budget.
- `operation_handlers`: operations of the table.
- `model_handlers`: the other methods of `ModelService`.
- `engine_handlers`: `EngineService`, a plug-in of the `engines` package.
- `checkpoint_handlers`: `CheckpointService`.
- `weight_handlers`: `WeightService`, `BulkService`, `LocalLaneService`.
- `replica_handlers`: `ReplicaService`.
- `health_handlers`: health checks and reflection.
"""
