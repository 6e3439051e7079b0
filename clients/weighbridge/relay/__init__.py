"""Relay of step folders between machines without a common file system, ``weighbridge relay``: each step that a trainer writes becomes a version,
and each version a folder where engines run.
"""

# May import: `_clients` and folders below.
#
# - `outgoing`: folders that become versions.
# - `incoming`: versions that become folders.
# - `places`: folders that appear complete, and of which some are kept.
# - `steps`: names of step folders, and what marks one as complete.
# - `relayed`: outcome of one step.
