"""Prometheus' own checker, `promtool`: of Debian's package `prometheus`, or the one that ``WEIGHBRIDGE_PROMTOOL``
names.
"""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest


def promtool(*arguments: str, text: bytes | None = None) -> str:
    """Run promtool and return its output.

    Skips the test where it is not installed, and fails the test if promtool does.
    """
    tool = os.environ.get("WEIGHBRIDGE_PROMTOOL") or shutil.which("promtool")
    if tool is None:
        pytest.skip("there is no promtool")
    done = subprocess.run([tool, *arguments], input=text, capture_output=True, timeout=60, check=False)
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, said
    return said
