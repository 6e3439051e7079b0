"""Communication between replicas of the service: progress, files and handovers of versions that several replicas
receive together.

May import: `push`, `models`, `plan`, `runtime`, `weighbridge_storage`, `weighbridge`; only `sessions` and `takeovers`
may depend on how `push` receives a push.

- `progress`: progress of one replica, and its wire format.
- `liveness`: liveness of a replica (pure functions).
- `links`: connections to other replicas.
- `heartbeat`: exchange of progress, and detection of lost replicas.
- `directory`: directory of replicas.
- `takeovers`: versions that a leaving replica hands over.
- `peer_files`: files that another replica owns, as sources.
- `sessions`: push sessions as other replicas see them.
"""
