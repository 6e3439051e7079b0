"""Engines that serve versions, as their agents report them: who serves what, how far behind its ref it is, and who is gone.

Nothing of it is stored: agents report every few seconds, so a service that was started again knows them soon.

May import: `replicas`, `catalog`, `admission`, `access`, `metrics`, `runtime`, `weighbridge_storage`, `weighbridge`.

- `entries`: what is known of an engine, and how it stands; pure.
- `reports`: checks of what agents say; pure.
- `registry`: the engines of this process, as many as there is room for.
- `fleets`: the engines of each model in a few figures; pure.
- `pages`: pages of lists; pure.
- `known_engines`: engines beside the refs that they follow.
- `exchange`: engines that report to one of several replicas.
"""
