"""Contract between an engine's rank and the service: record which slices the rank needs, prepare, agree, apply,
discard, status.

An adapter describes the engine's model as an `EngineModel` and calls an `EngineRank`; docs/engines.md shows how to add
an engine.
"""

# May import: `follow`, `_lazy`, `_reporting`, `_clients` and folders below, and no engine. `source` and `fitting` need
# no torch. What a rank says of its versions is `weighbridge.follow.status`.
#
# - `source`: service and model that versions come from.
# - `agreement`: the port to the other ranks, and the one way in which they agree.
# - `fitting`: checks of a version against the engine and the version before.
# - `storageless`: stand-ins for parameters, for runs of the loader that change nothing.
# - `drafting`: a model with the drafter of speculative decoding.
# - `model`: what an adapter provides.
# - `turns`: scheduling of threads while a version is prepared.
# - `preparation`: the recording of a model's loader, and a version that is being fetched to host memory.
# - `rank`: versions of one rank, and the transitions between them.
