"""Weighbridge service. `server` is the process, `core` wires its parts, and `service` what other houses plug into it.

May import: `weighbridge_storage`, `weighbridge`. A folder imports only those listed before it:

- `metrics`: what each metric is, and what observes them.
- `runtime`: settings, limits and clock of the process.
- `access`: who somebody is, and what they may do.
- `admission`: what they may have, and whose turn it is.
- `plan`: which bytes go where.
- `families`: families of models, a file each.
- `models`: registered models, their weight maps and layouts.
- `converting`, `fsck`: conversion of folders, and the check of a store; neither needs a running service.
- `catalog`: models, versions and refs.
- `push`: a version from its opening to its being durable.
- `replicas`: replicas of the service among each other.
- `pull`: the bytes of a version.
- `exports`: versions written as folders in the background.
- `health`: named checks, probes and ``weighbridge doctor``.
- `api`: the faces: gRPC, HTTP, local lane.
"""
