"""Weighbridge service.

`server` runs the process, `core` wires the parts, and `service` plugs further packages into the core.

May import: `weighbridge_storage`, `weighbridge`. A folder imports only those listed before it:

- `metrics`: declarations of metrics, and their instruments.
- `runtime`: settings, limits and clock of the process.
- `access`: identities of callers, and their permissions.
- `admission`: quotas of callers, and the order in which they are served.
- `plan`: plans of transfers: the place of each byte.
- `families`: families of models, a file each.
- `models`: registered models, their weight maps and layouts.
- `converting`, `fsck`: conversion of folders, and the check of a store; neither needs a running service.
- `catalog`: models, versions and refs.
- `push`: a version from its opening until it is durable.
- `replicas`: communication between replicas of the service.
- `pull`: reading the bytes of a version.
- `exports`: versions written as folders in the background.
- `health`: named checks, probes and ``weighbridge doctor``.
- `api`: the faces: gRPC, HTTP, local lane.
"""
