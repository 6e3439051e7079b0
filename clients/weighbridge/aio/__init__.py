"""Asyncio client: control calls run on the event loop, copies and waits run in threads.

It shares its logic with the blocking client.
"""

# May import: `_clients` and folders below it.
#
# - `client`: models, versions, refs, pulls.
# - `operation_methods`: methods of the client that are generated from the table of operations. - `connection`: control
# calls with retries and failover. - `pulls`: a pull, ended when its task is cancelled. - `threads`: threads for work
# that would block the loop.

from weighbridge.aio.client import AsyncEngineClient
from weighbridge.aio.pulls import AsyncPull

__all__ = ["AsyncEngineClient", "AsyncPull"]
