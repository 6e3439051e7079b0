"""Uploads to S3, in one request or in parts. A failed upload does not leave anything behind.

Data that fits into one part is sent in one request. All other data is sent as a multipart upload: the caller's thread
fills parts, a pool sends them, and a last request, which contains the condition, creates the object. A failed upload is
aborted. Uploads remain only if their process died, or if the last request may still be carried out.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

from weighbridge.errors import DeadlineExceeded, Unavailable
from weighbridge_storage.stores.objects import Buffer, IfMatch, PutMode
from weighbridge_storage.stores.outcomes import Outcome, outcome, refused, unknown
from weighbridge_storage.stores.s3.client import Body, ObjectState, S3Client, UploadedPart, pause
from weighbridge_storage.stores.s3.errors import (
    S3_ERRORS,
    code_of,
    is_missing,
    is_unanswered,
    s3_error,
    status_of,
    translated,
    was_retried,
)
from weighbridge_storage.stores.s3.parts import (
    HeldPart,
    PartReader,
    PartsBudget,
    Sending,
    part_size,
    size_of,
)
from weighbridge_storage.stores.s3.settings import S3Settings

log = logging.getLogger(__name__)

_ATTEMPTS = 5
"""Maximum attempts of a write that meets a concurrent write, or of a copy whose source changes."""
_COPIED_PART = 256 << 20


@dataclass(frozen=True, slots=True)
class _Upload:
    name: str
    id: str
    write_id: str


class Uploads:
    """Writes objects by their full names. Thread-safe.

    Args:
        client: makes the requests.
        settings: sizes and limits.
        pool: sends parts.
    """

    def __init__(self, client: S3Client, settings: S3Settings, pool: Executor) -> None:
        self._client = client
        self._settings = settings
        self._pool = pool
        self._budget = PartsBudget(settings.memory_bytes)

    def put(self, name: str, data: Buffer | Iterable[Buffer], mode: PutMode, what: str) -> str:
        """Write an object. Returns its etag.

        Args:
            name: name of the object.
            data: as `ObjectStore.put` takes it.
            mode: the condition.
            what: the operation, for messages.

        Raises:
            WeighbridgeError: as `ObjectStore.put`.
        """
        size = size_of(data)
        budget = self._budget
        if size is not None and size <= self._settings.part_bytes:
            # A small write, which other replicas may wait for, does not queue behind the parts of large writes.
            budget = PartsBudget(size)
        reader = PartReader(data, self._settings.part_bytes, budget)
        first = reader.next()
        try:
            if first.is_last:
                return self._put_whole(name, first.body, mode, what)
            return self._put_parts(name, first, reader, mode, what)
        finally:
            first.release()

    def copy(self, source: str, target: str, what: str) -> None:
        """Copy an object on the server, as `ObjectStore.copy`. ``what`` is the operation, for messages."""
        for attempt in range(_ATTEMPTS):
            with translated(what):
                found = self._client.head(source)
            if found.size <= self._settings.single_copy_bytes:
                self._copy_whole(source, target, what)
                return
            if self._copy_parts(source, found.etag, found.size, target, what):
                return
            pause(attempt)
        raise Unavailable(f"{what} failed: the source kept changing", fix="try again")

    def discard_unfinished(self, prefix: str, older_than_s: float, chosen: Callable[[str], bool]) -> int:
        """As `ObjectStore.discard_unfinished`, for full names."""
        with translated("listing unfinished uploads"):
            found = [
                upload
                for upload in self._client.uploads(prefix)
                if upload.age_s >= older_than_s and chosen(upload.name)
            ]
        removed = 0
        for upload in found:
            try:
                self._client.abort(upload.name, upload.upload)
                removed += 1
            except S3_ERRORS as error:
                if code_of(error) != "NoSuchUpload":
                    raise s3_error(error, f"aborting an upload of {upload.name}") from error
        return removed

    def _put_whole(self, name: str, body: Body, mode: PutMode, what: str) -> str:
        write_id = uuid.uuid4().hex
        return self._made(name, write_id, mode, what, partial(self._client.put, name, body, write_id, mode))

    def _put_parts(self, name: str, first: HeldPart, reader: PartReader, mode: PutMode, what: str) -> str:
        with self._begun(name, what, checksums=True) as upload:
            with translated(what), Sending[UploadedPart](self._pool) as sending:
                number, part = 1, first
                while part.body:
                    send = partial(self._client.upload_part, name, upload.id, number, part.body)
                    sending.submit(send, part.release)
                    part = reader.next()
                    number += 1
                part.release()
                parts = sending.results()
            return self._complete(upload, parts, mode, what)

    def _copy_whole(self, source: str, target: str, what: str) -> None:
        write_id = uuid.uuid4().hex
        self._made(target, write_id, "overwrite", what, partial(self._client.copy, source, target, write_id))

    def _copy_parts(self, source: str, etag: str, size: int, target: str, what: str) -> bool:
        """Copy an object in parts. Returns whether it was copied; if not, the source has changed."""
        step = part_size(0, size, min(_COPIED_PART, self._settings.single_copy_bytes))
        with self._begun(target, what, checksums=False) as upload:
            try:
                with Sending[UploadedPart](self._pool) as sending:
                    for number, start in enumerate(range(0, size, step), 1):
                        length = min(step, size - start)
                        sending.submit(
                            partial(self._client.copy_part, target, upload.id, number, source, etag, start, length)
                        )
                    parts = sending.results()
            except S3_ERRORS as error:
                if status_of(error) != 412:
                    raise s3_error(error, what) from error
                self._abort(upload)
                return False
            self._complete(upload, parts, "overwrite", what)
        return True

    @contextmanager
    def _begun(self, name: str, what: str, *, checksums: bool) -> Iterator[_Upload]:
        """Begin an upload, and abort it if the block fails, unless its last request may still be carried out."""
        write_id = uuid.uuid4().hex
        with translated(what):
            upload = _Upload(name, self._client.begin_upload(name, write_id, checksums=checksums), write_id)
        try:
            yield upload
        except DeadlineExceeded:
            # Some servers delete the parts of the finished object if both requests coincide.
            log.warning("%s: its upload is not aborted, as it may still complete", what)
            raise
        except BaseException:
            self._abort(upload)
            raise

    def _complete(self, upload: _Upload, parts: Sequence[UploadedPart], mode: PutMode, what: str) -> str:
        send = partial(self._client.complete, upload.name, upload.id, parts, mode)
        return self._made(upload.name, upload.write_id, mode, what, send, attempts=1)

    def _made(
        self,
        name: str,
        write_id: str,
        mode: PutMode,
        what: str,
        send: Callable[[], str],
        attempts: int = _ATTEMPTS,
    ) -> str:
        """The etag of an object that a request creates, even if its response is lost.

        Args:
            name: name of the object.
            write_id: id of the write.
            mode: the condition.
            what: the operation, for messages.
            send: sends the request; returns the etag.
            attempts: maximum number of attempts while a concurrent write is in progress.

        Raises:
            Conflict: the condition does not hold; nothing was written.
            DeadlineExceeded: it is unknown whether it was written.
            WeighbridgeError: as `s3_error`; nothing was written.
        """
        for attempt in range(attempts):
            if attempt:
                pause(attempt - 1)
            try:
                return send()
            except S3_ERRORS as error:
                try:
                    found = self._client.head(name)
                except S3_ERRORS as second:
                    if not is_missing(second):
                        if decide(error, None, write_id, mode) == "failed":
                            raise s3_error(error, what) from error
                        raise unknown(what, s3_error(second, "reading back").message) from second
                    found = None
                match decide(error, found, write_id, mode):
                    case "written" if found is not None:
                        return found.etag
                    case "unknown":
                        raise unknown(what, s3_error(error, "the request").message) from error
                    case "conflict":
                        raise refused(what, mode, there=found is not None) from error
                    case "failed":
                        raise s3_error(error, what) from error
        raise Unavailable(f"{what} failed: another write was under way; nothing was written", fix="try again")

    def _abort(self, upload: _Upload) -> None:
        try:
            self._client.abort(upload.name, upload.id)
        except S3_ERRORS as error:
            if code_of(error) != "NoSuchUpload":
                log.warning(
                    "an upload of %s could not be aborted: %s",
                    upload.name,
                    s3_error(error, "aborting it").message,
                )


def decide(error: Exception, found: ObjectState | None, write_id: str, mode: PutMode) -> Outcome | Literal["failed"]:
    """Outcome of a write that ended in an error of boto3, according to `outcome`.

    Args:
        error: the error.
        found: the object as read afterwards; None if it did not exist.
        write_id: id of the write.
        mode: its condition.

    Returns:
        As `outcome`, where ``nothing`` means that a concurrent write was in progress; or ``failed``: nothing was
        written, and the error is the reason.
    """
    # if the object does not exist, AWS responds to If-Match with 404, other servers with 412
    refusal = status_of(error) in (409, 412) or (is_missing(error) and isinstance(mode, IfMatch))
    found_outcome = outcome(
        landed=found is not None and found.write_id == write_id,
        doubtful=is_unanswered(error) or was_retried(error),
        moved=refusal and not (status_of(error) == 409 and _holds(mode, found)),
        forgotten=True,
    )
    return "failed" if found_outcome == "nothing" and not refusal else found_outcome


def _holds(mode: PutMode, found: ObjectState | None) -> bool:
    if isinstance(mode, IfMatch):
        return found is not None and found.etag == mode.etag
    return mode == "overwrite" or found is None
