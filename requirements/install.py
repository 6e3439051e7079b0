"""Installer of an environment, with progress: what the locks list, by hash, and weighbridge itself as it lies here.

``python requirements/install.py FOLDER --lock service --lock demo --torch 2.13.0`` makes the virtual environment FOLDER
with the Python that runs this, and fills it. The locks are complete: nothing is looked up, and a file of another hash
is refused. It needs the standard library alone. pip's own bars are for terminals, and are not drawn for packages in its
cache; this names the package that pip is at, everywhere.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
_PIN = re.compile(r"^[A-Za-z0-9._-]+(?:\[[^]]*\])?==", re.MULTILINE)
_TAKEN = re.compile(r"(?:Collecting (?P<named>[A-Za-z0-9._-]+)|Processing (?:\S*/)?(?P<file>[A-Za-z0-9._]+)-)")
"""What pip writes when it comes to a package: its name, or the place of its file."""
_UNPACKING = "Installing collected packages:"
_EVERY = 10
"""Packages from one line to the next where the output is no terminal."""
_KEPT_LINES = 20
"""Lines of pip's that are shown where it fails."""


def pinned(lock: Path) -> int:
    """The number of packages that a lock lists."""
    return len(_PIN.findall(lock.read_text("utf-8")))


def progress(lines: Iterable[str], total: int | None, every: int = 1) -> Iterator[str]:
    """Messages about a run of pip, from what it writes.

    Args:
        lines: of its standard output.
        total: packages that it was given; None where it finds out by itself which it needs.
        every: packages from one message to the next.

    Yields:
        A message whenever there is something new.
    """
    done = 0
    for line in lines:
        taken = _TAKEN.match(line)
        if taken is not None:
            done += 1
            if done in (1, total) or done % every == 0:
                yield f"{done}{f' of {total}' if total else ''}: {taken['named'] or taken['file']}"
        elif line.startswith(_UNPACKING):
            count = line.count(",") + 1
            yield f"unpacking {count} package{'s' * (count != 1)}"


def _run(title: str, command: Sequence[str], total: int | None = None) -> None:
    """Run pip and print how far it is. Ends the program where pip fails."""
    terminal = sys.stdout.isatty()
    print(f"== {title}", flush=True)
    started = time.monotonic()
    kept: list[str] = []

    def seen(lines: Iterable[str]) -> Iterator[str]:
        for line in lines:
            kept.append(line)
            yield line

    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as pip:
        for said in progress(seen(pip.stdout or ()), total, 1 if terminal else _EVERY):
            print(f"\r\033[K   {said}" if terminal else f"   {said}", end="" if terminal else "\n", flush=True)
        code = pip.wait()
    print("\r\033[K" if terminal else "", end="")
    if code:
        print("".join(kept[-_KEPT_LINES:]), end="", file=sys.stderr)
        raise SystemExit(f"pip ended with exit code {code} while it installed {title}")
    print(f"   {time.monotonic() - started:.0f} s", flush=True)


def main() -> None:
    """Make the environment, and fill it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lock", action="append", default=[], metavar="NAME", help="requirements/NAME.txt")
    parser.add_argument("--torch", required=True, metavar="VERSION", help="with what its build needs")
    parser.add_argument("--torch-index", default="", metavar="URL", help="index of torch; pip's own if empty")
    parser.add_argument("--alone", action="append", default=[], metavar="NAME==VERSION", help="without its needs")
    parser.add_argument("--pip", required=True, metavar="VERSION", help="of pip itself")
    parser.add_argument("--no-compile", action="store_true", help="leave bytecode to the processes that import")
    given = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036 (nothing has refused it yet)
        raise SystemExit("Python 3.11 or newer is needed")
    print(f"== environment: {given.folder} with {sys.executable}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(given.folder)], check=True)
    pip = [str(given.folder.absolute() / "bin/python"), "-m", "pip", "--disable-pip-version-check", "install"]
    subprocess.run([*pip, "-qq", f"pip=={given.pip}"], check=True)
    pip += ["--progress-bar", "off", *(["--no-compile"] if given.no_compile else [])]
    locks = [ROOT / "requirements" / f"{name}.txt" for name in given.lock]
    listed = sum(map(pinned, locks))
    files = [f"--requirement={lock}" for lock in locks]
    what = f"{listed} packages of {', '.join(given.lock)}, by hash"
    _run(what, [*pip, "--no-deps", "--require-hashes", *files], listed)
    # Its builds for CPU and for each CUDA are other files of one version, with needs of their own: no lock lists them.
    index = [f"--index-url={given.torch_index}"] if given.torch_index else []
    torch = f"torch=={given.torch}"
    _run(torch, [*pip, "--constraint=constraints.txt", *index, torch])
    for pin in given.alone:
        _run(pin, [*pip, "--no-deps", pin], 1)
    # setuptools warns of what is meant here
    _run(
        "weighbridge, with its C extension",
        [*pip, "-qq", "--no-deps", "--no-build-isolation", "--editable", "."],
    )


if __name__ == "__main__":
    main()
