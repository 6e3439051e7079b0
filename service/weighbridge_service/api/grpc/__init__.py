"""gRPC face: control calls on an event loop, streams of weights in threads.

May import: `api.bodies`, `api.lane`, `core`, and folders below.

- `server`: the ports and their services.
- `method`: what is done around a call, at whichever port it comes.
- `methods`: reads a request on the loop, runs its handler, answers.
- `requests`: limits of requests on their way in.
- `asking`: verb, models and refs of a request.
- `call`: what a handler knows of its caller.
- `errors`: errors as ``google.rpc`` status details.
- `event_loop`: event loop in a thread of its own.
- `watches`: watches of refs and waits for states.
- `bulk_server`: the port for streams of weights.
- `bulk_streams`: messages with weights, within a budget.
- `operation_handlers`: operations of the table.
- `model_handlers`: what else `ModelService` has.
- `engine_handlers`: `EngineService`, which the house of the engines plugs in.
- `checkpoint_handlers`: `CheckpointService`.
- `weight_handlers`: `WeightService`, `BulkService`, `LocalLaneService`.
- `replica_handlers`: `ReplicaService`.
- `health_handlers`: health checks and reflection.
"""
