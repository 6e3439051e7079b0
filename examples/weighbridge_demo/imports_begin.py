"""Begin of what the server that ranks are forked from imports: no garbage is collected until the end, a fifth of the
time.

What is imported stays.
"""

from __future__ import annotations

import gc

gc.disable()
