"""Object store in a bucket or in a part of a bucket.

An object's name in the bucket is the store's prefix followed by its key. The server evaluates the conditions:
If-None-Match and If-Match, on PutObject and on the request that completes a multipart upload. `probe` tests whether the
server honours them. AWS, SeaweedFS, MinIO, Ceph and R2 document that they do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from weighbridge._core.text.shortening import shown
from weighbridge.errors import InvalidArgument
from weighbridge_storage.stores.objects import (
    MAX_KEY_LENGTH,
    Buffer,
    ObjectStore,
    PutMode,
    check_folder_prefix,
    check_key,
    check_prefix,
    is_key,
)
from weighbridge_storage.stores.s3.client import S3Client
from weighbridge_storage.stores.s3.errors import S3_ERRORS, s3_error, translated
from weighbridge_storage.stores.s3.reads import Reads
from weighbridge_storage.stores.s3.settings import S3Settings
from weighbridge_storage.stores.s3.uploads import Uploads

_HASTY_ATTEMPTS = 3
"""Maximum attempts of a request under a time limit.

With this value, a refused connection is reported within three seconds.
"""


class S3Store(ObjectStore):
    """An object store on an S3 server. The constructor does not make a request.

    Args:
        settings: the bucket, the server and the limits.
        like: a store whose credentials this one shares.

    Raises:
        Unavailable: boto3 cannot be configured, e.g. because a profile is missing.
    """

    def __init__(self, settings: S3Settings, like: S3Store | None = None) -> None:
        try:
            self._client: S3Client = S3Client(settings, None if like is None else like._client.session)
        except (*S3_ERRORS, ValueError) as error:
            raise s3_error(error, f"opening the store in {settings}") from error
        self._settings = settings
        self._prefix = settings.prefix
        self._pool = ThreadPoolExecutor(settings.parallel, thread_name_prefix="s3")
        self._uploads = Uploads(self._client, settings, self._pool)
        self._reads = Reads(self._client, settings, self._pool)

    def with_time_limit(self, seconds: float) -> S3Store:
        """See `ObjectStore.with_time_limit`: the result has its own connections and must be closed separately."""
        limits = replace(self._settings, connect_timeout_s=seconds, read_timeout_s=seconds, attempts=_HASTY_ATTEMPTS)
        return S3Store(limits, self)

    def close(self) -> None:
        """See `ObjectStore.close`. Waits for requests in flight."""
        self._pool.shutdown()
        self._client.close()

    def get(self, key: str) -> tuple[bytes, str]:
        """See `ObjectStore.get`.

        Compares the content with the server's checksum, if the server has one for the whole object.
        """
        return self._reads.get(self._name(key), f"reading {key}")

    def put(self, key: str, data: Buffer | Iterable[Buffer], *, mode: PutMode) -> str:
        """See `ObjectStore.put`."""
        return self._uploads.put(self._name(key), data, mode, f"writing {key}")

    def size(self, key: str) -> int:
        """See `ObjectStore.size`."""
        return self._reads.head(self._name(key), f"reading the size of {key}").size

    def modified_ms(self, key: str) -> int:
        """See `ObjectStore.modified_ms`."""
        return self._reads.head(self._name(key), f"reading the time of {key}").modified_ms

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """See `ObjectStore.read_range`."""
        return self._reads.read_range(self._name(key), start, length, f"reading a part of {key}")

    def stream(self, key: str) -> Iterator[bytes]:
        """See `ObjectStore.stream`. Holds `S3Settings.parallel` pieces of 8 MiB, and one more."""
        return self._reads.stream(self._name(key), f"reading {key}")

    def presigned_url(self, key: str, seconds: int) -> str:
        """See `ObjectStore.presigned_url`: the URL is signed with SigV4, for the public endpoint if one is set."""
        with translated(f"signing a URL of {key}"):
            return self._client.presigned_url(self._name(key), seconds)

    def list(self, prefix: str) -> Iterator[str]:
        """See `ObjectStore.list`."""
        return self._list(check_prefix(prefix))

    def folders(self, prefix: str) -> Iterator[str]:
        """See `ObjectStore.folders`."""
        return self._folders(check_folder_prefix(prefix))

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`. In a bucket with versioning, the server keeps the bytes."""
        with translated(f"deleting {key}"):
            self._client.delete(self._name(key))

    def copy(self, source: str, target: str) -> None:
        """See `ObjectStore.copy`. The server copies the bytes; they are not transferred to this process."""
        self._uploads.copy(self._name(source), self._name(target), f"copying {source} to {target}")

    def discard_unfinished(self, prefix: str, older_than_s: float, *, only: Callable[[str], bool] | None = None) -> int:
        """See `ObjectStore.discard_unfinished`: aborts multipart uploads. Their parts incur storage costs until then.

        Ages are measured by the server's clock. Some servers (MinIO) list uploads only for whole keys, so no uploads
        are found there.
        """

        def chosen(name: str) -> bool:
            return only is None or only(name.removeprefix(self._prefix))

        return self._uploads.discard_unfinished(self._prefix + check_prefix(prefix), older_than_s, chosen)

    def _name(self, key: str) -> str:
        name = self._prefix + check_key(key)
        if len(name.encode()) > MAX_KEY_LENGTH:
            raise InvalidArgument(
                f"object key {shown(key)} has more than {MAX_KEY_LENGTH} bytes with the store's prefix"
            )
        return name

    def _list(self, prefix: str) -> Iterator[str]:
        with translated(f"listing {shown(prefix)}"):
            names = (name.removeprefix(self._prefix) for name in self._client.list(self._prefix + prefix))
            yield from filter(is_key, names)

    def _folders(self, prefix: str) -> Iterator[str]:
        whole = self._prefix + prefix
        with translated(f"listing {shown(prefix)}"):
            yield from filter(is_key, (name[len(whole) : -1] for name in self._client.folders(whole)))
