"""Calls: what clients ask of the service, and what the answers mean, as steps without I/O.

May import: `_transport`, `_core`, `errors`, `v1`; nothing of the clients.

- `steps`: a call as steps, and what takes them.
- `operation_calls`: of the operations in the table that need no steps of their own.
- `model_calls`, `version_calls`, `ref_calls`: about models, versions and refs.
- `engine_calls`: about engines that serve versions.
- `push_calls`: of a push.
- `pull_calls`: the plan of a pull.
- `known_layouts`: layouts that the service need not send again.
- `watching`: where a watch of refs stands.
- `absences`: what it waits for.
"""
