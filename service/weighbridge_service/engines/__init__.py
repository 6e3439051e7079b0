"""Engines that serve versions, from the reports of their agents: the version of each, how far it is behind its ref, and
whether it is gone.

The state is not stored: agents report every few seconds, so a restarted service soon knows all engines again.

May import: `replicas`, `catalog`, `admission`, `access`, `metrics`, `runtime`, `weighbridge_storage`, `weighbridge`.

- `entries`: the state of an engine, and its standing; pure.
- `reports`: validation of reports; pure.
- `registry`: the engines that this process knows, up to a maximum.
- `fleets`: summary figures of the engines of each model; pure.
- `pages`: pagination of lists; pure.
- `known_engines`: engines joined with the refs that they follow.
- `exchange`: forwarding of reports between replicas.
"""
