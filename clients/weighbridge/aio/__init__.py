"""Asyncio client: control calls on the event loop, copies and waits in threads. Shares its decisions with the blocking client."""

# May import: `_clients` and folders below it.
#
# - `client`: models, versions, refs, pulls.
# - `operation_methods`: its methods that the table of operations gives.
# - `connection`: control calls with retries and failover.
# - `pulls`: a pull, ended when its task is cancelled.
# - `threads`: threads for work that would block the loop.

from weighbridge.aio.client import AsyncEngineClient
from weighbridge.aio.pulls import AsyncPull

__all__ = ["AsyncEngineClient", "AsyncPull"]
