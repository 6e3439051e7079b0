"""End of what the server that ranks are forked from imports.

The heap is out of the reach of garbage collection from here on. Otherwise each rank's first full collection goes
through all that was imported, a third of a second of work, and writes to the memory that it shares with the server. And
what ranks define is compiled by torch where they ask for it.
"""

from __future__ import annotations

import gc
import os

os.environ.pop("TORCHDYNAMO_DISABLE", None)
gc.collect()
gc.freeze()
gc.enable()
