"""Export jobs: start, follow, cancel, and execution in the background."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import os
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from weighbridge._core import dtypes
from weighbridge._core.dtypes import DType
from weighbridge._core.layouts import TensorSpec
from weighbridge._core.manifest_text import ManifestText
from weighbridge._core.text.shortening import shown
from weighbridge._formats.hf_folder import write_hf_folder
from weighbridge._formats.safetensors_files import DEFAULT_SHARD_BYTES
from weighbridge._formats.side_files.signature_files import write_signatures
from weighbridge.errors import (
    AlreadyExists,
    InvalidArgument,
    NotFound,
    Unavailable,
    WeighbridgeError,
)
from weighbridge_service.access.peer import LOCAL, Peer
from weighbridge_service.admission.quotas import HostQuota
from weighbridge_service.admission.turns import Turns
from weighbridge_service.exports.folders import (
    check_own,
    free_name,
    inside,
    overlap,
    own_name,
    partial_folder,
    sweep,
)
from weighbridge_service.exports.tensors import tensors_of
from weighbridge_service.runtime.clock import unix_ms
from weighbridge_service.service import Weighbridge
from weighbridge_storage.documents.names import ModelName
from weighbridge_storage.stores.objects import error_for
from weighbridge_storage.threads import ThreadPool
from weighbridge_storage.versions.reading import read_manifest_text

log = logging.getLogger(__name__)

_AT_ONCE = 2
_MOST_UNFINISHED = 100
_KEPT_ENDED = 100
_PACE = 0.2
"""Seconds between two polls of a job that a client follows."""
_THIS_PROCESS = Peer(LOCAL)


class ExportState(enum.Enum):
    """State of an export."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether the state is final."""
        return self not in (ExportState.QUEUED, ExportState.RUNNING)


@dataclass(frozen=True, slots=True)
class ExportJob:
    """Snapshot of an export job.

    Attributes:
        id: id of the job.
        model: ``namespace/name``.
        number: number of the version.
        folder: absolute path of the folder, which exists only once the job is done.
        state: state of the job.
        bytes_done: bytes of weights written so far.
        bytes_total: bytes of weights to write; 0 until the job runs.
        error: error message if the job failed; empty otherwise.
        create_time_ms, end_time_ms: Unix time in milliseconds; the end is 0 until the job has ended.
    """

    id: str
    model: str
    number: int
    folder: str
    state: ExportState
    bytes_done: int = 0
    bytes_total: int = 0
    error: str = ""
    create_time_ms: int = 0
    end_time_ms: int = 0


class _Cancelled(Exception):
    """Interrupts the write of a cancelled export."""


@dataclass
class _Entry:
    job: ExportJob
    host: str
    dtype: DType | None
    max_shard_bytes: int
    unwanted: bool = False


class Exports:
    """The export jobs of one service. Thread-safe.

    Args:
        service: the service that holds the versions.
    """

    def __init__(self, service: Weighbridge) -> None:
        self._service = service
        self._root = service.config.exports_folder.absolute()
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._closed = False
        self._pool = ThreadPool("export", _AT_ONCE, line=Turns())
        sweep(self._root)

    def start(
        self,
        model: str,
        version: str,
        *,
        folder: str | None = None,
        dtype: str | None = None,
        max_shard_bytes: int | None = None,
        peer: Peer = _THIS_PROCESS,
    ) -> ExportJob:
        """Start to write a version as a Hugging Face folder. Exports of different hosts take turns.

        Args:
            model: ``namespace/name``.
            version: a number or a ref; a ref is resolved now.
            folder: path relative to the folder for exports; by default a new folder named after the model and the
                version.
            dtype: dtype to which floating-point tensors are cast, such as ``bf16``; None keeps their dtypes.
            max_shard_bytes: maximum size of a safetensors file, in bytes; None for the default.
            peer: the caller.

        Raises:
            NotFound: the model or version does not exist.
            FailedPrecondition: the version is not complete yet, or has failed.
            InvalidArgument: the folder is not within the folder for exports, is within another export, or has a default
                name for exports of another model; or a value is out of bounds.
            AlreadyExists: the folder exists already, or overlaps one that another export writes.
            ResourceExhausted: too many exports are waiting, in total or for this host, or the system cannot start a
                thread.
            Unavailable: the service is shutting down.
        """
        if self._service.draining:
            raise Unavailable("the service is shutting down", fix="try again when it is back")
        cast = dtypes.parse(dtype) if dtype is not None else None
        if max_shard_bytes is not None and max_shard_bytes <= 0:
            raise InvalidArgument(f"the maximum shard size must be positive, not {max_shard_bytes}")
        with contextlib.closing(self._service.serving.open(model, version)) as opened:
            found = opened.version
            if cast is not None:  # raises here, not in the job, if a tensor cannot be cast
                self._service.serving.cast(model, opened.files.layout.tensors.values(), cast)
        asked = None
        if folder is not None:
            check_own(folder, found.model)
            asked = inside(self._root, folder)
        with self._lock:
            unfinished = [entry for entry in self._entries.values() if not entry.job.state.ended]
            if self._closed:
                raise Unavailable("the service is shutting down", fix="try again when it is back")
            taken = [Path(entry.job.folder) for entry in unfinished]
            target = asked or free_name(self._root, own_name(found.model, found.number), taken)
            if overlap(target, taken) or os.path.lexists(target):
                raise AlreadyExists(f"{target} exists, or is being written", fix="name a different folder")
            job = ExportJob(
                id=uuid.uuid4().hex,
                model=found.model,
                number=found.number,
                folder=str(target),
                state=ExportState.QUEUED,
                create_time_ms=unix_ms(),
            )
            places = HostQuota("exports that wait or run", _MOST_UNFINISHED)
            for each in unfinished:
                places.add(each.host)
            places.take(peer.host)
            entry = _Entry(job, peer.host, cast, max_shard_bytes or DEFAULT_SHARD_BYTES)
            self._pool.submit(partial(self._run, entry), peer)
            self._entries[job.id] = entry
            self._forget_old()
        return job

    def get(self, job_id: str) -> ExportJob:
        """One job. Raises NotFound."""
        with self._lock:
            return self._entry(job_id).job

    @staticmethod
    def unknown(job_id: str) -> NotFound:
        """The error for a job that does not exist."""
        return NotFound(
            f"there is no export {shown(job_id)}",
            fix=f"the last {_KEPT_ENDED} that have ended are remembered",
        )

    def list(self) -> list[ExportJob]:
        """All unfinished jobs and the most recently ended jobs, newest first."""
        with self._lock:
            return [entry.job for entry in reversed(self._entries.values())]

    def cancel(self, job_id: str) -> ExportJob:
        """Cancel a job and remove its files. Does nothing if the job has ended.

        A job that is writing ends a moment later, at its next report of progress.

        Raises:
            NotFound: the job does not exist.
        """
        with self._lock:
            entry = self._entry(job_id)
            entry.unwanted = True
            if entry.job.state is ExportState.QUEUED:
                self._end(entry, ExportState.CANCELLED)
            return entry.job

    async def changes(self, job_id: str, unwanted: Callable[[], bool]) -> AsyncIterator[ExportJob]:
        """Yield a job now and whenever it has changed, at most a few times a second, until it ends.

        Args:
            job_id: id of the job.
            unwanted: returns whether to stop earlier; called at each poll.

        Raises:
            NotFound: the job does not exist, or its record was removed.
        """
        last = self.get(job_id)
        yield last
        while not last.state.ended:
            await asyncio.sleep(_PACE)
            if unwanted():
                return
            job = self.get(job_id)
            if job != last:
                last = job
                yield job

    def close(self) -> None:
        """Cancel all jobs and wait until they have stopped."""
        with self._lock:
            self._closed = True
            unfinished = [job_id for job_id, entry in self._entries.items() if not entry.job.state.ended]
        for job_id in unfinished:
            self.cancel(job_id)
        self._pool.close(None)

    def _entry(self, job_id: str) -> _Entry:
        entry = self._entries.get(job_id)
        if entry is None:
            raise self.unknown(job_id)
        return entry

    def _end(self, entry: _Entry, state: ExportState, error: str = "") -> None:
        entry.job = replace(entry.job, state=state, error=error, end_time_ms=unix_ms())

    def _forget_old(self) -> None:
        ended = [job_id for job_id, entry in self._entries.items() if entry.job.state.ended]
        for job_id in ended[:-_KEPT_ENDED]:
            del self._entries[job_id]

    def _run(self, entry: _Entry) -> None:
        with self._lock:
            if entry.job.state.ended:  # cancelled while it waited
                return
            entry.job = replace(entry.job, state=ExportState.RUNNING)
            job = entry.job
        state, reason = ExportState.DONE, ""
        try:
            self._write(entry, job)
        except _Cancelled:
            state = ExportState.CANCELLED
        except WeighbridgeError as error:
            state, reason = ExportState.FAILED, error.message
        except OSError as error:
            state, reason = ExportState.FAILED, error_for(error, f"writing {job.folder}").message
        except Exception as error:
            log.exception("the export of %s@%d failed", job.model, job.number)
            state, reason = (
                ExportState.FAILED,
                f"the service failed: {type(error).__name__}; see its log",
            )
        with self._lock:
            self._end(entry, state, reason)
        log.info("export of %s@%d to %s: %s %s", job.model, job.number, job.folder, state.value, reason)

    def _write(self, entry: _Entry, job: ExportJob) -> None:
        def on_progress(done: int, total: int) -> None:
            with self._lock:
                entry.job = replace(entry.job, bytes_done=done, bytes_total=total)
            if entry.unwanted:
                raise _Cancelled

        target = Path(job.folder)
        with (
            contextlib.closing(self._service.serving.open(job.model, str(job.number))) as opened,
            partial_folder(self._root, job.id) as unfinished,
        ):
            specs: Iterable[TensorSpec] = opened.files.layout.tensors.values()
            if entry.dtype is not None:
                specs = self._service.serving.cast(job.model, specs, entry.dtype)
            write_hf_folder(
                unfinished,
                list(specs),
                tensors_of(opened),
                self._service.catalog.model_files(job.model, str(job.number)),
                dtype=entry.dtype,
                max_shard_bytes=entry.max_shard_bytes,
                on_progress=on_progress,
            )
            if entry.dtype is None and opened.version.state.stored:
                self._sign(job, unfinished)
            if entry.unwanted:
                raise _Cancelled
            target.parent.mkdir(parents=True, exist_ok=True)
            inside(self._root, str(target.relative_to(self._root)))  # again: a link may have appeared since
            unfinished.rename(target)

    def _sign(self, job: ExportJob, folder: Path) -> None:
        """Write the manifest and the signatures of a version into the folder, if the version has signatures. Exports
        with a cast get neither, because their files differ from the signed files.
        """
        _, signatures = self._service.signatures.of_version(job.model, str(job.number))
        if signatures:
            text = read_manifest_text(self._service.catalog.store, ModelName.parse(job.model), job.number)
            write_signatures(folder, ManifestText.read(text), signatures)
