"""``python -m benchmarks.attacker_process``: an attacker.

The first line on standard input is a JSON list of the parts of an attack (`benchmarks.attacks.Part`). When everything
that can be sent has been sent, the process writes a line to standard output. It answers each further line on standard
input with the counts of each part so far (`benchmarks.held_connections.Counts`). The attack ends with the process. Only
the standard library is imported, so that the start is quick.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict

from benchmarks.held_connections import Connection, Counts, Http2Connection, Standing

_SETTLE_SECONDS = 10.0
"""Seconds in which a service has to accept what is sent."""
_QUIET_SECONDS = 3.0
"""After so many seconds without a byte in either direction, the attack counts as complete for now."""
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
