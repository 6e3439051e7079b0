"""The asyncio client: `client` makes control calls on the event loop, `pulls` brings weights, `threads` keeps the loop free of both
copies and waits. Decisions are those of the blocking client: `control_calls`, `pulling`, `bulk`, `backoff`.
"""

from weighbridge.aio.client import AsyncEngineClient
from weighbridge.aio.pulls import AsyncPull

__all__ = ["AsyncEngineClient", "AsyncPull"]
