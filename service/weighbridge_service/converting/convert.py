"""Conversion of a folder from beginning to end: plan, convert, and rename the result.

An identical call resumes an interrupted conversion and produces the same bytes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from weighbridge._core.json_values import JsonValue
from weighbridge.errors import AlreadyExists, DataLoss, InvalidArgument, ResourceExhausted
from weighbridge_service.converting.conversions import (
    Conversion,
    ConvertOptions,
    kind_of_folder,
    plan_conversion,
    state_of,
)
from weighbridge_service.converting.named_model import check_twins
from weighbridge_service.converting.units import UNIT_BYTES, Range, Units
from weighbridge_service.converting.worker import Job
from weighbridge_service.converting.workers import run_units
from weighbridge_service.converting.working_folder import LOCK_SECONDS, WorkingFolder

DEFAULT_MEMORY = 2 << 30
_MOST_WORKERS = 4
_WORKER_BYTES = 48 << 20
"""Memory of a worker without its buffer: the interpreter and numpy."""
_PLAN_BYTES = 64 << 20
"""Memory that this process may still need after planning."""
_LEAST_GATHER, _MOST_GATHER = 1 << 20, 8 << 20


@dataclass(frozen=True)
class ConvertReport(JsonValue):
    """Report of a conversion.

    Attributes:
        source: folder that was read.
        target: folder that was written.
        to: kind of the target, ``torch_dist`` or ``hugging_face``.
        tensors: number of tensors in the target.
        bytes: total size of the target's files.
        files: names of the target's files.
        seconds: duration of this run.
        resumed_bytes: bytes of tensors that an earlier run had already converted.
        workers: number of worker processes.
        left_out: number of entries of the source that were not converted, by kind.
    """

    source: str
    target: str
    to: str
    tensors: int
    bytes: int
    files: tuple[str, ...]
    seconds: float
    resumed_bytes: int
    workers: int
    left_out: dict[str, int]


def convert_folder(
    source: Path,
    target: Path,
    options: ConvertOptions | None = None,
    *,
    workers: int | None = None,
    memory_budget: int = DEFAULT_MEMORY,
    restart: bool = False,
    unit_bytes: int = UNIT_BYTES,
    lock_seconds: float = LOCK_SECONDS,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
    on_resume: Callable[[int, int], None] = lambda _done, _total: None,
) -> ConvertReport:
    """Convert a Hugging Face folder to a torch_dist checkpoint, or any checkpoint to a Hugging Face folder.

    The conversion needs memory for the plan and for one buffer per worker, independent of the size of the model. The
    target appears when it is complete; until then its files are in ``<target>.converting``, from which an identical
    call resumes after an interruption.

    Args:
        source: the source folder; its kind is detected.
        target: a new folder, or an empty one.
        options: options of the conversion.
        workers: number of worker processes; by default one per CPU, at most four.
        memory_budget: maximum memory of all processes together, in bytes, without the page cache.
        restart: whether to discard the files of an interrupted, different conversion to the target.
        unit_bytes: approximate number of bytes between two entries of the journal. A resuming run must use the same
            number.
        lock_seconds: seconds to wait for another process that converts to the same target.
        on_progress: called with the number of converted bytes of tensors, and their total.
        on_resume: called once with the same numbers if an earlier run is resumed.

    Raises:
        NotFound: the source does not contain a checkpoint, or the checkpoint does not have a ``config.json``.
        InvalidArgument: an option is invalid, or the tensors are not those that ``config.json`` describes.
        LayoutError: a tensor is missing, unknown, duplicated or of the wrong dtype. The error names these tensors.
        DataLoss: a file of the source is damaged, or has changed while it was read.
        AlreadyExists: the target exists, or another process is converting to it.
        FailedPrecondition: a different conversion to the target was interrupted.
        ResourceExhausted: the memory budget is too small, or the disk is full.
        Unavailable: a worker died. An identical call resumes the conversion.
    """
    started = time.monotonic()
    target = target.resolve()
    if not target.name:
        raise InvalidArgument(f"{target} cannot be created as a new folder", fix="name a new folder")
    wanted = workers or min(_MOST_WORKERS, len(os.sched_getaffinity(0)))
    if wanted < 1:
        raise InvalidArgument(f"a conversion needs at least one worker, not {wanted}")
    if _is_occupied(target) and not WorkingFolder.left_behind(target):
        raise _exists(target)  # before planning, which takes a while
    kind_of_folder(source)
    conversion = plan_conversion(source, options or ConvertOptions())
    count, gather_bytes = _share(memory_budget, wanted)
    units = Units(conversion, gather_bytes, unit_bytes)
    folder = WorkingFolder(target, lock_seconds)
    try:
        if _is_occupied(target):
            # either by the previous run, which was stopped after the rename, or by another process in the meantime
            finished = folder.was_finished(units.identity()) and folder.is_whole(target, conversion)
            if finished or not folder.has_files():
                folder.remove()
            if not finished:
                raise _exists(target, folder.path)
            resumed = conversion.plan.target.nbytes
        else:
            resumed = _work(conversion, units, folder, count, restart, on_progress, on_resume)
    finally:
        folder.close()
    return ConvertReport(
        str(source),
        str(target),
        "torch_dist" if conversion.kind == "hugging_face" else "hugging_face",
        len(conversion.plan.target.tensors),
        conversion.nbytes,
        (*(file.name for file in conversion.files), *conversion.side_files),
        round(time.monotonic() - started, 3),
        resumed,
        count,
        dict(conversion.left_out),
    )


def _is_occupied(target: Path) -> bool:
    return target.exists() and (not target.is_dir() or any(target.iterdir()))


def _exists(target: Path, left_over: Path | None = None) -> AlreadyExists:
    text = f"{target} exists and is not an empty folder"
    if left_over is not None and left_over.exists():
        text += f"; {left_over} is left of an interrupted conversion, and can be removed"
    return AlreadyExists(text, fix="name a new folder")


def _work(
    conversion: Conversion,
    units: Units,
    folder: WorkingFolder,
    workers: int,
    restart: bool,
    on_progress: Callable[[int, int], None],
    on_resume: Callable[[int, int], None],
) -> int:
    """Convert the remaining units. Returns the number of bytes that earlier runs had converted."""
    check_twins(conversion.source, conversion.twins)
    done = folder.begin(conversion, units.identity(), restart=restart)
    todo = [covered for covered in units.ranges if covered.number not in done]
    total = sum(covered.nbytes for covered in units.ranges)
    resumed = total - sum(covered.nbytes for covered in todo)
    if done:
        on_resume(resumed, total)
    progress = _Progress(resumed, total, on_progress)

    def finished(covered: Range) -> None:
        with progress.lock:
            folder.add(covered.number)

    job = Job(units.source, str(folder.files), units.gather_bytes)
    if todo:
        run_units(units, todo, job, min(workers, len(todo)), folder.lock, progress.add, finished)
    if state_of(conversion.source, conversion.read) != dict(conversion.read):
        raise DataLoss(
            f"{conversion.source} has changed while it was converted",
            fix="run again with --restart when nothing writes to it any longer",
        )
    folder.finish(conversion)
    return resumed


class _Progress:
    """Sum of the bytes that several threads report."""

    def __init__(self, done: int, total: int, report: Callable[[int, int], None]) -> None:
        self._done = done
        self._total = total
        self._report = report
        self.lock = threading.Lock()
        report(done, total)

    def add(self, nbytes: int) -> None:
        with self.lock:
            self._done += nbytes
            self._report(self._done, self._total)


def _share(budget: int, workers: int) -> tuple[int, int]:
    """Number of workers that fit into the budget, and bytes of the buffer of each.

    Raises:
        ResourceExhausted: the budget is too small for one worker.
    """
    left = budget - _own_bytes() - _PLAN_BYTES
    each = _WORKER_BYTES + _LEAST_GATHER
    if left < each:
        least = budget - left + each
        raise ResourceExhausted(
            f"{budget} bytes of memory are too few: this conversion needs {least}",
            fix=f"allow at least --memory-budget {-(-least // (1 << 20))}MiB",
        )
    count = min(workers, left // each)
    return count, min(_MOST_GATHER, left // count - _WORKER_BYTES)


def _own_bytes() -> int:
    """Memory of this process that is not backed by files."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        fields = dict(line.split(":", 1) for line in status)
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))
