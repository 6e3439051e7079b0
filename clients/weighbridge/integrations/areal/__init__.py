"""Weighbridge inside AReaL 1.0: a trainer whose actors push their shards, and whose rollouts load the version.

This module imports nothing: AReaL's workers import only the module of their engine's class.
"""

# May import: `pausing`, `engine_rank`, `_clients` and folders below, and AReaL.
#
# - `trainer`: AReaL's trainer with these actors.
# - `fsdp`: actor of FSDP2.
# - `megatron`: actor of Megatron-core.
# - `updates`: an update on each rank of an actor.
# - `settings`: settings from the environment.
