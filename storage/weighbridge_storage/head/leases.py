"""Leases of readers that still read a version after its removal from history.

Objects of a retired version stay for a **grace time**, which is enough for most readers. A reader that needs longer
holds a **lease**: an object ``leases/<number>/<reader>`` next to the versions. It contains the time at which it
expires, and the reader renews it. Collections do not delete the objects of a version that has an unexpired lease.

Proof that no version is deleted while a reader that follows this protocol reads it: let G be the grace time. Let clocks
differ by less than G/4, and let each write of a head or a lease take less than G/4. A reader begins at a time s by
reading the head, which lists the version. So the version is retired by a write that takes effect at some r >= s, and
whose ``retired_ms`` is at least r - G/4. A reader that has been reading for G/4 writes its lease, so the lease is in
the store by s + G/2. A collection looks for leases when ``retired_ms`` is longer ago than G by its own clock, which is
after r - G/4 + G - G/4 = r + G/2 >= s + G/2. The lease is renewed every G/4, each time for G, and counts as expired
only G/4 after its expiry time. So clock differences do not end it either.

A reader that begins after the version was retired (it resumes a broken stream, or requests a file of a snapshot) counts
as a reader that began at ``retired_ms``: it writes its lease G/4 after ``retired_ms``, or at once if that time has
passed. If the deletion has begun by then, the reader gets `NotFound`.

A reader that stalls for longer than its lease, or cannot write a lease, finds objects missing. Keys are never reused
for other content, so readers never get wrong bytes. The lease of a crashed reader expires. All replicas of a store must
use the same grace time.
"""

from __future__ import annotations

from dataclasses import dataclass

from weighbridge.errors import InvalidArgument, NotFound
from weighbridge_storage.documents import strict_json
from weighbridge_storage.documents.names import ModelName, lease_key, numbered_key
from weighbridge_storage.stores.objects import ObjectStore


@dataclass(frozen=True, slots=True)
class Grace:
    """A grace time and the durations derived from it, in milliseconds.

    Attributes:
        ms: the time for which objects stay after their version was retired, and for which a lease is valid after it is
            written.

    Raises:
        InvalidArgument: it is less than four milliseconds, or more than JSON can hold.
    """

    ms: int

    def __post_init__(self) -> None:
        if type(self.ms) is not int or not 4 <= self.ms <= strict_json.MAX_INTEGER:
            raise InvalidArgument(f"a grace time of {self.ms!r} ms is out of range", fix="use 4 ms or more")

    @property
    def quarter_ms(self) -> int:
        """Time for which a reader does not need a lease, interval of renewals, and maximum difference of clocks, in
        milliseconds.
        """
        return self.ms // 4

    def holds(self, lease: ReadLease, now_ms: int) -> bool:
        """Whether a lease may still be valid by any replica's clock."""
        return lease.until_ms + self.quarter_ms >= now_ms

    def is_left_behind(self, lease: ReadLease, now_ms: int) -> bool:
        """Whether a lease expired so long ago that its reader will not renew it."""
        return lease.until_ms + self.ms < now_ms


@dataclass(frozen=True, slots=True)
class ReadLease:
    """A lease as stored.

    Attributes:
        key: key of the lease.
        number: number of the version that it keeps.
        until_ms: time at which it expires, in milliseconds since 1970 UTC.
    """

    key: str
    number: int
    until_ms: int


def write_lease(store: ObjectStore, model: ModelName, number: int, reader: str, until_ms: int) -> None:
    """Keep a version's objects until ``until_ms``; ``reader`` distinguishes this lease from others.

    Raises:
        InvalidArgument: the number or the reader's name cannot be part of a key.
        WeighbridgeError: as `ObjectStore.put`.
    """
    text = strict_json.encode({"until_ms": until_ms})
    store.put(lease_key(model, number, reader), text, mode="overwrite")


def read_lease(store: ObjectStore, model: ModelName, key: str) -> ReadLease | None:
    """The lease at a key; None if it no longer exists.

    Raises:
        DataLoss: it is malformed.
        InvalidArgument: this cannot be the key of a lease.
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
