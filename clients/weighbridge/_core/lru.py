"""Cache of the most recently used values, bounded by their total weight."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

V = TypeVar("V")


class Cache(Generic[V]):
    """The most recently used values, by key. Thread-safe.

    If two threads miss a value at the same time, it may be made twice.

    Args:
        kept: maximum total weight of the values. One value is kept regardless of its weight.
        weigh: returns the weight of a value; by default 1.
    """

    def __init__(self, kept: int, weigh: Callable[[V], int] = lambda _value: 1) -> None:
        self._kept = kept
        self._weigh = weigh
        self._weight = 0
        self._lock = threading.Lock()
        self._values: OrderedDict[Hashable, V] = OrderedDict()

    def get(self, key: Hashable) -> V | None:
        """Return the value of a key, or None."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: Hashable, value: V) -> None:
        """Keep a value, and drop the least recently used values beyond the total weight."""
        with self._lock:
            self._put(key, value)

    def put_instead(self, key: Hashable, old: V | None, value: V) -> V:
        """Replace ``old``, or add the value if the key does not have one (compare-and-swap). If another thread has put
        a different value, return that value.
        """
        with self._lock:
            there = self._values.get(key)
            if there is not None and there is not old:
                return there
            self._put(key, value)
            return value

    def _put(self, key: Hashable, value: V) -> None:
        there = self._values.pop(key, None)
        if there is not None:
            self._weight -= self._weigh(there)
        self._values[key] = value
        self._weight += self._weigh(value)
        while self._weight > self._kept and len(self._values) > 1:
            self._weight -= self._weigh(self._values.popitem(last=False)[1])

    @property
    def weight(self) -> int:
        """Total weight of the values."""
        return self._weight

    @property
    def keys(self) -> list[Any]:
        """The keys of the values, the least recently used first."""
        with self._lock:
            return list(self._values)

    def drop(self, key: Hashable) -> None:
        """Drop the value of a key, if it has one."""
        with self._lock:
            there = self._values.pop(key, None)
            if there is not None:
                self._weight -= self._weigh(there)

    def drop_if(self, unwanted: Callable[[Any], bool]) -> None:
        """Drop all values whose keys are unwanted."""
        for key in self.keys:
            if unwanted(key):
                self.drop(key)

    def get_or_make(self, key: Hashable, make: Callable[[], V]) -> V:
        """Return the value of a key; make it if the key does not have one. Callers that make a value at the same time
        all get the first one.
        """
        found = self.get(key)
        return self.put_instead(key, None, make()) if found is None else found
