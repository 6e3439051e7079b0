"""Replicas of the service among each other: what they tell, and read from, those that receive the same version.

May import: `push`, `models`, `plan`, `runtime`, `weighbridge_storage`, `weighbridge`; of `push` only `sessions` and
`takeovers` know how a push is received.

- `progress`: how far one replica is, and its form on the wire.
- `liveness`: liveness of a replica; pure.
- `links`: connections to other replicas.
- `heartbeat`: exchange of progress, and who is gone.
- `directory`: which other replicas there are.
- `takeovers`: versions that a leaving replica hands over.
- `peer_files`: files that another replica owns, as sources.
- `sessions`: pushes as other replicas see them.
"""
