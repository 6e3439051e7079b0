"""Calls: requests of clients to the service and the handling of its responses, as steps without I/O.

May import: `_transport`, `_core`, `errors`, `v1`; nothing of the clients.

- `steps`: a call as steps, and a function that executes them.
- `operation_calls`: calls of the operations in the table that do not need their own steps.
- `model_calls`, `version_calls`, `ref_calls`: about models, versions and refs.
- `engine_calls`: about engines that serve versions.
- `push_calls`: calls of a push.
- `pull_calls`: the plan of a pull.
- `known_layouts`: cached layouts, which the service need not send again.
- `watching`: state of a watch of refs.
- `absences`: what a watch waits for.
"""
