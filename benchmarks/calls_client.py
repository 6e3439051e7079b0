"""Client of `benchmarks.calls`: times small calls to a service, for as many rounds as it is asked for.

A script that imports nothing of the benchmarks, so that it also runs with the packages of another checkout:
``python calls_client.py ADDRESS MODEL``. It reads a line for each round, ``NUMBER NAME``, makes so many calls of this
name (`calls`), and answers with the seconds of one. First it writes the names as a line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from threading import Event, Thread

from weighbridge import EngineClient


class Watch:
    """A thread that watches a ref."""

    def __init__(self, client: EngineClient, model: str, ref: str) -> None:
        self._expected, self._seen = 0, Event()
        self._versions = client.watch(model, ref)
        next(self._versions)
        Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        for version in self._versions:
            if version.number == self._expected:
                self._seen.set()

    def expect(self, number: int) -> None:
        """Watch for a version from now on."""
        self._expected = number
        self._seen.clear()

    def wait(self) -> None:
        """Wait for that version."""
        if not self._seen.wait(10.0):
            raise TimeoutError(f"the watch has not received version {self._expected}")


def calls(client: EngineClient, model: str, watch: Watch) -> dict[str, Callable[[int], object]]:
    """Calls by name; each gets the number of the repetition."""

    def move(number: int) -> None:
        watch.expect(1 + number % 2)
        client.set_ref(model, "moved", 1 + number % 2)
        watch.wait()

    return {
        "model": lambda _: client.model(model),
        "models": lambda _: client.models(),
        "version": lambda _: client.version(model, 1),
        "versions": lambda _: client.versions(model),
        "refs": lambda _: client.refs(model),
        "set_ref": lambda number: client.set_ref(model, "other", 1 + number % 2),
        "set_ref until a watch has it": move,
    }


def main() -> None:
    """Answer each line of the standard input until it ends."""
    address, model = sys.argv[1:]
    with EngineClient(address) as client:
        for ref in ("moved", "other"):
            client.set_ref(model, ref, 2)
        timed = calls(client, model, Watch(client, model, "moved"))
        print(json.dumps(list(timed)), flush=True)
        for line in sys.stdin:
            count, _, name = line.strip().partition(" ")
            call, begun = timed[name], time.perf_counter()
            for number in range(int(count)):
                call(number)
            print((time.perf_counter() - begun) / int(count), flush=True)


if __name__ == "__main__":
    main()
