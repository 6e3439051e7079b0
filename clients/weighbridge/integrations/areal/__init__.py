"""Weighbridge inside AReaL 1.0: a trainer whose actors push their shards, and whose rollouts load the version.

Nothing is imported here: AReaL's workers import the module of their engine's class alone.
"""

# May import: `pausing`, `engine_rank`, `_clients` and folders below, and AReaL.
#
# - `trainer`: AReaL's trainer with these actors.
# - `fsdp`: actor of FSDP2.
# - `megatron`: actor of Megatron-core.
# - `updates`: what an update does on each rank of an actor.
# - `settings`: what the environment says.
