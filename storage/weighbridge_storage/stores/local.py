"""Object store in a local folder.

An object is a plain file at the same path, so that any program that reads files can read the store. There are two
hidden folders next to the objects::

    .tmp/<uuid>/<uuid>   files being written; each opened store has its own sub-folder and holds a flock on it
    .locks/<00..ff>      flock files; a key's lock is chosen by its hash

The first write creates them. A store that is only read is not changed, and may be on a read-only file system.

A write fills a temporary file, flushes it to the device, takes the key's lock, checks the condition, renames the file
to its place and flushes the folder. Readers do not take a lock. All writers of one folder, in any process and on any
host, must see each other's flocks, as they do on every local file system and on NFS.

Paths are walked folder by folder with `O_NOFOLLOW`: a symbolic link is neither an object nor a folder of the store,
wherever it points. (The path of the root itself may contain symbolic links.)
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

import xxhash

from weighbridge._core.text.shortening import shown
from weighbridge.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from weighbridge_storage.stores.hidden_folders import (
    FOLDER_FLAGS,
    TEMP,
    HiddenFolders,
    alone_in,
    remove_stale,
)
from weighbridge_storage.stores.objects import (
    Buffer,
    ObjectStore,
    PutMode,
    check_folder_prefix,
    check_key,
    check_prefix,
    check_whole,
    error_for,
    is_key,
    pieces_of,
)
from weighbridge_storage.stores.outcomes import refused

ETAG_BY_CONTENT_LIMIT = 64 << 20
"""Objects of up to this many bytes have an etag that is computed from their content; the etag of larger objects is
computed from the file's identity.

Conditional writes use small objects, and hashing 64 MiB takes a few milliseconds. A file's identity (inode, time, size)
is cheap for weights. But inodes are reused and clocks tick slowly, so writers that race do not rely on it.
"""
_LOCK_COUNT = 256
_COPY_PIECE = 8 << 20
_STREAM_PIECE = 4 << 20
_INSTALL_ATTEMPTS = 16
_NOT_THERE = (FileNotFoundError, NotADirectoryError)
# The name does not exist, or it is not an object: a file in place of a folder, a symbolic link, a socket.
_NO_OBJECT = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO}
_CANNOT_LINK = {errno.EMLINK, errno.EPERM, errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES}
# O_NONBLOCK: opening a FIFO in the folder must not wait for its other end.
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class LocalStore(ObjectStore):
    """An object store in a folder. The folder is created if it does not exist.

    Any number of stores, threads and processes may use one folder. The first write of a store removes files that dead
    writers left in ``.tmp``, but not files of live writers.

    Raises:
        Unavailable: the folder cannot be created or read.
        ResourceExhausted: no space or file handles left.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        try:
            os.makedirs(root, exist_ok=True)
            self._root = os.open(os.path.realpath(root), FOLDER_FLAGS)
            self._release_root = weakref.finalize(self, os.close, self._root)
        except OSError as error:
            raise error_for(error, f"opening the store in {os.fspath(root)}") from error
        self._flushed: set[str] = set()
        self._hidden: HiddenFolders | None = None
        self._hiding = threading.Lock()

    def close(self) -> None:
        """See `ObjectStore.close`. Removes the folder for temporary files."""
        if not self._release_root.alive:
            return
        if self._hidden is not None:
            self._hidden.close(self._root)
        self._release_root()

    @property
    def is_near(self) -> bool:
        """See `ObjectStore.is_near`."""
        return True

    def get(self, key: str) -> tuple[bytes, str]:
        """See `ObjectStore.get`."""
        with self._reading(key) as file:
            check_whole(os.fstat(file).st_size, f"reading {key}")
            with os.fdopen(os.dup(file), "rb") as stream:
                content = stream.read()
            return content, _etag(os.fstat(file), content)

    def size(self, key: str) -> int:
        """See `ObjectStore.size`."""
        with self._reading(key) as file:
            return os.fstat(file).st_size

    def modified_ms(self, key: str) -> int:
        """See `ObjectStore.modified_ms`."""
        with self._reading(key) as file:
            return os.fstat(file).st_mtime_ns // 1_000_000

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """See `ObjectStore.read_range`."""
        with self._reading(key) as file:
            size = os.fstat(file).st_size
            if start < 0 or length < 0 or start + length > size:
                raise InvalidArgument(f"bytes {start} to {start + length} are not within {key}, which has {size} bytes")
            content = bytearray(length)
            view, done = memoryview(content), 0
            while done < length:
                count = os.preadv(file, [view[done:]], start + done)
                if count == 0:
                    raise Unavailable(f"{key} was cut short while it was read", fix="try again")
                done += count
            return bytes(content)

    def open(self, key: str) -> int:
        """See `ObjectStore.open`."""
        with self._reading(key) as file:
            return os.dup(file)

    def stream(self, key: str) -> Iterator[memoryview]:
        """See `ObjectStore.stream`. All pieces are parts of one buffer."""
        with self._reading(key) as file:
            return self._stream(key, os.dup(file))

    def _stream(self, key: str, file: int) -> Iterator[memoryview]:
        try:
            size, buffer = os.fstat(file).st_size, memoryview(bytearray(_STREAM_PIECE))
            start = 0
            while start < size:
                count = os.preadv(file, [buffer[: size - start]], start)
                if not count:
                    raise Unavailable(f"{key} was cut short while it was read", fix="try again")
                yield buffer[:count]
                start += count
        except OSError as error:
            raise error_for(error, f"reading {key}") from error
        finally:
            os.close(file)

    def put(self, key: str, data: Buffer | Iterable[Buffer], *, mode: PutMode) -> str:
        """See `ObjectStore.put`.

        Readers may see the new object a moment before it is durable.

        Raises:
            FailedPrecondition: another object's key is a folder of this key, or this key is a folder of other keys.
        """
        check_key(key)
        what = f"writing {key}"
        temp = uuid.uuid4().hex
        try:
            folder = self._writing().temp
            # Objects are never changed in place, so the file is read-only; renaming another file over it does not
            # require permission on it.
            file = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444, dir_fd=folder)
        except OSError as error:
            raise error_for(error, what) from error
        try:
            try:
                etag = _fill(file, data, what)
            finally:
                os.close(file)
            self._install(temp, key, mode, what)
        except BaseException:
            with suppress(OSError):
                os.unlink(temp, dir_fd=folder)
            raise
        return etag

    def list(self, prefix: str) -> Iterator[str]:
        """See `ObjectStore.list`."""
        folder = check_prefix(prefix).rpartition("/")[0]
        return (key for key in self._walk(folder) if key.startswith(prefix))

    def folders(self, prefix: str) -> Iterator[str]:
        """See `ObjectStore.folders`."""
        folder = check_folder_prefix(prefix).rstrip("/")
        return (name for name, is_folder in self._entries(folder) if is_folder)

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`. Also removes folders that become empty."""
        try:
            with self._folder_of(key) as (folder, name), self._locked(key):
                os.unlink(name, dir_fd=folder)
                os.fsync(folder)
            self._prune(key)
        except _NOT_THERE:
            return
        except OSError as error:
            raise error_for(error, f"deleting {key}") from error

    def copy(self, source: str, target: str) -> None:
        """See `ObjectStore.copy`. Both keys share one file where the file system has hard links."""
        check_key(target)
        what = f"copying {source} to {target}"
        temp = uuid.uuid4().hex
        self.size(
            source
        )  # rejects anything that is not an object: a hard link to a symbolic link would itself be a symbolic link
        try:
            own = self._writing().temp
            with self._folder_of(source) as (folder, name):
                os.link(name, temp, src_dir_fd=folder, dst_dir_fd=own, follow_symlinks=False)
        except _NOT_THERE as error:
            raise NotFound(f"there is no object {source}") from error
        except OSError as error:
            if error.errno not in _CANNOT_LINK:
                raise error_for(error, what) from error
            with self._reading(source) as file:
                self.put(target, _pieces(file, what), mode="overwrite")
            return
        try:
            self._install(temp, target, "overwrite", what)
        finally:
            # Renaming a file onto another name of itself does nothing, and both names remain.
            with suppress(OSError):
                os.unlink(temp, dir_fd=own)

    def discard_unfinished(self, prefix: str, older_than_s: float, *, only: Callable[[str], bool] | None = None) -> int:
        """See `ObjectStore.discard_unfinished`.

        Keys and ages are ignored, because locks show which writers are dead.
        """
        check_prefix(prefix)
        try:
            temp_root = os.open(TEMP, FOLDER_FLAGS, dir_fd=self._root)
            try:
                with alone_in(temp_root):
                    return remove_stale(temp_root)
            finally:
                os.close(temp_root)
        except _NOT_THERE:
            return 0
        except OSError as error:
            raise error_for(error, "removing what dead writers left") from error

    def _writing(self) -> HiddenFolders:
        """The hidden folders. They are created before a write if needed."""
        with self._hiding:
            if self._hidden is None:
                self._hidden = HiddenFolders(self._root)
            return self._hidden

    def _install(self, temp: str, key: str, mode: PutMode, what: str) -> None:
        """Move a finished temporary file to its place if the condition holds."""
        for _ in range(_INSTALL_ATTEMPTS):
            try:
                with self._folder_of(key, make=True) as (folder, name):
                    with self._locked(key):
                        _check_condition(folder, name, key, mode)
                        os.rename(temp, name, src_dir_fd=self._writing().temp, dst_dir_fd=folder)
                    os.fsync(folder)
                return
            except FileNotFoundError:
                # A concurrent deletion of the last other object in the folder removed the folder: create it again.
                continue
            except (NotADirectoryError, IsADirectoryError) as error:
                raise FailedPrecondition(
                    f"{key} cannot be written: a part of it is an object or a link, or it is itself a folder",
                    fix="choose a key that does not continue another object's key",
                ) from error
            except OSError as error:
                raise error_for(error, what) from error
        raise Unavailable(f"{what} failed: its folder was removed repeatedly", fix="try again")

    @contextmanager
    def _folder_of(self, key: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        """The open folder that holds an object, and the object's name in it."""
        *folders, name = check_key(key).split("/")
        current, path = os.dup(self._root), ""
        try:
            for folder in folders:
                path += folder + "/"
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(folder, dir_fd=current)
                        self._flushed.discard(path)
                    if path not in self._flushed:
                        # Even if another writer has just created it: that writer may not have flushed it yet.
                        os.fsync(current)
                        self._flushed.add(path)
                current, parent = os.open(folder, FOLDER_FLAGS, dir_fd=current), current
                os.close(parent)
            yield current, name
        finally:
            os.close(current)

    @contextmanager
    def _reading(self, key: str) -> Iterator[int]:
        """An object's file, open for reading."""
        what = f"reading {shown(key)}"
        try:
            with self._folder_of(key) as (folder, name):
                file = os.open(name, _READ_FLAGS, dir_fd=folder)
        except OSError as error:
            if error.errno in _NO_OBJECT:
                raise NotFound(f"there is no object {key}") from error
            raise error_for(error, what) from error
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise NotFound(f"there is no object {key}")
            yield file
        except OSError as error:
            raise error_for(error, what) from error
        finally:
            os.close(file)

    @contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        """Exclude all other writers that replace or remove this object."""
        name = f"{xxhash.xxh3_64_intdigest(key.encode()) % _LOCK_COUNT:02x}"
        flags = os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        lock = os.open(name, flags, 0o666, dir_fd=self._writing().locks)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                yield
            finally:
                # Closing would not unlock: a child forked in the meantime has the same open file.
                fcntl.flock(lock, fcntl.LOCK_UN)
        finally:
            os.close(lock)

    def _entries(self, path: str) -> Sequence[tuple[str, bool]]:
        """Names of the files and folders in a folder of the store, each with whether it is a folder; empty if the
        folder does not exist.

        Other programs may have put files there. Files whose name is not a valid key are skipped.
        """
        prefix = f"{path}/" if path else ""
        found = []
        try:
            with (
                self._folder_of(f"{path}/x" if path else "x") as (folder, _),
                os.scandir(folder) as entries,
            ):
                for entry in entries:
                    is_folder = entry.is_dir(follow_symlinks=False)
                    within = "/x" if is_folder else ""  # as a key of what may be in it
                    if (is_folder or entry.is_file(follow_symlinks=False)) and is_key(prefix + entry.name + within):
                        found.append((entry.name, is_folder))
        except _NOT_THERE:
            return []
        except OSError as error:
            raise error_for(error, f"listing {shown(path)}") from error
        return found

    def _walk(self, path: str) -> Iterator[str]:
        rest = [path]
        while rest:
            path = rest.pop()
            for name, is_folder in self._entries(path):
                key = f"{path}/{name}" if path else name
                if is_folder:
                    rest.append(key)
                else:
                    yield key

    def _prune(self, key: str) -> None:
        """Remove folders that a deletion left empty, because other stores do not have empty folders."""
        path = key
        while "/" in path:
            path = path.rpartition("/")[0]
            try:
                with self._folder_of(path) as (folder, name):
                    os.rmdir(name, dir_fd=folder)
            except OSError:
                return
            self._flushed.discard(path + "/")


def _check_condition(folder: int, name: str, key: str, mode: PutMode) -> None:
    if mode == "overwrite":
        return
    if mode == "create":
        with suppress(FileNotFoundError):
            os.stat(name, dir_fd=folder, follow_symlinks=False)
            raise refused(f"writing {key}", mode, there=True)
        return
    found = _current_etag(folder, name)
    if found != mode.etag:
        raise refused(f"writing {key}", mode, there=found is not None)


def _current_etag(folder: int, name: str) -> str | None:
    try:
        file = os.open(name, _READ_FLAGS, dir_fd=folder)
    except OSError as error:
        if error.errno in _NO_OBJECT:
            return None
        raise
    with os.fdopen(file, "rb") as stream:
        status = os.fstat(file)
        return _etag(status, stream.read() if status.st_size <= ETAG_BY_CONTENT_LIMIT else b"")


def _etag(status: os.stat_result, content: bytes) -> str:
    """A file's etag. Content beyond the limit is ignored."""
    if status.st_size <= ETAG_BY_CONTENT_LIMIT:
        return xxhash.xxh3_128_hexdigest(content)
    return f"{status.st_size:x}-{status.st_mtime_ns:x}-{status.st_ino:x}"


def _fill(file: int, data: Buffer | Iterable[Buffer], what: str) -> str:
    """Write all of ``data`` to an open file and flush it to the device. Returns its etag."""
    content = xxhash.xxh3_128()
    size = 0
    # Errors of the caller's iterator pass through unchanged; only errors of the file are translated.
    for view in pieces_of(data):
        size += len(view)
        if size <= ETAG_BY_CONTENT_LIMIT:
            content.update(view)
        try:
            while view:
                view = view[os.write(file, view) :]
        except OSError as error:
            raise error_for(error, what) from error
    try:
        os.fsync(file)
        status = os.fstat(file)
    except OSError as error:
        raise error_for(error, what) from error
    return content.hexdigest() if size <= ETAG_BY_CONTENT_LIMIT else _etag(status, b"")


def _pieces(file: int, what: str) -> Iterator[bytes]:
    try:
        while piece := os.read(file, _COPY_PIECE):
            yield piece
    except OSError as error:
        raise error_for(error, what) from error
