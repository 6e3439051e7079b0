"""Packs of environments for a GPU machine without a network: ``python -m tests.gpu.pack vllm``, which
``make pack-gpu ENV=vllm`` runs.

An environment is a stack of folders on PYTHONPATH, over what the machine has itself. Each is installed from a list of
exact versions beside this file, stripped of what an H100 does not need, checked (modules are imported here, without a
card; ``layers.toml`` names them), and cut into files small enough to be carried one at a time. Wants Linux on x86-64,
gcc, binutils and the machine's minor release of Python, which runs this.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.gpu.stubs import build_stubs

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "gpu"
MACHINE = "machine"
"""Packages of the machine: installed for the check, and never packed."""
PYTHON = (3, 12)
PIECE = "52MB"
"""Of a file: with the repository it stays below the 64 MiB that travel at a time."""


@dataclass(frozen=True)
class Layer:
    """A folder of packages.

    Args:
        over: layers that follow it on PYTHONPATH.
        stripped: globs of what it does without, in its folder.
        imports: modules that must be importable.
    """

    over: Sequence[str] = ()
    stripped: Sequence[str] = ()
    imports: Sequence[str] = ()


LAYERS = {name: Layer(**each) for name, each in tomllib.loads((HERE / "layers.toml").read_text("utf-8")).items()}


def install(name: str) -> Path:
    """The folder of a layer, installed and stripped unless it lies there as it is listed."""
    folder, stamp = BUILD / name, BUILD / f"{name}.installed"
    listed = HERE / f"{name}.txt"
    wanted = f"{LAYERS[name].stripped}\n{listed.read_text()}"
    if stamp.exists() and stamp.read_text() == wanted:
        return folder
    print(f"== {name}: installing what {listed.relative_to(ROOT)} lists", flush=True)
    stamp.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-qq", "--no-deps"]
    subprocess.run([*pip, "--no-compile", "--target", folder, "--requirement", listed], check=True)
    for path in sorted(found for glob in LAYERS[name].stripped for found in folder.glob(glob)):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    stamp.write_text(wanted)
    return folder


def write_plugins(folder: Path) -> None:
    """Metadata of weighbridge, whose code is the checkout's: engines find the plug-ins by it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    metadata = folder / f"weighbridge-{project['version']}.dist-info"
    metadata.mkdir(exist_ok=True)
    headers = {"Metadata-Version": "2.1", "Name": "weighbridge", "Version": project["version"]}
    (metadata / "METADATA").write_text("".join(f"{key}: {value}\n" for key, value in headers.items()))
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in each.items())
        for group, each in project["entry-points"].items()
    ]
    (metadata / "entry_points.txt").write_text("\n".join(groups))


def check(folders: Sequence[Path], imports: Sequence[str]) -> None:
    """Import modules out of a stack of folders and the checkout, and nothing else.

    Ends the program if one is not importable.
    """
    print(f"== importing {len(imports)} modules under a card that is not there", flush=True)
    sources = [ROOT, *(ROOT / each for each in ("clients", "storage", "service", "examples"))]
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(BUILD),
        "LD_LIBRARY_PATH": str(build_stubs(folders, BUILD / "stubs")),
        "PYTHONPATH": os.pathsep.join(map(str, [*folders, *sources])),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    # -S: what this Python has installed would hide what the folders lack
    command: list[str | Path] = [sys.executable, "-S", "-W", "ignore", HERE / "imports.py", *imports]
    if failed := subprocess.run(command, env=environment, check=False).returncode:
        sys.exit(f"cannot be imported: {failed} of {len(imports)}")


def cut(folder: Path) -> list[Path]:
    """A folder's content as one archive, cut into files."""
    prefix = folder.with_name(f"{folder.name}.txz.")
    for old in BUILD.glob(f"{prefix.name}*"):
        old.unlink()
    print(f"== {folder.name}: packing, some minutes", flush=True)
    archive = (
        'tar --sort=name --owner=0 --group=0 --exclude=__pycache__ -C "$0" -cf - . | xz -T0 -3 | split -b "$1" - "$2"'
    )
    subprocess.run(["bash", "-o", "pipefail", "-c", archive, folder, PIECE, prefix], check=True)
    return sorted(BUILD.glob(f"{prefix.name}*"))


def main() -> None:
    """Install, check and pack the environment that is named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("environment", choices=sorted(LAYERS.keys() - {MACHINE}))
    name = parser.parse_args().environment
    layer = LAYERS[name]
    if sys.version_info[:2] != PYTHON:
        sys.exit(f"the machine has Python {PYTHON[0]}.{PYTHON[1]}: run this with it, as by GPU_PYTHON=")
    folders = [install(each) for each in (name, *layer.over)]
    for folder in folders[:-1]:
        write_plugins(folder)
    check(folders, layer.imports)
    pieces = cut(folders[0])
    for piece in pieces:
        print(f"{piece.relative_to(ROOT)}: {piece.stat().st_size / 1e6:.0f} MB")
    print("how it is unpacked, and what goes on PYTHONPATH: docs/testing.md")


if __name__ == "__main__":
    main()
