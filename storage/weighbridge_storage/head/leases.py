"""Leases of those who are still reading a version that was taken out of history.

Objects of a retired version stay for a **grace time**, which is enough for most readers. A reader that takes longer keeps a
**lease**: an object ``leases/<number>/<reader>`` beside the versions, with the time at which it ends, written again before it does.
While a version has a lease that has not ended, nobody deletes its objects.

Why no reader that keeps to this loses a version under its hands: let G be the grace time, and let clocks differ, and each write of a
head or a lease take, less than G/4. A reader begins at a time s with reading the head, which lists the version. So the version is
retired by a write that takes effect at some r >= s, and whose ``retired_ms`` says r - G/4 at the least. A reader that has been at it for
G/4 writes its lease, so it is there by s + G/2. Whoever deletes looks for leases when ``retired_ms`` is longer ago than G by its own
clock, which is after r - G/4 + G - G/4 = r + G/2 >= s + G/2. The lease is written for G each time and again after every G/4, and
is taken as ended only G/4 later than it says, so different clocks do not end it either.

Who begins to read a version when it is retired already (a stream that broke is resumed, a file of a snapshot is asked for) counts
as one that began at ``retired_ms``: it writes its lease when that is G/4 ago, so at once if need be. If the deletion has begun
by then, it is told that there is no such version.

Who is stalled for longer than its lease, or cannot write one, finds that objects are not there. Keys are never given to other
content, so nobody ever reads wrong bytes. The lease of a reader that has died ends by itself. All replicas of a store must
be given the same grace time.
"""

from __future__ import annotations

from dataclasses import dataclass

from weighbridge.errors import InvalidArgument, NotFound
from weighbridge_storage.documents import strict_json
from weighbridge_storage.documents.names import ModelName, lease_key, numbered_key
from weighbridge_storage.stores.objects import ObjectStore


@dataclass(frozen=True, slots=True)
class Grace:
    """The times that a grace time makes, in milliseconds.

    Attributes:
        ms: for how long objects stay after their version was retired, and how long a lease holds from its writing on.

    Raises:
        InvalidArgument: it is less than four milliseconds, or more than JSON can hold.
    """

    ms: int

    def __post_init__(self) -> None:
        if type(self.ms) is not int or not 4 <= self.ms <= strict_json.MAX_INTEGER:
            raise InvalidArgument(f"a grace time of {self.ms!r} ms is out of range", fix="use 4 ms or more")

    @property
    def quarter_ms(self) -> int:
        """How long a reader needs no lease, how often it writes it again, and what clocks differ by less than."""
        return self.ms // 4

    def holds(self, lease: ReadLease, now_ms: int) -> bool:
        """Whether a lease may still be counted on, by whatever clock."""
        return lease.until_ms + self.quarter_ms >= now_ms

    def is_left_behind(self, lease: ReadLease, now_ms: int) -> bool:
        """Whether a lease has ended so long ago that its reader will not write it again."""
        return lease.until_ms + self.ms < now_ms


@dataclass(frozen=True, slots=True)
class ReadLease:
    """A lease as it lies in the store.

    Attributes:
        key: where.
        number: the version that it keeps.
        until_ms: when it ends, in milliseconds since 1970 UTC.
    """

    key: str
    number: int
    until_ms: int


def write_lease(store: ObjectStore, model: ModelName, number: int, reader: str, until_ms: int) -> None:
    """Keep a version's objects until then; ``reader`` tells this lease from those of others.

    Raises:
        InvalidArgument: no such number or reader can be.
        WeighbridgeError: as `ObjectStore.put`.
    """
    text = strict_json.encode({"until_ms": until_ms})
    store.put(lease_key(model, number, reader), text, mode="overwrite")


def read_lease(store: ObjectStore, model: ModelName, key: str) -> ReadLease | None:
    """The lease at a key; None if there is none any more.

    Raises:
        DataLoss: it is malformed.
        InvalidArgument: no lease can have this key.
    """
    place = numbered_key(model, key)
    if place is None:
        raise InvalidArgument(f"{key} is not the key of a lease")
    try:
        data, _ = store.get(key)
    except NotFound:
        return None
    document = strict_json.decode(data, key)
    lease = ReadLease(key, place[1], document.integer("until_ms"))
    document.end()
    return lease
