"""``python -m benchmarks.attacker_process``: an attacker.

The first line on standard input is a JSON list of the parts of an attack (`benchmarks.attacks.Part`). When all has been said that can be
said, a line comes on standard output; each further line on standard input is answered by one, too: the counts so far of each part
(`benchmarks.held_connections.Counts`). The end of the process ends the attack. It imports the standard library alone, so that it starts at once.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict

from benchmarks.held_connections import Connection, Counts, Http2Connection, Standing

_SETTLE_SECONDS = 10.0
"""How long a service may take to accept what comes."""
_QUIET_SECONDS = 3.0
"""After so long without a byte in either direction nothing more is to be said for now."""
_PAUSE_SECONDS = 0.1


def main() -> None:
    """Attack until standard input ends."""
    standing, counts = Standing(), []
    for part in json.loads(sys.stdin.readline()):
        counts.append(Counts(part["name"]))
        kind = Http2Connection if part["calls"] else Connection
        for _ in range(part["connections"]):
            standing.add(kind(part, counts[-1]))
    started, said = time.monotonic(), False
    while (line := standing.turn(_PAUSE_SECONDS)) is not None:
        now = time.monotonic()
        settled = now - standing.moved > _QUIET_SECONDS or now - started > _SETTLE_SECONDS
        if line or (settled and not said):
            said = said or not line
            print(json.dumps([asdict(each) for each in counts]), flush=True)


if __name__ == "__main__":
    main()
