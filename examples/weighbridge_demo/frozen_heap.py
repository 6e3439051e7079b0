"""Heap of the server that ranks are forked from, out of the reach of garbage collection: imported when all else has been.

Otherwise each rank's first full collection goes through all that was imported, a third of a second of work, and writes to the memory
that it shares with the server.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
