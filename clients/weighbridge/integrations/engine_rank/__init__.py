"""Contract between an engine's rank and the service: record what the rank takes, prepare, agree, apply, discard, status.

An adapter describes the engine's model as an `EngineModel` and calls an `EngineRank`; docs/engines.md adds an engine in a page.
"""

# May import: `follow`, `_lazy`, `_reporting`, `_clients` and folders below, and no engine. `source` and `fitting` need no torch. What a rank says of its versions
# is `weighbridge.follow.status`.
#
# - `source`: service and model that versions come from.
# - `agreement`: the port to the other ranks, and the one way in which they agree.
# - `fitting`: checks of a version against the engine and the version before.
# - `storageless`: stand-ins for parameters, for runs of the loader that change nothing.
# - `drafting`: a model with the drafter of speculative decoding.
# - `model`: what an adapter provides.
# - `turns`: turns of threads while a version is prepared.
# - `preparation`: what was recorded of a model's loader, and a version on its way to host memory.
# - `rank`: versions of one rank, and the way between them.
