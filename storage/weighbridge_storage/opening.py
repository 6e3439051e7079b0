"""Stores by location: which kind a location stands for, and what that means for those who use it.

The only module whose code knows every kind; that of a further kind is here and in `stores`.
"""

from __future__ import annotations

import os
from pathlib import Path

from weighbridge.errors import InvalidArgument
from weighbridge_storage.stores.local import LocalStore
from weighbridge_storage.stores.objects import ObjectStore
from weighbridge_storage.stores.s3.settings import is_s3, parse_location


def is_remote(location: object) -> bool:
    """Whether a store lies on another machine: what is read of it is cached on a disk here, and scratch data cannot lie beside it."""
    return is_s3(location)


def shown(location: str | os.PathLike[str]) -> str:
    """A location for people: without options, and a folder from the root on. Raises InvalidArgument if it is malformed."""
    return str(parse_location(str(location)) if is_s3(location) else Path(location).absolute())


def check_url(location: str) -> None:
    """Refuse a URL that stands for no kind of store. Raises InvalidArgument."""
    if not is_s3(location):
        raise InvalidArgument("is neither a folder nor s3://BUCKET/PREFIX")


def open_store(location: str | os.PathLike[str]) -> ObjectStore:
    """The store at a location.

    Args:
        location: a folder, or ``s3://bucket/prefix`` with the options of `parse_location`; credentials for S3 come from
            where boto3 looks for them.

    Raises:
        InvalidArgument: the location is malformed.
        Unavailable: the folder cannot be used, or boto3 cannot be configured.
    """
    if not is_s3(location):
        return LocalStore(location)
    # boto3 takes a while to import, and only those who use S3 need to have it.
    from weighbridge_storage.stores.s3.store import S3Store

    return S3Store(parse_location(str(location)))
