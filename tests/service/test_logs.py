"""Logs at any level: what the service says of itself, and nothing secret or bulky that libraries say."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.s3_server import SECRET_KEY, S3Server

pytestmark = pytest.mark.process

PROGRAM = """
import logging, sys
from weighbridge_service.server import configure_logging
from weighbridge_storage.opening import open_store
configure_logging(sys.argv[1])
logging.getLogger("weighbridge_service.push").debug("said by the service")
store = open_store(sys.argv[2])
store.put("a/b", b"the body of an object", mode="overwrite")
assert store.get("a/b")[0] == b"the body of an object"
store.presigned_url("a/b", 60)
store.close()
"""


@pytest.mark.parametrize(("level", "own"), [("debug", True), ("info", False)])
def test_a_log_has_no_signature_no_key_and_no_body(seaweed: S3Server, level: str, own: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, level, seaweed.location()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert ("said by the service" in done.stderr) is own
    for secret in (SECRET_KEY, "Signature", "AWS4-HMAC", "the body of an object"):
        assert secret not in done.stderr
