"""Store that a location stands for."""

from __future__ import annotations

import os

from weighbridge_storage.local import LocalStore
from weighbridge_storage.objects import ObjectStore
from weighbridge_storage.s3_settings import is_s3, parse_location


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
    from weighbridge_storage.s3 import S3Store

    return S3Store(parse_location(str(location)))
