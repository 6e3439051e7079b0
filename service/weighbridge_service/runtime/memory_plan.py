"""Memory plan of one service: the budget for images, the service's own needs, and the effects on pushes.

All functions are pure: the caller passes readings of the machine and figures of the image pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weighbridge._core.checks import Check
from weighbridge._core.text.sizes import readable_size
from weighbridge_storage.memory.image_books import HeldFor, Holding
from weighbridge_storage.memory.image_decisions import (
    Headroom,
    Later,
    Refuse,
    Space,
    decide,
    more_memory,
    remedy,
)
from weighbridge_storage.memory.image_pool import Waiting
from weighbridge_storage.memory.memory_limits import HOST, UNLIMITED, DiskReading, MemoryReading
from weighbridge_storage.memory.regions import PAGE

PROCESS_BYTES = 1 << 30
"""Memory of a service without images and weights in flight: 0.35 GB when idle, plus the plans of some of the largest
models.
"""
_LEAST_RESERVE = 128 << 20
"""Memory that is kept free even if the process has grown beyond its expected size."""
_ROUND = 1 << 20
_HEADER_BYTES_PER_TENSOR = 256
"""Bytes of a tensor's name, dtype, shape and offsets in a safetensors header."""
_FILE_BYTES = 4 << 30
"""Approximate size of a version's files; each begins on a new page."""
MAKE_ROOM = "make room, or let fewer versions be kept: weighbridge retention MODEL --keep-last N"
"""Remedy for a full disk."""
_LONG_SECONDS = 300.0
"""A reader that holds an otherwise unused version for longer than this probably no longer needs it."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Memory in bytes that a service needs in addition to images.

    Attributes:
        process: memory of the process itself: code, plans, weights in flight.
        cache: memory that the read cache may still take: the unused part of its budget if its folder is in memory, else
            0.
    """

    process: int
    cache: int = 0


def room_for_images(reading: MemoryReading, needs: Needs) -> Headroom:
    """Memory of the machine that is left for images after the service's own needs.

    Args:
        reading: current limits of the machine.
        needs: needs of the service.
    """
    still = max(needs.process - reading.private, _LEAST_RESERVE) + needs.cache
    return Headroom(
        available=max(reading.available - still, 0),
        most=reading.most if reading.most >= UNLIMITED else max(reading.most - needs.process - needs.cache, 0),
    )


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Memory budget of images.

    Attributes:
        nbytes: the budget in bytes.
        chosen: whether an operator has set it; otherwise it was computed from the machine's limits.
        why: origin of the budget, as a clause for messages.
    """

    nbytes: int
    chosen: bool
    why: str


def choose_budget(asked: int | None, reading: MemoryReading, needs: Needs) -> MemoryBudget:
    """The memory budget of a starting service.

    The default is the memory that the control group leaves, minus the service's own needs. If the whole machine is the
    tightest limit, the default is half of that, because other programs also use the machine. A budget from the operator
    is used unchanged, even if it exceeds the machine's memory: limits of containers can be raised while they run, and
    memory is taken only if it is available.

    Args:
        asked: budget from the operator; None if the operator did not set one.
        reading: limits of the machine.
        needs: needs of the service.
    """
    if asked is not None:
        return MemoryBudget(asked, True, "as set by --memory-budget")
    room = room_for_images(reading, needs).available
    shared = reading.tightest.name == HOST
    kept = readable_size(max(needs.process - reading.private, 0) + needs.cache)
    why = (
        f"{'half of ' if shared else ''}what {reading.tightest.name} left at the start, less "
        f"{kept} for the service itself"
    )
    return MemoryBudget((room // 2 if shared else room) // _ROUND * _ROUND, False, why)


def image_bytes(tensor_bytes: int, tensor_count: int) -> int:
    """Bytes of a version's image, slightly overestimated: tensors, headers, and whole pages for each file."""
    files = tensor_bytes // _FILE_BYTES + 1
    return tensor_bytes + tensor_count * _HEADER_BYTES_PER_TENSOR + files * 2 * PAGE


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """State of a service's memory.

    Attributes:
        budget: budget of images.
        needs: needs of the service itself.
        reading: limits of the machine, the process and its control groups.
        memory: space for images in memory.
        disk: space for images in the scratch folder.
        scratch: file system of the scratch folder.
        read_cache: bytes of blocks in the read cache.
        read_cache_budget: maximum of these bytes; 0 if the store is a folder, which does not need a cache.
        holdings: images and their holders.
        waiting: pushes that wait for an image.
    """

    budget: MemoryBudget
    needs: Needs
    reading: MemoryReading
    memory: Space
    disk: Space
    scratch: DiskReading
    read_cache: int
    read_cache_budget: int
    holdings: tuple[Holding, ...]
    waiting: tuple[Waiting, ...]


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A registered model.

    Attributes:
        name: ``namespace/name``.
        nbytes: bytes of a version's image.
    """

    name: str
    nbytes: int


def check_limits(reading: MemoryReading, needs: Needs) -> Check:
    """Check that the machine leaves enough memory for the service's own needs."""
    limit = reading.tightest
    what = (
        f"of the known limits, {limit.name} leaves the least: {readable_size(limit.used)} of "
        f"{readable_size(limit.limit)} are in use, "
        f"{readable_size(limit.available)} are left"
    )
    still = max(needs.process - reading.private, 0) + needs.cache
    if limit.available < still:
        return Check.warn(
            "memory limits",
            f"{what}, and the service may come to need {readable_size(still)} of its own",
            "raise that limit, or stop what else uses it: there is no memory for images, and the kernel ends a process "
            "that goes over a limit",
        )
    return Check.ok("memory limits", what)


def check_budget(budget: MemoryBudget, memory: Space) -> Check:
    """Check that the memory for the budget is available."""
    what = f"{readable_size(budget.nbytes)}, {budget.why}"
    if budget.nbytes == 0:
        return Check.warn(
            "memory budget",
            f"{what}: every version is assembled on disk",
            "give the service more memory, or set --memory-budget",
        )
    if budget.nbytes > memory.most:
        return Check.warn(
            "memory budget",
            (
                f"{what}; the machine could give images {readable_size(memory.most)} at most, and "
                "what is over that goes to disk or waits"
            ),
            f"serve with --memory-budget {memory.most >> 20}MiB or auto, or raise the limit",
        )
    unused = budget.nbytes - memory.regions
    if unused > memory.available:
        return Check.warn(
            "memory budget",
            f"{what}; {readable_size(unused)} of it are not taken yet, and the machine has only "
            f"{readable_size(memory.available)} left: others have taken memory",
            "stop what else uses it, or serve with a smaller --memory-budget",
        )
    return Check.ok("memory budget", f"{what}; images hold {readable_size(memory.in_use)}")


def check_scratch(scratch: DiskReading, disk: Space) -> Check:
    """Check that versions can go to disk when they do not fit into memory."""
    what = str(scratch)
    if scratch.in_memory:
        return Check.warn(
            "scratch folder",
            f"{what}, and is in memory: files there use memory as well",
            "name a --scratch folder on a disk",
        )
    if disk.budget == 0:
        return Check.ok(
            "scratch folder",
            f"{what}; versions do not go there (--spill-budget off), they wait for memory",
        )
    return Check.ok("scratch folder", what)


def check_read_cache(scratch: DiskReading, used: int, budget: int) -> Check:
    """Check that the disk has space for the read cache to grow to its budget."""
    missing = budget - used
    what = f"{readable_size(used)} of {readable_size(budget)} are in use"
    if missing > scratch.available:
        return Check.warn(
            "read cache",
            f"{what}, and {scratch.folder} has {readable_size(scratch.available)} left for it",
            f"serve with --read-cache {(used + scratch.available) >> 20}MiB, or name a larger --scratch",
        )
    return Check.ok("read cache", what)


def check_images(waiting: Sequence[Waiting], holdings: Sequence[Holding]) -> Check:
    """Check that no push waits for memory, and that readers do not hold unneeded images for long."""
    held = "; ".join(map(str, holdings)) or "nothing"
    if waiting:
        return Check.warn(
            "images",
            f"{'; '.join(map(str, waiting))}. Held now: {held}",
            "wait until a version is done, or abort one; the check of each model reports what a push needs",
        )
    late = [holding for holding in holdings if _seconds_unneeded(holding) > _LONG_SECONDS]
    if late:
        return Check.warn(
            "images",
            "; ".join(map(str, late)),
            "release tensors that were pulled without a copy once a newer version is loaded",
        )
    return Check.ok("images", f"no push waits; held now: {held}")


def _seconds_unneeded(holding: Holding) -> float:
    if holding.use is HeldFor.READERS:
        return holding.reading_seconds
    return holding.seconds if holding.use is HeldFor.MAPPED else 0.0


def check_model(model: ModelSize, report: MemoryReport) -> Check:
    """Check that two pushes of a model fit into memory. The message contains the size of a version, and the place where
    a push would now put it.
    """
    memory, disk, nbytes = report.memory, report.disk, model.nbytes
    others = sum(h.nbytes for h in report.holdings if h.in_memory and h.owner.model != model.name)
    room = max(memory.ceiling - others, 0)
    name, needs = f"push of {model.name}", f"a version takes {readable_size(nbytes)}"
    if nbytes > max(memory.ceiling, disk.ceiling):
        return Check.fail(
            name,
            f"{needs}: more than images can have, {readable_size(memory.ceiling)} of memory and "
            f"{readable_size(disk.ceiling)} of disk",
            remedy(nbytes, memory, disk),
        )
    besides = f" (and {readable_size(others)} that other models hold)" if others else ""
    what = (
        f"{needs}, and images can have {readable_size(room)} of memory{besides}: "
        f"{_how_many(nbytes, room)}. {_now(nbytes, report)}"
    )
    if 2 * nbytes > room:
        return Check.warn(name, what, more_memory(2 * nbytes + others, memory))
    return Check.ok(name, what)


def _how_many(nbytes: int, room: int) -> str:
    """Number of pushes of a model that fit into memory next to the live version, as a clause."""
    fitting = room // nbytes
    if fitting == 0:
        return "not even one fits there"
    if fitting == 1:
        return "one fits there, and none beside it once it is live"
    return f"beside the live version fit {'two pushes at a time' if fitting > 2 else 'one push, and no second one'}"


def _now(nbytes: int, report: MemoryReport) -> str:
    found = decide(nbytes, report.memory, report.disk)
    if report.waiting or isinstance(found, Later | Refuse):
        return "A push now would wait"
    return f"A push now would be assembled {'in memory' if found.in_memory else 'on disk'}"


def check_store_disk(store: DiskReading, largest: int) -> Check:
    """Check that a version of the largest model could become durable in a store that is a folder.

    Args:
        store: file system of the store's folder.
        largest: bytes of a version of the largest model; 0 if the store has no models.
    """
    if store.available < largest:
        return Check.fail(
            "store disk",
            f"{store}, and a version of the largest model takes {readable_size(largest)}: it could not become durable",
            MAKE_ROOM,
        )
    return Check.ok("store disk", str(store))


def check_memory(report: MemoryReport) -> list[Check]:
    """All checks of a service's memory that are independent of a model; `check_model` checks one model."""
    checks = [
        check_limits(report.reading, report.needs),
        check_budget(report.budget, report.memory),
        check_scratch(report.scratch, report.disk),
    ]
    if report.read_cache_budget:
        checks.append(check_read_cache(report.scratch, report.read_cache, report.read_cache_budget))
    return [*checks, check_images(report.waiting, report.holdings)]
