"""A store that may not be used: does the error say what would have to be allowed?"""

from __future__ import annotations

import errno

import pytest
from botocore.exceptions import ClientError

from weighbridge.errors import Unavailable
from weighbridge_storage.stores.objects import error_for
from weighbridge_storage.stores.s3.errors import s3_error


@pytest.mark.parametrize(
    ("number", "advice"), [(errno.EACCES, "chown"), (errno.EPERM, "chown"), (errno.EROFS, "writable")]
)
def test_a_folder_without_permission_says_how_it_is_given(number: int, advice: str) -> None:
    found = error_for(OSError(number, "no", "/data/head.json"), "writing head.json")
    assert isinstance(found, Unavailable)
    assert advice in found.fix


@pytest.mark.parametrize("code", ["AccessDenied", "403"])
def test_a_bucket_without_permission_names_the_actions_that_are_needed(code: str) -> None:
    answer = {"Error": {"Code": code, "Message": "no"}, "ResponseMetadata": {"HTTPStatusCode": 403}}
    found = s3_error(ClientError(answer, "PutObject"), "writing head.json")  # type: ignore[arg-type]
    assert isinstance(found, Unavailable)
    for action in ("s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:ListBucket"):
        assert action in found.fix


def test_a_key_that_nobody_knows_is_no_matter_of_permission() -> None:
    answer = {"Error": {"Code": "InvalidAccessKeyId"}, "ResponseMetadata": {"HTTPStatusCode": 403}}
    assert "credentials" in s3_error(ClientError(answer, "PutObject"), "writing").fix  # type: ignore[arg-type]
