"""Named checks of a service: conditions for sending new work to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from weighbridge._core.checks import Check, CheckStatus
from weighbridge._core.resources import Version
from weighbridge._core.text.counts import counted
from weighbridge._core.text.durations import readable_duration
from weighbridge._core.text.sizes import readable_size
from weighbridge.errors import FailedPrecondition, NotFound, WeighbridgeError
from weighbridge_service.health.monitor import NamedCheck
from weighbridge_service.runtime.clock import unix_ms
from weighbridge_service.runtime.memory_plan import MAKE_ROOM, check_budget, check_images, check_limits
from weighbridge_service.service import Weighbridge
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.memory.memory_limits import DiskReading, read_disk
from weighbridge_storage.opening import is_remote
from weighbridge_storage.stores.objects import ObjectStore
from weighbridge_storage.stores.probe import probe

STORE_REACHABLE = "store-reachable"
STORE_WRITABLE = "store-writable"
STORE_CONDITIONS = "store-conditions"
CLOCK = "clock"
DISK_ROOM = "disk-room"
MEMORY_ROOM = "memory-room"
VERSIONS_DURABLE = "versions-durable"
MODELS_READABLE = "models-readable"

_LEAST_DISK = 256 << 20
"""Free bytes of a disk below which it counts as full."""
_NAMED = 5
"""Maximum number of versions or models that a finding names."""
_MOST_MODELS = 200
"""Maximum number of models whose heads are read for one finding."""
_LITTLE_DISK = 0.05
"""Free part of a disk below which it counts as nearly full."""


class StoreChecks:
    """Checks of one store. They remove the objects that they write.

    Args:
        store: the store.
        replica: identifies this process among those that use the same store; a component of a key.
        most_offset_ms: maximum difference between the clocks of replicas and of the store. With a larger difference,
            versions could be deleted while they are read, or pushes aborted while their trainers are sending.
    """

    def __init__(self, store: ObjectStore, replica: str, most_offset_ms: int) -> None:
        self._store = store
        self._prefix = f"probe/{replica}"
        self._most_offset_ms = most_offset_ms

    def reachable(self) -> Check:
        """Whether the store responds."""
        with suppress(NotFound):
            self._store.size(f"{self._prefix}-none")
        return Check.ok(STORE_REACHABLE, "it answers")

    def writable(self) -> Check:
        """Whether the store accepts writes."""
        key = f"{self._prefix}-written"
        self._store.put(key, b"", mode="overwrite")
        self._store.delete(key)
        return Check.ok(STORE_WRITABLE, "it takes objects")

    def conditions(self) -> Check:
        """Whether the store honors conditional writes, including those of concurrent writers. Not run in the
        background, because it needs about forty writes.
        """
        try:
            probe(self._store)
        except FailedPrecondition as error:
            return Check.fail(STORE_CONDITIONS, error.message, error.fix)
        return Check.ok(STORE_CONDITIONS, "it honors conditional writes, also from concurrent writers")

    def clock(self) -> Check:
        """Whether the clocks of this process and of the store agree."""
        key = f"{self._prefix}-dated"
        begun = unix_ms()
        self._store.put(key, b"", mode="overwrite")
        ended = unix_ms()
        modified = self._store.modified_ms(key)
        self._store.delete(key)
        return check_clock((begun, ended), modified, self._most_offset_ms)


def check_clock(written_ms: tuple[int, int], modified_ms: int, most_ms: int) -> Check:
    """Whether two clocks agree.

    Args:
        written_ms: beginning and end of the write of an object by this process's clock, in milliseconds since 1970 UTC.
        modified_ms: time of the write by the store's clock; some stores round down to seconds.
        most_ms: maximum difference.
    """
    first, last = written_ms
    offset = max(first - (modified_ms + 999), modified_ms - last, 0)
    what = (
        f"it differs from the store's clock by {readable_duration(offset / 1000)}; at most "
        f"{readable_duration(most_ms / 1000)} is allowed"
    )
    fix = "set the clocks of all machines by NTP"
    if offset > most_ms:
        return Check.fail(CLOCK, what, fix)
    if offset > most_ms // 4:
        return Check.warn(CLOCK, what, fix)
    return Check.ok(CLOCK, what)


def check_disk(disk: DiskReading) -> Check:
    """Whether a disk has enough free space."""
    if disk.available < _LEAST_DISK:
        what = f"{disk}: less than the {readable_size(_LEAST_DISK)} that new work needs"
        return Check.fail(DISK_ROOM, what, MAKE_ROOM)
    if disk.available < disk.size * _LITTLE_DISK:
        what = f"{disk}: less than {_LITTLE_DISK:.0%}; below {readable_size(_LEAST_DISK)} no new work is taken"
        return Check.warn(DISK_ROOM, what, MAKE_ROOM)
    return Check.ok(DISK_ROOM, str(disk))


def check_durable(failing: Sequence[Version]) -> Check:
    """Whether versions that are visible can be made durable.

    Args:
        failing: the versions whose publication has failed so far.
    """
    if not failing:
        return Check.ok(VERSIONS_DURABLE, "no version waits for the store to accept it")
    return Check.warn(
        VERSIONS_DURABLE,
        "; ".join(f"{version}: {version.error}" for version in failing[:_NAMED]),
        "check why the object store does not accept it: the service retries until it does, "
        "holds the version in memory alone meanwhile, and "
        "gives it up if a newer version needs its memory or a caller aborts it",
    )


def check_models(examined: Iterable[tuple[ModelName, WeighbridgeError | None]]) -> Check:
    """Whether this release can read the heads of the store's models.

    Args:
        examined: models, each with the error of reading its head; None if it can be read.
    """
    count, unreadable = 0, []
    for name, error in examined:
        count += 1
        if error is not None:
            unreadable.append((name, error))
    if not unreadable:
        return Check.ok(MODELS_READABLE, "the heads of the store's models can be read")
    return Check(
        MODELS_READABLE,
        CheckStatus.FAIL if len(unreadable) == count else CheckStatus.WARN,
        f"{len(unreadable)} of {counted(count, 'model')} cannot be read: "
        + "; ".join(error.message for _, error in unreadable[:_NAMED]),
        unreadable[0][1].fix,
    )


def worst(checks: list[Check]) -> Check:
    """The first check with the worst status."""
    order = list(CheckStatus)
    return max(checks, key=lambda check: order.index(check.status))


def store_checks_of(service: Weighbridge) -> StoreChecks:
    """The checks of a service's store."""
    config = service.config
    most_offset_ms = min(config.grace.quarter_ms, round(config.open_lease * 1000) // 2)
    return StoreChecks(service.catalog.store, service.intake.home.boot, most_offset_ms)


def checks_of(service: Weighbridge) -> list[NamedCheck]:
    """All checks of a service."""
    config = service.config
    store = store_checks_of(service)
    folders = {config.scratch_folder} if is_remote(config.store) else {config.scratch_folder, Path(config.store)}

    def disk_room() -> Check:
        return worst([check_disk(read_disk(folder)) for folder in folders])

    def memory_room() -> Check:
        report = service.memory()
        return worst(
            [
                check_limits(report.reading, report.needs),
                check_budget(report.budget, report.memory),
                check_images(report.waiting, report.holdings),
            ]
        )

    def models_readable() -> Check:
        return check_models(islice(service.catalog.heads.examined(), _MOST_MODELS))

    return [
        NamedCheck(STORE_REACHABLE, store.reachable, every=5.0, patience=10.0),
        NamedCheck(STORE_WRITABLE, store.writable, every=60.0, patience=15.0),
        NamedCheck(CLOCK, store.clock, every=300.0, patience=15.0),
        NamedCheck(DISK_ROOM, disk_room, every=10.0, patience=10.0),
        NamedCheck(MEMORY_ROOM, memory_room, every=5.0, patience=10.0),
        NamedCheck(MODELS_READABLE, models_readable, every=600.0, patience=60.0),
        NamedCheck(
            VERSIONS_DURABLE,
            lambda: check_durable(service.catalog.snapshots.not_durable),
            every=5.0,
            patience=10.0,
        ),
    ]
