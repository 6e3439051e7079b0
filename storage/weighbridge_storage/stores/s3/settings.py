"""Settings of an S3 store, and the syntax of its location. Does not import boto3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, cast, get_args
from urllib.parse import parse_qsl, unquote, urlsplit

from weighbridge._core.text.shortening import shown
from weighbridge.errors import InvalidArgument
from weighbridge_storage.stores.objects import check_key

SCHEME = "s3://"
SMALLEST_PART = 5 << 20
"""S3's limit, in bytes; only an object's last part may be smaller."""
LARGEST_PART = 5 << 30
"""S3's limit, in bytes; also the limit of one CopyObject."""
MOST_PARTS = 10_000
"""S3's limit on the parts of one object."""

Addressing: TypeAlias = Literal["auto", "path", "virtual"]

_OPTIONS = ("endpoint", "region", "addressing", "public_endpoint")
_EXAMPLE = "s3://bucket/prefix?endpoint=http://127.0.0.1:8333&region=us-east-1&addressing=path"


@dataclass(frozen=True, slots=True)
class S3Settings:
    """Location of a store on S3, and settings of its requests.

    Attributes:
        bucket: the bucket's name; it must exist.
        prefix: prefix of all keys in the bucket; empty, or ends with a slash.
        endpoint: URL of the server; None for AWS, or the value of ``AWS_ENDPOINT_URL``.
        region: region to sign for; None for the region from the environment.
        addressing: whether the bucket is part of the path or of the host name; ``auto`` uses the path on a custom
            endpoint.
        public_endpoint: URL under which clients reach the server, for presigned URLs; None for ``endpoint``.
        part_bytes: size of a part of an upload, in bytes; parts are larger if the upload would otherwise have more than
            `MOST_PARTS`.
        memory_bytes: maximum bytes of parts that all threads together hold for uploads at a time. A single part may be
            larger.
        single_copy_bytes: larger objects are copied in parts.
        page: maximum number of names that one request of a listing asks for.
        parallel: maximum number of parts of uploads and pieces of streams that all calls together transfer at a time.
        attempts: maximum number of attempts of a request.
        connect_timeout_s: seconds to wait for a connection, and for the server to accept more bytes of a request.
            urllib3 has one timeout for both.
        read_timeout_s: seconds to wait for the next bytes of a response.

    Raises:
        InvalidArgument: a value is malformed or out of bounds.
    """

    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    region: str | None = None
    addressing: Addressing = "auto"
    public_endpoint: str | None = None
    part_bytes: int = 16 << 20
    memory_bytes: int = 160 << 20
    single_copy_bytes: int = LARGEST_PART
    page: int = 1000
    parallel: int = 8
    attempts: int = 5
    connect_timeout_s: float = 20.0
    read_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if not self.bucket or "/" in self.bucket or not self.bucket.isprintable():
            raise InvalidArgument(f"{shown(self.bucket)} is not a bucket name", fix=f"write the store as {_EXAMPLE}")
        if self.prefix:
            check_key(self.prefix + "x")
            if not self.prefix.endswith("/"):
                raise InvalidArgument(f"the prefix {shown(self.prefix)} does not end with a slash")
        if self.addressing not in get_args(Addressing):
            raise InvalidArgument(
                f"{shown(self.addressing)} is not an addressing style of buckets",
                fix=f"use one of {', '.join(get_args(Addressing))}",
            )
        for endpoint in (self.endpoint, self.public_endpoint):
            if endpoint is not None:
                _check_endpoint(endpoint)
        if not SMALLEST_PART <= self.part_bytes <= LARGEST_PART:
            raise InvalidArgument(
                f"part_bytes is {self.part_bytes}, which is out of range",
                fix=f"use {SMALLEST_PART} to {LARGEST_PART}",
            )

    def __str__(self) -> str:
        return f"{SCHEME}{self.bucket}/{self.prefix}"


def is_s3(location: object) -> bool:
    """Whether a location names a bucket rather than a folder."""
    return isinstance(location, str) and location.startswith(SCHEME)


def parse_location(location: str) -> S3Settings:
    """The settings in a location such as ``s3://bucket/prefix?endpoint=http://127.0.0.1:8333``.

    Options are ``endpoint``, ``region``, ``addressing`` and ``public_endpoint``; values may be percent-encoded.

    Raises:
        InvalidArgument: it is malformed, or contains credentials, which belong in the environment. The message does not
            repeat them.
    """
    try:
        parts = urlsplit(location)
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError as error:
        raise InvalidArgument("the store's location is malformed", fix=f"write it as {_EXAMPLE}") from error
    if "@" in parts.netloc:
        raise _credentials_in("the store's location")
    unknown = sorted(options.keys() - set(_OPTIONS))
    if parts.scheme != "s3" or parts.fragment or unknown:
        what = f"the option {shown(unknown[0])}" if unknown else "an unknown part"
        raise InvalidArgument(
            f"the store's location has {what}", fix=f"write it as {_EXAMPLE}; the options may be left out"
        )
    prefix = unquote(parts.path).strip("/")
    return S3Settings(
        bucket=parts.netloc,
        prefix=f"{prefix}/" if prefix else "",
        endpoint=options.get("endpoint"),
        region=options.get("region"),
        addressing=cast(Addressing, options.get("addressing", "auto")),
        public_endpoint=options.get("public_endpoint"),
    )


def _check_endpoint(endpoint: str) -> None:
    try:
        parts = urlsplit(endpoint)
        malformed = parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0
    except ValueError:
        malformed = True
    else:
        if "@" in parts.netloc:
            raise _credentials_in("the endpoint")
    if malformed or parts.query or parts.fragment:
        raise InvalidArgument(
            f"{shown(endpoint)} is not an endpoint", fix="write it as a URL, e.g. http://127.0.0.1:8333"
        )


def _credentials_in(where: str) -> InvalidArgument:
    return InvalidArgument(
        f"{where} contains a user or a password",
        fix="leave it out, and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    )
