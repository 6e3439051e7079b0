"""Jobs of verl in an environment of its own, which `make test-frameworks` makes; tests that need it run there, or say
why not.

``make test-frameworks`` names its Python in WEIGHBRIDGE_VERL_PYTHON, and the folder of verl's sources, with its test
helpers, in WEIGHBRIDGE_VERL_SOURCE.
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
HERE = ROOT / "tests" / "frameworks" / "verl_cpu"
PYTHON = Path(os.environ.get("WEIGHBRIDGE_VERL_PYTHON") or "/nowhere")
SOURCE = Path(os.environ.get("WEIGHBRIDGE_VERL_SOURCE") or "/nowhere")

needs_verl = pytest.mark.skipif(
    not (PYTHON.exists() and SOURCE.exists()),
    reason="verl has an environment of its own: make test-frameworks",
)


@contextmanager
def verl_job(folder: Path) -> Iterator[Job]:
    """A job that has not been asked anything yet; ended in the end."""
    with tempfile.TemporaryDirectory(prefix="wb", dir="/tmp") as short:
        command = [PYTHON, HERE / "verl_job.py"]
        # Ray puts the folder before all else where its workers look for modules; its sockets want short paths
        with running(command, folder / "verl.log", _environment(short), SOURCE) as job:
            yield job


@contextmanager
def checkpoint_job(folder: Path, server: str, model: str) -> Iterator[Job]:
    """A job of ranks that save and load by verl's checkpoint managers, which keep what they save as training states of
    a model.
    """
    environment = _environment(str(folder)) | {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, HERE))),
        "WEIGHBRIDGE_SERVER": server,
        "WEIGHBRIDGE_CHECKPOINTS": model,
    }
    with running([PYTHON, HERE / "checkpoint_job.py"], folder / "verl.log", environment) as job:
        yield job


def _environment(folder: str) -> dict[str, str]:
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "RAY_", "VERL_"))}
    return mine | {
        "PYTHONPATH": os.pathsep.join(map(str, (SOURCE, HERE))),
        "VERL_PLATFORM": "test_cpu",
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_USE_EXTERNAL_MODULES": "cpu_platform",
        "RAY_TMPDIR": folder,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_AUTH_MODE": "disabled",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        # what is freed goes back at once: peaks of memory are measured
        "MALLOC_MMAP_THRESHOLD_": "131072",
        "MALLOC_TRIM_THRESHOLD_": "131072",
        "TOKENIZERS_PARALLELISM": "false",
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }
