"""Descriptors: a service takes as many as it may, and no door can take those of another."""

from __future__ import annotations

import subprocess
import sys

import pytest

from weighbridge_service.runtime.descriptors import Descriptors

PROGRAM = """
import resource, sys
from weighbridge_service.runtime.descriptors import raise_limit
soft, hard = int(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(raise_limit(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize("limit", [64, 256, 1024, 65536])
def test_all_doors_together_leave_some_to_the_service(limit: int) -> None:
    shares = Descriptors.of(limit)
    assert shares.grpc + shares.http + shares.lane <= limit * 3 // 4
    assert min(shares.grpc, shares.http, shares.lane) >= 8


@pytest.mark.process
@pytest.mark.parametrize(("soft", "hard", "expected"), [(64, 900, 900), (64, 64, 64), (100, 900, 900)])
def test_the_limit_is_raised_as_far_as_it_may_be(soft: int, hard: int, expected: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(soft), str(hard)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == [str(expected), str(expected)]
