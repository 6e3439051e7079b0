"""Relay of step folders between machines without a common file system, ``weighbridge relay``: each step that a trainer
writes becomes a version, and each version a folder where engines run.
"""

# May import: `_clients` and folders below.
#
# - `outgoing`: folders that become versions.
# - `incoming`: versions that become folders.
# - `places`: folders that appear complete; the newest are kept.
# - `steps`: names of step folders, and their markers of completeness.
# - `relayed`: outcome of one step.
