"""Client of an S3 server: the requests that the store makes.

Every method makes one request, which botocore retries if the failure may be transient. Methods raise botocore's errors.
"""

from __future__ import annotations

import base64
import os
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, TypeAlias

import boto3
from botocore.config import Config

from weighbridge._core.pauses import DICE, Pauses
from weighbridge_storage.stores.objects import PutMode
from weighbridge_storage.stores.s3.settings import S3Settings

WRITE_ID = "weighbridge-write"
"""Name of the metadata entry in which every object stores the id of the write that created it."""
_DEFAULT_REGION = "us-east-1"
_CONNECTIONS = 64
_PAUSES = Pauses(first=0.05, longest=2.0)

Body: TypeAlias = bytes | bytearray


@dataclass(frozen=True, slots=True)
class ObjectState:
    """Properties of an object, from a HEAD.

    Attributes:
        size: in bytes.
        etag: opaque; includes the quotes that the server puts around it.
        write_id: id of the write that created it; empty if Weighbridge did not write it.
        modified_ms: time at which it was written, by the server's clock, in milliseconds since 1970 UTC; a whole number
            of seconds.
    """

    size: int
    etag: str
    write_id: str
    modified_ms: int


@dataclass(frozen=True, slots=True)
class UploadedPart:
    """One part of an upload that the server has stored.

    Attributes:
        number: number of the part, starting at 1.
        etag: the server's etag of the part.
        checksum: CRC32 of its bytes in base64; None for a part that was copied on the server.
    """

    number: int
    etag: str
    checksum: str | None


@dataclass(frozen=True, slots=True)
class Unfinished:
    """An upload that is neither completed nor aborted.

    Attributes:
        name: name of the object that the upload would create.
        upload: its id.
        age_s: its age in seconds, by the server's clock.
    """

    name: str
    upload: str
    age_s: float


class S3Client:
    """Requests to one bucket. Objects are identified by their full names in the bucket. Thread-safe.

    boto3 finds the credentials in its usual places: environment variables, profiles and roles. It also finds the
    endpoint and the region there if the settings do not contain them.

    Args:
        settings: the bucket, the server and the limits.
        session: session of another client, to share its credentials and the 13 MB description of S3; None for a new
            session.
    """

    def __init__(self, settings: S3Settings, session: boto3.session.Session | None = None) -> None:
        session = session or boto3.session.Session()
        self.session = session
        # boto3 ignores AWS_REGION, which the other SDKs and many containers use
        region = settings.region or os.environ.get("AWS_REGION") or session.region_name or _DEFAULT_REGION

        def make(endpoint: str | None = settings.endpoint, proxies: dict[str, str] | None = None, **s3: object) -> Any:
            config = _config(settings, s3).merge(Config(proxies=proxies))
            return session.client("s3", region_name=region, endpoint_url=endpoint, config=config)

        # without TLS, a proxy from the environment could read the weights
        self._s3 = make(proxies={})
        if self._s3.meta.endpoint_url.startswith("https:"):
            # Our checksum is in a signed header, and TLS protects the bytes. Also hashing them with SHA-256 would cost
            # more than everything else.
            self._s3 = make(payload_signing_enabled=False)
        self._signer = make(settings.public_endpoint) if settings.public_endpoint else self._s3
        self._bucket = settings.bucket
        self._page = settings.page

    def close(self) -> None:
        """Close its connections."""
        self._s3.close()
        self._signer.close()

    def head(self, name: str) -> ObjectState:
        """Size, etag and write id of an object."""
        response = self._s3.head_object(Bucket=self._bucket, Key=name)
        return ObjectState(
            response["ContentLength"],
            response["ETag"],
            response["Metadata"].get(WRITE_ID, ""),
            round(response["LastModified"].timestamp() * 1000),
        )

    def get(self, name: str) -> dict[str, Any]:
        """An object.

        ``Body`` is a stream that compares the bytes with the server's checksum, if the server sends one.
        """
        return dict(self._s3.get_object(Bucket=self._bucket, Key=name, ChecksumMode="ENABLED"))

    def get_range(self, name: str, start: int, length: int, etag: str | None) -> dict[str, Any]:
        """A non-empty range of an object, if the object has this etag: ``Body`` and ``ContentRange``."""
        condition = {} if etag is None else {"IfMatch": etag}
        spread = f"bytes={start}-{start + length - 1}"
        return dict(self._s3.get_object(Bucket=self._bucket, Key=name, Range=spread, **condition))

    def presigned_url(self, name: str, seconds: int) -> str:
        """A URL for a GET of an object, valid for ``seconds``. Does not make a request."""
        return str(
            self._signer.generate_presigned_url(
                "get_object", Params={"Bucket": self._bucket, "Key": name}, ExpiresIn=seconds
            )
        )

    def put(self, name: str, body: Body, write_id: str, mode: PutMode) -> str:
        """Write an object in one request. Returns its etag."""
        response = self._s3.put_object(
            Bucket=self._bucket,
            Key=name,
            Body=body,
            ChecksumCRC32=_crc32(body),
            Metadata={WRITE_ID: write_id},
            **_condition(mode),
        )
        return str(response["ETag"])

    def delete(self, name: str) -> None:
        """Remove an object, if it exists."""
        self._s3.delete_object(Bucket=self._bucket, Key=name)

    def copy(self, source: str, target: str, write_id: str) -> str:
        """Copy an object within the bucket. Returns the copy's etag, if the server's response contains it."""
        response = self._s3.copy_object(
            Bucket=self._bucket,
            Key=target,
            CopySource={"Bucket": self._bucket, "Key": source},
            MetadataDirective="REPLACE",  # a copied write id would indicate that another write has created the target
            Metadata={WRITE_ID: write_id},
        )
        return str(response.get("CopyObjectResult", {}).get("ETag", ""))

    def list(self, prefix: str) -> Iterator[str]:
        """Names of all objects that begin with ``prefix``."""
        for page in self._pages("list_objects_v2", Prefix=prefix):
            yield from (entry["Key"] for entry in page.get("Contents", ()))

    def folders(self, prefix: str) -> Iterator[str]:
        """Distinct prefixes of names: ``prefix`` and the next component, with its slash."""
        for page in self._pages("list_objects_v2", Prefix=prefix, Delimiter="/"):
            yield from (entry["Prefix"] for entry in page.get("CommonPrefixes", ()))

    def begin_upload(self, name: str, write_id: str, *, checksums: bool) -> str:
        """Begin a multipart upload. Returns its id. ``checksums`` states whether its parts will have our checksums."""
        extra = {"ChecksumAlgorithm": "CRC32"} if checksums else {}
        response = self._s3.create_multipart_upload(
            Bucket=self._bucket, Key=name, Metadata={WRITE_ID: write_id}, **extra
        )
        return str(response["UploadId"])

    def upload_part(self, name: str, upload: str, number: int, body: Body) -> UploadedPart:
        """Send one part of an upload."""
        checksum = _crc32(body)
        response = self._s3.upload_part(
            Bucket=self._bucket,
            Key=name,
            UploadId=upload,
            PartNumber=number,
            Body=body,
            ChecksumCRC32=checksum,
        )
        return UploadedPart(number, response["ETag"], checksum)

    def copy_part(
        self, name: str, upload: str, number: int, source: str, etag: str, start: int, length: int
    ) -> UploadedPart:
        """Create a part from bytes of another object, if that object still has this etag."""
        response = self._s3.upload_part_copy(
            Bucket=self._bucket,
            Key=name,
            UploadId=upload,
            PartNumber=number,
            CopySource={"Bucket": self._bucket, "Key": source},
            CopySourceIfMatch=etag,
            CopySourceRange=f"bytes={start}-{start + length - 1}",
        )
        return UploadedPart(number, response["CopyPartResult"]["ETag"], None)

    def complete(self, name: str, upload: str, parts: Sequence[UploadedPart], mode: PutMode) -> str:
        """Create the object from its parts. Returns its etag."""
        listed = [
            {"PartNumber": part.number, "ETag": part.etag}
            | ({} if part.checksum is None else {"ChecksumCRC32": part.checksum})
            for part in parts
        ]
        response = self._s3.complete_multipart_upload(
            Bucket=self._bucket,
            Key=name,
            UploadId=upload,
            MultipartUpload={"Parts": listed},
            **_condition(mode),
        )
        return str(response["ETag"])

    def abort(self, name: str, upload: str) -> None:
        """Abort an upload and discard its parts."""
        self._s3.abort_multipart_upload(Bucket=self._bucket, Key=name, UploadId=upload)

    def uploads(self, prefix: str) -> Iterator[Unfinished]:
        """All uploads to names that begin with ``prefix``."""
        for page in self._pages("list_multipart_uploads", Prefix=prefix):
            # by the server's clock, because the start time of each upload is, too
            now = parsedate_to_datetime(page["ResponseMetadata"]["HTTPHeaders"]["date"])
            for entry in page.get("Uploads", ()):
                age = now - entry["Initiated"]
                yield Unfinished(entry["Key"], entry["UploadId"], age.total_seconds())

    def _pages(self, operation: str, **arguments: str) -> Iterator[dict[str, Any]]:
        pages = self._s3.get_paginator(operation)
        yield from pages.paginate(Bucket=self._bucket, PaginationConfig={"PageSize": self._page}, **arguments)


def _config(settings: S3Settings, s3: dict[str, object]) -> Config:
    return Config(
        signature_version="s3v4",  # on custom endpoints, botocore would presign with SigV2
        s3={"addressing_style": settings.addressing, **s3},
        retries={"mode": "standard", "total_max_attempts": settings.attempts},
        connect_timeout=settings.connect_timeout_s,
        read_timeout=settings.read_timeout_s,
        max_pool_connections=_CONNECTIONS,
        tcp_keepalive=True,
        # we compute checksums ourselves, where they protect something
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )


def _condition(mode: PutMode) -> dict[str, str]:
    if mode == "overwrite":
        return {}
    return {"IfNoneMatch": "*"} if mode == "create" else {"IfMatch": mode.etag}


def _crc32(body: Body) -> str:
    return base64.b64encode(zlib.crc32(body).to_bytes(4, "big")).decode()


def pause(attempt: int) -> None:
    """Sleep before a retry. ``attempt`` is 0 for the first pause."""
    time.sleep(_PAUSES.after(attempt, DICE.random()))
