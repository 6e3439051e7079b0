"""Jobs of NeMo-RL in an environment of its own; tests that need it run there, or say why not.

NeMo-RL is in no package registry. WEIGHBRIDGE_NEMO_RL names a checkout of it; then ``make test-frameworks`` makes the
environment, and names its Python in WEIGHBRIDGE_NEMO_RL_PYTHON.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.jobs import Job, running

ROOT = Path(__file__).parents[2]
FRAMEWORKS = ROOT / "tests" / "frameworks"
HERE = FRAMEWORKS / "nemo_rl_cpu"
PYTHON = Path(os.environ.get("WEIGHBRIDGE_NEMO_RL_PYTHON") or "/nowhere")
SOURCE = Path(os.environ.get("WEIGHBRIDGE_NEMO_RL") or "/nowhere")

needs_nemo_rl = pytest.mark.skipif(
    not (PYTHON.exists() and SOURCE.exists()),
    reason="NeMo-RL is in no registry: make test-frameworks WEIGHBRIDGE_NEMO_RL=CHECKOUT",
)


@contextmanager
def nemo_rl_job(folder: Path) -> Iterator[Job]:
    """A job that has not been asked anything yet; ended in the end."""
    with tempfile.TemporaryDirectory(prefix="wb", dir="/tmp") as short:  # Ray's sockets want short paths
        command = [PYTHON, "-W", "ignore", HERE / "nemo_rl_job.py"]
        with running(command, folder / "nemo_rl.log", _environment(short)) as job:
            yield job


def _environment(folder: str) -> dict[str, str]:
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "NRL_", "RAY_", "VLLM_"))}
    return mine | {
        "PYTHONPATH": os.pathsep.join(map(str, (HERE, FRAMEWORKS / "loggers", ROOT, SOURCE))),
        "HOME": folder,
        "RAY_TMPDIR": folder,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_AUTH_MODE": "disabled",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "TORCHDYNAMO_DISABLE": "1",  # the compiler would ask the device that is stood in for
        "NRL_DISABLE_NUMA_BINDING": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }
