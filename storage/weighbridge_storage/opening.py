"""Stores by location.

Only this module knows every kind of store. To add a kind, extend this module and `stores`.
"""

from __future__ import annotations

import os
from pathlib import Path

from weighbridge.errors import InvalidArgument
from weighbridge_storage.stores.local import LocalStore
from weighbridge_storage.stores.objects import ObjectStore
from weighbridge_storage.stores.s3.settings import is_s3, parse_location


def is_remote(location: object) -> bool:
    """Whether a store is on another machine.

    Its reads are then cached on a local disk, and scratch data cannot be stored next to it.
    """
    return is_s3(location)


def shown(location: str | os.PathLike[str]) -> str:
    """A location for messages: without options, and with an absolute path if it is a folder.

    Raises InvalidArgument if it is malformed.
    """
    return str(parse_location(str(location)) if is_s3(location) else Path(location).absolute())


def check_url(location: str) -> None:
    """Raise InvalidArgument for a URL of an unknown kind of store."""
    if not is_s3(location):
        raise InvalidArgument("is neither a folder nor s3://BUCKET/PREFIX")


def open_store(location: str | os.PathLike[str]) -> ObjectStore:
    """Open the store at a location.

    Args:
        location: a folder, or ``s3://bucket/prefix`` with the options of `parse_location`; boto3 finds the credentials
            for S3 in its usual places.

    Raises:
        InvalidArgument: the location is malformed.
        Unavailable: the folder cannot be used, or boto3 cannot be configured.
    """
    if not is_s3(location):
        return LocalStore(location)
    # boto3 is slow to import, and needed only for S3.
    from weighbridge_storage.stores.s3.store import S3Store

    return S3Store(parse_location(str(location)))
