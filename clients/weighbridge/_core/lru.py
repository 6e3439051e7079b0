"""Cache of the values used last, bounded by what they weigh."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

V = TypeVar("V")


class Cache(Generic[V]):
    """The values used last, by key. Thread-safe; a value that two threads miss at once may be made twice.

    Args:
        kept: what the values may weigh together; one value is kept whatever it weighs.
        weigh: what a value weighs; by default each weighs 1.
    """

    def __init__(self, kept: int, weigh: Callable[[V], int] = lambda _value: 1) -> None:
        self._kept = kept
        self._weigh = weigh
        self._weight = 0
        self._lock = threading.Lock()
        self._values: OrderedDict[Hashable, V] = OrderedDict()

    def get(self, key: Hashable) -> V | None:
        """The value, if it is there."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: Hashable, value: V) -> None:
        """Keep a value; the one that was not used for longest goes if there are too many."""
        with self._lock:
            self._put(key, value)

    def put_instead(self, key: Hashable, old: V | None, value: V) -> V:
        """Keep a value instead of an old one, or of none; that which is there now, if others have put another one meanwhile."""
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
        """What the values that are there weigh together."""
        return self._weight

    @property
    def keys(self) -> list[Any]:
        """The keys of the values that are there."""
        with self._lock:
            return list(self._values)

    def drop(self, key: Hashable) -> None:
        """Forget a value, if it is there."""
        with self._lock:
            there = self._values.pop(key, None)
            if there is not None:
                self._weight -= self._weigh(there)

    def drop_if(self, unwanted: Callable[[Any], bool]) -> None:
        """Forget the values whose keys are not wanted any more."""
        for key in self.keys:
            if unwanted(key):
                self.drop(key)

    def get_or_make(self, key: Hashable, make: Callable[[], V]) -> V:
        """The value, made now if it is not there. Callers that make it at once all get the one that was there first."""
        found = self.get(key)
        return self.put_instead(key, None, make()) if found is None else found
