"""Checks of ``weighbridge doctor``, for a running service, and for a machine and a store before a service is
started.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from weighbridge._core.checks import Check
from weighbridge.errors import WeighbridgeError
from weighbridge_service.health.checks import StoreChecks, store_checks_of
from weighbridge_service.runtime.config import ServiceConfig
from weighbridge_service.runtime.memory_plan import (
    PROCESS_BYTES,
    ModelSize,
    Needs,
    check_budget,
    check_limits,
    check_memory,
    check_model,
    check_scratch,
    check_store_disk,
    choose_budget,
    image_bytes,
    room_for_images,
)
from weighbridge_storage.memory.image_decisions import NO_SPACE, Headroom, Space
from weighbridge_storage.memory.memory_limits import UNLIMITED, DiskReading, read_disk, read_memory
from weighbridge_storage.opening import is_remote, open_store, shown

if TYPE_CHECKING:
    from weighbridge_service.service import Weighbridge

_STORE = "store"
_PAGE = 100
_CONDITIONS_SECONDS = 10.0
"""Seconds for which the check of conditional writes is cached."""


class Examiner:
    """Checks of a running service. The check of conditional writes needs about forty writes, so its finding is cached:
    callers who may only observe must not be able to cause any number of writes. Only one thread may use it at a time.

    Args:
        service: the service.
        clock: monotonic clock, in seconds.
    """

    def __init__(self, service: Weighbridge, clock: Callable[[], float] = time.monotonic) -> None:
        self._service = service
        self._clock = clock
        self._conditions: Check | None = None
        self._asked_s = 0.0

    def checks(self) -> list[Check]:
        """Current findings."""
        service = self._service
        report = service.memory()
        checks = check_memory(report)
        store = None if is_remote(service.config.store) else read_disk(service.config.store)
        largest = 0
        try:
            for model in _models(service):
                largest = max(largest, model.nbytes)
                checks.append(check_model(model, report))
        except WeighbridgeError as error:
            checks.append(
                Check.fail(
                    "models",
                    f"they cannot be listed: {error.message}",
                    error.fix or "see the service's log",
                )
            )
        if store is not None:
            checks.append(check_store_disk(store, largest))
        with suppress(
            WeighbridgeError
        ):  # a store that does not respond or does not accept writes is a finding of the service's health
            checks.append(self._conditions_kept())
        return checks

    def _conditions_kept(self) -> Check:
        if self._conditions is None or self._clock() - self._asked_s >= _CONDITIONS_SECONDS:
            self._conditions = store_checks_of(self._service).conditions()
            self._asked_s = self._clock()
        return self._conditions


def examine_store(location: str | Path, grace_seconds: float) -> list[Check]:
    """Check a store before a service is started on it. The checks remove the objects that they write.

    Args:
        location: as for ``serve --store``.
        grace_seconds: as for ``serve --grace``; clocks must agree within a quarter of it.
    """
    where = shown(location)
    try:
        store = open_store(location)
    except WeighbridgeError as error:
        return [_unusable(where, error)]
    try:
        checks = StoreChecks(store, f"doctor-{uuid.uuid4().hex}", round(grace_seconds * 1000) // 4)
        return list(_looked_at(checks, where))
    finally:
        store.close()


def _looked_at(checks: StoreChecks, where: str) -> Iterator[Check]:
    try:
        for check in (checks.reachable, checks.writable, checks.conditions, checks.clock):
            yield check()
    except WeighbridgeError as error:
        yield _unusable(where, error)


def _unusable(location: str, error: WeighbridgeError) -> Check:
    return Check.fail(
        _STORE,
        f"{location} cannot be used: {error.message}",
        error.fix or "check that it exists, and that these credentials may read and write",
    )


def _models(service: Weighbridge) -> Iterator[ModelSize]:
    """Sizes of all registered models."""
    after = ""
    while page := service.catalog.list_models(after, _PAGE):
        for model in page:
            yield ModelSize(model.name, image_bytes(model.tensor_bytes, model.tensor_count))
        after = page[-1].name


def examine_machine(config: ServiceConfig, root: Path = Path("/")) -> list[Check]:
    """Check the memory and disk of this machine before a service with these settings is started.

    Args:
        config: the settings.
        root: folder used as ``/`` for the kernel's files.
    """
    reading = read_memory(root)
    scratch = read_disk(_nearest(config.scratch_folder), root)
    needs = Needs(
        PROCESS_BYTES + config.byte_budget,
        config.read_cache if scratch.in_memory and is_remote(config.store) else 0,
    )
    budget = choose_budget(config.memory_budget, reading, needs)
    room = room_for_images(reading, needs)
    return [
        check_limits(reading, needs),
        check_budget(budget, _empty(budget.nbytes, room)),
        check_scratch(scratch, _spill_space(config, scratch)),
    ]


def _spill_space(config: ServiceConfig, scratch: DiskReading) -> Space:
    if config.spill_budget == 0:
        return NO_SPACE
    budget = UNLIMITED if config.spill_budget is None else config.spill_budget
    return _empty(budget, Headroom(scratch.available, scratch.available))


def _empty(budget: int, room: Headroom) -> Space:
    return Space(budget, 0, (), room.available, room.most)


def _nearest(folder: Path) -> Path:
    """A folder, or its nearest existing parent."""
    folder = folder.absolute()
    return next(found for found in (folder, *folder.parents) if found.is_dir())
