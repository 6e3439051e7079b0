"""Does the job of deploy/slurm.sh give its ranks a service, end it only after them, and say how they ended? Scripts
stand for Slurm's commands.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.forked_commands import forked_commands
from tests.support.ports import own_network
from tests.support.raw_clients import tiny_folder
from weighbridge_storage.documents.names import ModelName

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
SLURM = {
    "scontrol": 'tr , "\\n" <<< "$3"',
    # of one node: counts the job's steps, runs the command, and turns SIGTERM into SIGKILL, as srun does
    "srun": """
        step=$(ls steps | wc -l)
        while [[ $1 == --* ]]; do shift; done
        SLURMD_NODENAME=$SLURM_JOB_NODELIST "$@" &
        echo $! > steps/$step
        trap 'kill -KILL $!' TERM
        wait $! && code=0 || code=$?
        echo "step $step ended" >> events
        exit $code
    """,
    "scancel": """
        echo "$*" >> events
        [[ $1 == --signal=TERM ]] && kill -TERM "$(cat "steps/${2#*.}")"
    """,
}
TRAINER = """
env | grep ^WEIGHBRIDGE_ | sort > found
weighbridge import HF_DIR acme/smol
exit 7
"""


def slurm(folder: Path) -> None:
    """Put Slurm's commands into a folder."""
    for name, script in SLURM.items():
        command = folder / name
        command.write_text(f"#!/usr/bin/env bash\nset -u\n{script}")
        command.chmod(0o755)


def settings(environment: Mapping[str, str], address: str) -> dict[str, str]:
    """The environment of a job of one node at an address of loopback."""
    return {
        **{name: value for name, value in environment.items() if not name.startswith("WEIGHBRIDGE_")},
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": address,
        "LISTEN": address,
        "STORE": "store",
        "SCRATCH": "scratch",
        "OPTIONS": "--memory-budget 64MiB",
    }


@dataclass(frozen=True)
class Node:
    """A folder and an address that stand for a job's only node.

    Attributes:
        environment: of the job.
        address: which no other run of the tests on this machine has.
    """

    environment: Mapping[str, str]
    address: str

    def start(self, trainer: str) -> subprocess.Popen[bytes]:
        """Start the job with a script as its trainer."""
        line = [ROOT / "deploy" / "slurm.sh", "bash", "-ec", trainer]
        return subprocess.Popen(line, env=self.environment)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.chdir(tmp_path)
    Path("deploy").symlink_to(ROOT / "deploy")
    Path("steps").mkdir()
    address = f"{own_network()}.4"
    with forked_commands(tmp_path / "bin") as commands:
        slurm(tmp_path / "bin")
        yield Node(settings(commands.environment, address), address)


def test_a_job_gives_its_ranks_a_service_and_ends_it_after_them(tmp_path: Path, node: Node) -> None:
    tiny_folder(Path("HF_DIR"))
    with node.start(TRAINER) as job:
        assert job.wait(200) == 7, "the trainer's"
    folder = tmp_path / "weighbridge-17"
    assert Path("found").read_text().splitlines() == [
        f"WEIGHBRIDGE_CA={folder}/tls/ca.pem",
        f"WEIGHBRIDGE_SERVER={node.address}:50051",
        f"WEIGHBRIDGE_TOKEN_FILE={folder}/token",
    ]
    assert (folder / "token").stat().st_mode & 0o077 == 0
    assert Path("events").read_text().splitlines() == ["step 1 ended", "--signal=TERM 17.0", "step 0 ended"]
    head = Path("store") / ModelName.parse("acme/smol").prefix / "head.json"
    assert json.loads(head.read_text())["refs"]["latest"] == {"version": 1}


def test_a_job_whose_time_ends_stops_its_ranks_and_then_its_service(node: Node) -> None:
    os.mkfifo("ready")
    with node.start("trap 'exit 9' TERM; echo > ready; sleep 60 & wait") as job:
        assert Path("ready").read_text() == "\n"
        job.terminate()
        assert job.wait(200) == 9
    assert Path("events").read_text().splitlines() == [
        "--signal=TERM 17.1",
        "step 1 ended",
        "--signal=TERM 17.0",
        "step 0 ended",
    ]


@pytest.mark.parametrize(("words", "variables"), [([], {"STORE": "store"}), (["true"], {})])
def test_a_job_without_a_trainer_or_a_store_says_so(words: list[str], variables: dict[str, str]) -> None:
    environment = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "17", **variables}
    line = [ROOT / "deploy" / "slurm.sh", *words]
    job = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=60)
    assert job.returncode != 0
    assert ("STORE: a bucket" if words else "usage: sbatch") in job.stderr
