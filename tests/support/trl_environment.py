"""Environment of TRL, beside that of vLLM, made by `make test-frameworks`.

Tests that need TRL run there, or are skipped with the reason.

``make test-frameworks`` names its Python in WEIGHBRIDGE_TRL_PYTHON. Variables of its processes are vLLM's.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

PYTHON = Path(os.environ.get("WEIGHBRIDGE_TRL_PYTHON") or "/nowhere")

needs_trl = pytest.mark.skipif(not PYTHON.exists(), reason="TRL has an environment of its own: make test-frameworks")
