"""How does a test run a script in another process?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    """Another Python with the same import path, running a script."""
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )
