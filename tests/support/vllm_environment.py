"""Environment of vLLM, made by `make install-vllm`. Tests that need vLLM run there, or are skipped with the reason.

``make test-vllm`` names its Python in WEIGHBRIDGE_VLLM_PYTHON. WEIGHBRIDGE_VLLM_KERNELS=0 says that it has no kernels
for CPUs, as ``make test-vllm-newest`` does: then nothing is computed, linear layers are not packed, and experts cannot
be processed.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

PYTHON = Path(os.environ.get("WEIGHBRIDGE_VLLM_PYTHON") or "/nowhere")
HAS_KERNELS = os.environ.get("WEIGHBRIDGE_VLLM_KERNELS") != "0"

needs_vllm = pytest.mark.skipif(not PYTHON.exists(), reason="vLLM has an environment of its own: make test-vllm")


def environment() -> dict[str, str]:
    """Environment variables of vLLM's processes: no network but loopback, and none of the user's caches."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "VLLM_"))}
    root = str(Path(__file__).parents[2])
    return mine | {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
