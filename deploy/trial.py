"""Trial of a release: ``python deploy/trial.py 0.1.0`` installs it from dist/index as a user does, and runs the
README's lines with it.

One Python gets the service in a clean environment, and runs the README's Python code against it, which pushes and
pulls. Every Python of 3.11 to 3.13 that is on PATH gets the SDK alone, which without torch moves no weights: it
verifies that version, tags it, and reads the tag back.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
INDEX = ROOT / "dist" / "index" / "simple"
PYTHONS = ("python3.11", "python3.12", "python3.13")
_CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)
_VERSION = re.compile(r"weighbridge (?P<version>\S+) \(commit (?P<commit>[0-9a-f]{7,})\)")
_STOP_SECONDS = 60


class Failed(Exception):
    """A step that did not do what a user expects."""


def faults_of_version(said: str, version: str, commit: str) -> list[str]:
    """Faults of what ``weighbridge --version`` prints, for a version and the full hash of its commit."""
    found = _VERSION.fullmatch(said.strip())
    if found is None:
        return [f"weighbridge --version says {said.strip()!r}, and no commit"]
    right = found["version"] == version and commit.startswith(found["commit"])
    return [] if right else [f"weighbridge --version says {said.strip()!r}; expected {version} and {commit}"]


@dataclass(frozen=True)
class Environment:
    """A clean virtual environment."""

    folder: Path

    @classmethod
    def made(cls, python: str, folder: Path) -> Environment:
        """A new one for a Python."""
        _run(python, "-m", "venv", str(folder))
        return cls(folder)

    def script(self, name: str) -> str:
        """A program's path."""
        return str(self.folder / "bin" / name)

    def install(self, *requirements: str) -> None:
        """Install by pip, from the release's index and those that pip is configured with."""
        _run(self.script("pip"), "install", "--quiet", "--extra-index-url", INDEX.as_uri(), *requirements)

    def check(self, version: str, commit: str) -> None:
        """Fail unless it holds that release, and its C extension loads."""
        faults = faults_of_version(_run(self.script("weighbridge"), "--version"), version, commit)
        if faults:
            raise Failed("\n".join(faults))
        _run(self.script("python"), "-c", "import weighbridge; from weighbridge._memory import _native")


def _try_sdk(environment: Environment, variables: Mapping[str, str]) -> None:
    """Check the README's version, tag it, and read the tag back."""
    weighbridge, tag = environment.script("weighbridge"), environment.folder.name
    _run(weighbridge, "verify", "acme/smol@latest", env=variables)
    _run(weighbridge, "tag", "acme/smol@latest", tag, env=variables)
    versions = json.loads(_run(weighbridge, "versions", "acme/smol", "--json", env=variables))
    if not any(tag in each["refs"] for each in versions):
        raise Failed(f"no version has the tag {tag}: {versions}")


@contextmanager
def _service(environment: Environment, folder: Path) -> Iterator[dict[str, str]]:
    """A running service; yields the variables by which clients find it."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        grpc, http = (f"127.0.0.1:{each.getsockname()[1]}" for each in (one, other))
    line = [environment.script("weighbridge"), "serve", "--grpc", grpc, "--http", http]
    with (
        (folder / "serve.log").open("wb") as log,
        subprocess.Popen(line, cwd=folder, stdout=log, stderr=log) as process,
    ):
        try:
            yield {**os.environ, "WEIGHBRIDGE_SERVER": grpc}
        finally:
            process.terminate()
            process.wait(_STOP_SECONDS)


def _run(*line: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        line, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise Failed(f"{done.stdout}\n{' '.join(line)} ended with exit code {done.returncode}")
    return done.stdout


def _runs(python: str) -> bool:
    """Whether there is such a Python: pyenv has names of those that are not chosen."""
    return (
        bool(shutil.which(python)) and not subprocess.run([python, "-V"], capture_output=True, check=False).returncode
    )


def try_out(version: str, server: str, torch: str, torch_index: str) -> None:
    """Install and run a release.

    Args:
        version: the release.
        server: the Python that the service runs on.
        torch: the requirement of torch.
        torch_index: an index for it; "" for those of pip.

    Raises:
        Failed: a step failed.
    """
    commit = _run("git", "-C", str(ROOT), "rev-parse", f"v{version}^{{commit}}").strip()
    with tempfile.TemporaryDirectory(prefix="weighbridge-trial-") as place:
        folder, started = Path(place), time.monotonic()
        serving = Environment.made(server, folder / "serving")
        serving.install(torch, *(("--index-url", torch_index) if torch_index else ()))
        serving.install("--no-compile", f"weighbridge[service]=={version}")
        _say(f"{server}: the service is installed", started)
        serving.check(version, commit)
        code = _CODE.search((ROOT / "README.md").read_text("utf-8"))
        with _service(serving, folder) as variables:
            _run(serving.script("python"), "-c", code[1] if code else "", cwd=folder, env=variables)
            _say(f"{server}: the README's lines ran", started)
            for python in filter(_runs, PYTHONS):
                started = time.monotonic()
                alone = Environment.made(python, folder / python)
                alone.install(f"weighbridge=={version}")
                alone.check(version, commit)
                _try_sdk(alone, variables)
                _say(f"{python}: the SDK alone verified and tagged a version", started)


def _say(line: str, started: float) -> None:
    sys.stdout.write(f"== {line}: {time.monotonic() - started:.1f} s\n")
    sys.stdout.flush()


def main() -> int:
    """Try the release that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version")
    parser.add_argument("--server", default=PYTHONS[0], help="Python of the service (default %(default)s)")
    parser.add_argument("--torch", default="torch", help="requirement of torch (default %(default)s)")
    parser.add_argument("--torch-index", default="", help="index for torch, such as that of its builds for CPUs")
    asked = parser.parse_args()
    try:
        try_out(asked.version, asked.server, asked.torch, asked.torch_index)
    except Failed as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
